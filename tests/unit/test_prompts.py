"""What the prompts of all open requests hold is bounded, and counted to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.serve.prompts import Prompts, weight


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=40))
def test_the_total_is_what_is_held_and_never_over_the_limit(moves: list[tuple[int, int]]) -> None:
    prompts, held = Prompts(100), dict.fromkeys(range(5), 0)
    for who, size in moves:
        after = sum(held.values()) - held[who] + size
        if after > 100 and prompts.total:
            with pytest.raises(ServeError) as refused:
                prompts.replace(who, size)
            assert refused.value.code == "queue_full"
        else:
            prompts.replace(who, size)
            held[who] = size
        assert prompts.total == sum(held.values())
        assert prompts.total <= 100
    for who in held:
        prompts.hold(who, 0)
    assert (prompts.total, prompts._held) == (0, {})


def test_one_prompt_alone_is_never_too_much() -> None:
    prompts = Prompts(10)
    prompts.check(1000)
    prompts.hold("a", 1000)
    with pytest.raises(ServeError, match="retry when some have ended"):
        prompts.check(1)


def test_all_text_of_a_message_counts_wherever_it_is() -> None:
    long = "x" * 100_000
    messages = [wire.Message(role="user", content=long), wire.Message(role="assistant", content=long)]
    for request in (
        wire.Generate(id=1, prompt=long),
        wire.Generate(id=1, prompt="", stop=[long]),
        wire.Generate(id=1, messages=messages, template_options={"a": long}),
        wire.Count(id=1, messages=messages),
        wire.Generate(id=1, prompt="", logit_bias=dict.fromkeys(range(4000), 1.0)),
    ):
        assert weight(request) >= 100_000
    assert weight(wire.Generate(id=1, prompt="x" * 1000, max_tokens=10)) < 2500
