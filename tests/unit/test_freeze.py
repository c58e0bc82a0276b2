"""Freezing a request: what decides its result is checked and fixed at submit, or refused with a reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.plan.freeze import check, check_text, freeze
from mlxbcd.plan.request import Request, Sampling

HELLO = [wire.Message(role="user", content="hello")]


def frozen(
    tokens: list[int] | None = None, context: int = 100, defaults: dict[str, Any] | None = None, **fields: Any
) -> Request:
    return freeze(
        wire.Generate(id=1, prompt="x", **fields),
        [1, 2, 3] if tokens is None else tokens,
        seed=7,
        eos=frozenset({9}),
        defaults=defaults or {},
        context=context,
        vocab_size=50,
        max_tokens=40,
    )


def refusal(call: Any, *args: Any, **kwargs: Any) -> ServeError:
    with pytest.raises(ServeError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_a_plain_request_freezes_to_greedy_sampling() -> None:
    assert frozen() == Request(prompt=(1, 2, 3), max_tokens=40, eos=frozenset({9}), sampling=Sampling(seed=7))


def test_what_the_request_says_goes_before_the_models_defaults_and_those_before_none() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    sampling = frozen(defaults=defaults, temperature=0.0, top_k=0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.9, 0, 0.0)


def test_every_sampling_field_of_the_wire_arrives() -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    sampling = dataclasses.asdict(frozen(**asked, logit_bias={5: 1.0, 2: -3.0}).sampling)
    assert sampling == asked | {"seed": 7, "logit_bias": ((2, -3.0), (5, 1.0))}


@pytest.mark.parametrize("asked", [5e-324, 1e-45, 1e-38])
def test_no_repetition_penalty_is_so_small_that_dividing_by_it_overflows(asked: float) -> None:
    for request in (frozen(repetition_penalty=asked), frozen(defaults={"repetition_penalty": asked})):
        assert np.isfinite(np.float32(1e4) / np.float32(request.sampling.repetition_penalty))


def test_nothing_the_caller_changes_later_changes_the_request() -> None:
    tokens, stop, bias = [1, 2], ["a"], {3: 1.0}
    request = frozen(tokens, stop=stop, logit_bias=bias)
    before = (request.prompt, request.stop, request.sampling.logit_bias)
    tokens.append(5)
    stop.append("b")
    bias[4] = 2.0
    assert (request.prompt, request.stop, request.sampling.logit_bias) == before


@settings(derandomize=True)
@given(st.integers(1, 120), st.none() | st.integers(1, 200))
def test_what_is_frozen_fits_the_context_and_what_does_not_is_refused(prompt: int, asked: int | None) -> None:
    fits = prompt + (asked or 1) <= 100
    if fits:
        request = frozen([1] * prompt, max_tokens=asked)
        assert request.max_tokens == (asked or min(40, 100 - prompt))
        assert len(request.prompt) + request.max_tokens <= 100
    else:
        error = refusal(frozen, [1] * prompt, max_tokens=asked)
        assert error.code == "context_too_long"
        assert (error.data["prompt"], error.data["context"]) == (prompt, 100)
        assert error.data["fields"] == (["max_tokens"] if prompt < 100 else [])


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(frozen, []).code == "bad_request"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [1, 50]},
        {"logit_bias": {50: 1.0}},
        {"resume": wire.Resume(stream="s", tokens=[50])},
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_wherever_it_stands(fields: dict[str, Any]) -> None:
    error = refusal(frozen, **fields)
    assert error.code == "bad_request"
    assert "50" in error.message


def test_a_resumed_request_brings_its_tokens_within_its_budget() -> None:
    assert frozen(resume=wire.Resume(stream="s", tokens=[4, 5]), max_tokens=2).forced == (4, 5)
    error = refusal(frozen, resume=wire.Resume(stream="s", tokens=[4, 5]), max_tokens=1)
    assert error.code == "bad_request"


@pytest.mark.parametrize("stream", ["a\nERROR", "../x", "a\0", "\x1b[2J", "ab\n", "ä"])
def test_a_stream_is_named_by_the_daemon_alone(stream: str) -> None:
    request = wire.Generate(id=1, prompt="x", seed=1, resume=wire.Resume(stream=stream, tokens=[1]))
    assert refusal(check, request).code == "bad_request"


# -- before any model is known


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x"},
        {"prompt": ""},
        {"messages": HELLO, "template_options": {"enable_thinking": True}},
        {"prompt": "x", "logprobs": True, "top_logprobs": 3},
        {"prompt": "x", "resume": wire.Resume(stream="s", tokens=[1]), "seed": 3},
        {"prompt": "x", "resume": wire.Resume(stream="s", tokens=[1]), "temperature": 0.0},
    ],
)
def test_a_sound_request_passes(fields: dict[str, Any]) -> None:
    check(wire.Generate(id=1, **fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "messages"),
        ({"prompt": "x", "messages": HELLO}, "messages"),
        ({"prompt": "x", "template_options": {"a": 1}}, "template_options"),
        ({"prompt": "x", "top_logprobs": 3}, "logprobs"),
        ({"prompt": "x", "resume": wire.Resume(stream="s", tokens=[1])}, "seed"),
        ({"prompt": "x", "resume": wire.Resume(stream="s", tokens=[1]), "temperature": 0.5}, "seed"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    error = refusal(check, wire.Generate(id=1, **fields))
    assert error.code == "bad_request"
    assert named in error.message


@pytest.mark.parametrize("kind", [wire.Tokenize, wire.Count])
def test_requests_for_tokens_are_checked_alike(kind: Any) -> None:
    check_text(kind(id=1, text="x"))
    check_text(kind(id=1, messages=HELLO, template_options={"a": 1}))
    for fields in ({}, {"text": "x", "messages": HELLO}, {"text": "x", "template_options": {"a": 1}}):
        error = refusal(check_text, kind(id=1, **fields))
        assert error.code == "bad_request"
        assert kind.__struct_config__.tag in error.message or "template_options" in error.message
