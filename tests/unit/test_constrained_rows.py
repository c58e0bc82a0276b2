"""Rows with grammars decode beside others: each gets what it gets alone, and the others notice nothing."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from test_constraint import CLOSE, OPEN, constraint
from test_grammar import BACKEND, EOS, TOKENS, VOCABULARY
from tiny import Driver, generate, make_model, make_request
from tiny_directory import CONFIG

from mlxbcd.engine.executor import Executor
from mlxbcd.errors import ServeError
from mlxbcd.methods.autoregressive import Ahead, Row
from mlxbcd.methods.events import Drawn, Failed
from mlxbcd.model.forward import Forward
from mlxbcd.plan.request import Request
from mlxbcd.sampling.constraint import RowConstraint
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.sampling.sampler import RowSampler, Sample, Samplers, sample
from mlxbcd.state.composition import Composition, inspect

BOTH = pytest.mark.parametrize("ahead", Ahead)
SOURCES: Final = (
    Source("regex", "[a-f]{3,9}"),
    Source.of_choices(["yes", "no", "never", "naïve"]),
    Source.of_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    Source("grammar", 'start: "<" word ("," word)* ">"\nword: /[xyz]{1,4}/'),
    Source.of_schema({"enum": [{"a": [1, "ü"]}, None, 17]}),
    Source("regex", r"(\d\d:){2}\d\d"),
    Source.of_schema({"type": "string", "maxLength": 6}),
    Source("regex", "(the|a) ?#+"),
)
"""Eight grammars; some end by themselves, some by an end token."""


@cache
def parts() -> tuple[Any, Forward, Composition]:
    model = make_model(CONFIG, 3)
    return model, Forward(model), inspect(model, CONFIG["model_type"])


def make_driver(ahead: Ahead, *, alone: bool = False) -> Driver:
    _, forward, composition = parts()
    if alone:
        composition = dataclasses.replace(composition, reason="told to")
    return Driver(Executor(forward, composition, VOCABULARY, ahead))


def ruled(source: Source) -> RowConstraint:
    return RowConstraint(VOCABULARY, [EOS], TOKENS.compile(source).start())


def requests() -> list[Request]:
    """One for each grammar, of all kinds of sampling, and three without any."""
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": True, "top_logprobs": 3},
        {"temperature": 1.5, "top_k": 20, "min_p": 0.02},
        {"temperature": 1.2, "repetition_penalty": 1.3, "logit_bias": ((5, 2.0),)},
    ]
    ask = []
    for i, source in enumerate([*SOURCES, None, None, None]):
        row = ruled(source).copy if source is not None else None
        setting = settings[i % len(settings)] | {"seed": 70 + i}
        ask.append(make_request([1 + i, 7, 9, 30 + 2 * i], 24, [EOS], constraint=row, **setting))
    return ask


def alone(request: Request) -> list[int]:
    return generate(parts()[0], request, VOCABULARY)


@BOTH
def test_eight_grammars_at_once_give_what_each_gives_alone(ahead: Ahead) -> None:
    driver, asked = make_driver(ahead), requests()
    for key, request in enumerate(asked):
        # Rows join while others are at their grammars, some prompts in pieces.
        driver.prefill(key, request, widths=[2] if key % 2 else [])
    driver.finish()
    for key, request in enumerate(asked):
        assert driver.tokens(key) == alone(request), f"row {key}"
        assert len(driver.ends(key)) == 1
    assert {"complete", "stop"} <= {end for key in range(8) for end in driver.ends(key)}


@BOTH
def test_a_row_that_runs_alone_follows_its_grammar(ahead: Ahead) -> None:
    driver = make_driver(ahead, alone=True)
    for key, request in enumerate(requests()[:4]):
        driver.prefill(key, request)
        driver.finish()
        assert driver.tokens(key) == alone(request)


@BOTH
def test_what_was_asked_for_is_what_comes(ahead: Ahead) -> None:
    driver, asked = make_driver(ahead), requests()
    for key, request in enumerate(asked):
        driver.prefill(key, request)
    driver.finish()
    for key, source in enumerate(SOURCES):
        matcher = TOKENS.compile(source).start()
        tokens = [token for token in driver.tokens(key) if token != EOS]
        matcher.accept(*tokens)
        assert not matcher.fault
        if driver.ends(key) != ["length"]:
            assert EOS in {token for token in range(VOCABULARY) if matcher.mask()[token // 32] >> (token % 32) & 1}


@BOTH
def test_reasoning_ends_at_its_budget_whatever_is_beside_it(ahead: Ahead) -> None:
    budgets = [0, 1, 3, 8]
    driver = make_driver(ahead)
    asked = [
        make_request([2, 3 + budget], 14, [EOS], constraint=constraint(budget=budget, inside=True).copy)
        for budget in budgets
    ]
    for key, request in enumerate([*asked, requests()[0], requests()[-1]]):
        driver.prefill(key, request)
    driver.finish()
    for key, (budget, request) in enumerate(zip(budgets, asked, strict=True)):
        tokens = driver.tokens(key)
        assert tokens == alone(request)
        assert CLOSE in tokens[: budget + 1] or EOS in tokens


@BOTH
def test_thinking_comes_first_and_then_the_grammar(ahead: Ahead) -> None:
    driver = make_driver(ahead)
    bias = ((OPEN, 1e3),)
    row = constraint(grammar=True, budget=5)
    request = make_request([4, 5], 30, [EOS], constraint=row.copy, logit_bias=bias)
    driver.prefill(0, request)
    driver.finish()
    tokens = driver.tokens(0)
    assert tokens[0] == OPEN
    assert tokens[6] == CLOSE
    assert BACKEND.decode([token for token in tokens[7:] if token != EOS]) in ("a", "ab")


@BOTH
def test_resumed_rows_follow_their_grammar_on(ahead: Ahead) -> None:
    driver = make_driver(ahead)
    for key, request in enumerate(requests()[:8]):
        whole = alone(request)
        row = ruled(SOURCES[key])
        row.accept(*whole[:2])
        settings = {name: getattr(request.sampling, name) for name in request.sampling.__slots__}
        again = make_request(request.prompt, 24, [EOS], constraint=row.copy, forced=whole[:2], **settings)
        if len(whole) > 2 and whole[1] != EOS:
            driver.prefill(key, again)
            driver.finish()
            assert driver.tokens(key) == whole[2:]


class Broken(RowConstraint):
    """Fails at the third token, as a grammar that has grown too complex does."""

    accepted = 0

    @property
    def fault(self) -> str:
        return "too complex" if self.accepted >= 3 else ""

    def accept(self, *tokens: int) -> None:
        self.accepted += len(tokens)


@BOTH
def test_a_grammar_that_can_no_longer_be_followed_fails_its_row_alone(ahead: Ahead) -> None:
    driver = make_driver(ahead)
    asked = [requests()[8], make_request([3, 4], 20, [EOS], constraint=lambda: Broken(VOCABULARY, [EOS]))]
    for key, request in enumerate(asked):
        driver.prefill(key, request)
    driver.finish()
    assert driver.tokens(0) == alone(asked[0])
    assert len(driver.tokens(1)) == 2
    (failed,) = (event for event in driver.events if isinstance(event, Failed))
    assert (failed.key, failed.error.code) == (1, "grammar_invalid")
    assert "too complex" in failed.error.message


def take(token: int, *, drawn: int = 0, before: str = "", source: Source = SOURCES[1]) -> str | ServeError | None:
    row = ruled(source)
    row.accept(*BACKEND.encode(before).ids)
    request = make_request([1], 5, [EOS])
    event = Row(0, request, RowSampler(request.sampling, [1], VOCABULARY, drawn, row), drawn=drawn).take(
        Sample(token, finite=True)
    )
    return event.ended if isinstance(event, Drawn) else event.error


def test_the_end_token_goes_before_the_grammar_and_the_grammar_before_the_budget() -> None:
    (last,) = BACKEND.encode("o").ids
    assert take(last, before="n") == "complete"
    assert take(last, before="n", drawn=4) == "complete"
    assert take(BACKEND.encode("e").ids[0], before="n", drawn=4) == "length"
    assert take(EOS, before="no", drawn=4) == "stop"
    assert take(EOS, before="a", source=Source("regex", "a+")) == "stop"


def test_only_rows_with_a_constraint_pay_for_masks() -> None:
    """The draw of a batch without any has no mask in its graph, and one with a row has it for that row alone."""
    plain, ruled_row = requests()[8], requests()[0]
    samplers = [
        RowSampler(request.sampling, request.prompt, VOCABULARY, constraint=request.constraint and request.constraint())
        for request in (plain, plain, ruled_row)
    ]
    assert all("allowed" not in inputs for inputs in Samplers(samplers[:2]).inputs())
    masks = [inputs["allowed"].shape for inputs in Samplers(samplers).inputs() if "allowed" in inputs]
    assert masks == [(1, -(-VOCABULARY // 32))]
    assert [Samplers(samplers[:2]).wait, Samplers(samplers).wait] == [False, True]


def test_masked_draws_follow_the_distribution_that_is_left() -> None:
    """Over many seeds: what is ruled out never comes, the rest as often as its share."""
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1] + [1e-30] * (VOCABULARY - 4)]))

    class Odd(RowConstraint):
        def mask(self) -> Any:
            words = np.zeros(-(-VOCABULARY // 32), dtype=np.uint32)
            words[0] = 0b1010
            return words

    counts = dict.fromkeys(range(4), 0)
    for setting in itertools.product(range(400), [{}, {"top_k": 3}, {"top_p": 0.99}]):
        seed, filters = setting
        request = make_request([1], temperature=1.0, seed=seed, **filters)
        sampler = RowSampler(request.sampling, [1], VOCABULARY, constraint=Odd(VOCABULARY, [EOS]))
        counts[sample(logits, [sampler]).read()[0].token] += 1
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] / 1200 - 0.75) < 0.05
