"""Whatever is sent over HTTP is refused by name, or becomes a request that the wire takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import request, wire
from mlxbc.http import asked, translate
from mlxbc.http.failures import Refused, of_decoding

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.text(max_size=4)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}), max_size=2)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SAID = st.sampled_from(["system", "developer", "user", "assistant"])
CALLS = st.lists(st.fixed_dictionaries({"id": st.text(max_size=3), "function": st.just({"name": "f"})}), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": SAID, "content": st.text(max_size=4) | PARTS})
RESULT = st.fixed_dictionaries({"role": st.just("tool"), "content": PARTS, "tool_call_id": st.text(max_size=3)})
CALLING = st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": CALLS}, optional={"content": JSON})
FUNCTION = st.fixed_dictionaries({"name": st.sampled_from(["f", "g"])}, optional={"parameters": st.just({})})
WHERE = st.floats(0, 1)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(st.one_of(MESSAGE, MESSAGE, MESSAGE, RESULT, CALLING), min_size=1, max_size=3),
    "prompt": st.text(max_size=4) | st.lists(st.text(max_size=4), min_size=1, max_size=3),
    "tools": st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]),
    "response_format": st.sampled_from(
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}]
    ),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": st.text(max_size=4) | PARTS}),
    "reasoning_effort": st.sampled_from(["none", "low", "high", "odd"]),
    "service_tier": st.sampled_from(["auto", "flex", "odd"]),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=17),
    "logprobs": st.booleans() | st.integers(0, 22),
    "model": st.text(max_size=4),
    "user": st.text(max_size=4),
    "prompt_cache_key": st.text(max_size=4),
    **dict.fromkeys(("stream", "store", "parallel_tool_calls", "echo"), st.booleans()),
    **dict.fromkeys(("n", "seed", "max_tokens", "max_completion_tokens", "top_k", "best_of"), st.integers(0, 18)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), WHERE),
    "logit_bias": st.dictionaries(st.integers(-1, 5).map(str), st.integers(-101, 101), max_size=2),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
}


def bodies(kind: type[asked.Chat | asked.Completion], needed: str) -> st.SearchStrategy[bytes]:
    """Bodies with any of the fields of a kind, and perhaps one that it hasn't."""
    fields = {name: LIKELY.get(name, st.none()) | LIKELY.get(name, JSON) | JSON for name in kind.__struct_fields__}
    others = {name: value for name, value in fields.items() if name != needed} | {"unknown": JSON}
    some = st.lists(st.sampled_from(sorted(others)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries(
            {needed: LIKELY[needed] | LIKELY[needed] | fields[needed], **{name: others[name] for name in names}}
        )
    )
    return some.map(msgspec.json.encode)


def check(body: bytes, kind: Any, understand: Any) -> None:
    try:
        order = understand(msgspec.json.decode(body, type=kind))
    except msgspec.MsgspecError as error:
        refused = of_decoding(error, kind)
        assert refused.status == 400
        assert len(refused.body) < 2000
        return
    except Refused as error:
        assert_named(error)
        return
    for fields in order.generate:
        prompt, messages = fields.pop("prompt", None), fields.pop("messages", None)
        assert isinstance(request.generate(wire.Generate, 1, prompt, messages, fields), wire.Generate)


def assert_named(refused: Refused) -> None:
    assert refused.detail.param


@given(bodies(asked.Chat, "messages"))
def test_a_chat_is_refused_or_taken(body: bytes) -> None:
    check(body, asked.Chat, translate.chat)


@given(bodies(asked.Completion, "prompt"))
def test_a_completion_is_refused_or_taken(body: bytes) -> None:
    check(body, asked.Completion, translate.completion)


@given(st.binary(max_size=40))
def test_what_is_no_json_is_told_so(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError) as caught:
        msgspec.json.decode(body, type=asked.Chat)
    assert of_decoding(caught.value, asked.Chat).status == 400
