"""What a grammar leaves no choice about is verified in one forward, and says what masked decoding says without that."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_constrained_rows import SOURCES, alone, parts, requests, ruled
from test_grammar import EOS, VOCABULARY
from tiny import Driver, make_request

from mlxbcd.engine.executor import Executor
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Speculated
from mlxbcd.plan.request import Request
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.forcing import Forcing
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.geometry import Key

BOTH = pytest.mark.parametrize("ahead", Ahead)
SCHEMA = Source.of_schema(
    {
        "type": "object",
        "properties": {"temperature": {"type": "boolean"}, "conditions": {"enum": ["sunny", "overcast"]}},
        "required": ["temperature", "conditions"],
        "additionalProperties": False,
    }
)
"""Most of such an object is the same whatever it says."""


def make_driver(ahead: Ahead) -> Driver:
    """On a machine where windows cost next to nothing."""
    _, forward, composition = parts()
    cheap = VerifyCosts({1: 1e-9, 32: 1.1e-9})
    return Driver(Executor(forward, composition, VOCABULARY, ahead, verify=cheap))


def proposing(request: Request) -> Request:
    return dataclasses.replace(request, proposes=request.constraint is not None)


def figures(driver: Driver, key: Key) -> Statistics:
    return [event for event in driver.events if isinstance(event, Speculated) and event.key == key][-1].statistics


@BOTH
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}, {"repetition_penalty": 1.4}])
def test_a_schema_saves_forwards_and_gives_the_same_text(settings: dict[str, Any], ahead: Ahead) -> None:
    plain = make_request([3, 7, 9], 80, [EOS], constraint=ruled(SCHEMA).copy, **settings)
    driver = make_driver(ahead)
    driver.prefill(0, proposing(plain))
    driver.finish()
    assert driver.tokens(0) == alone(plain)
    saved = figures(driver, 0)
    assert saved.forwards_saved > 0
    assert saved.accepted > 0


@BOTH
def test_rows_with_grammars_and_without_share_rounds_and_get_what_each_gets_alone(ahead: Ahead) -> None:
    driver, asked = make_driver(ahead), requests()
    for key, request in enumerate(asked):
        driver.prefill(key, proposing(request), widths=[2] if key % 2 else [])
    driver.finish()
    for key, request in enumerate(asked):
        assert driver.tokens(key) == alone(request), f"row {key}"
        assert len(driver.ends(key)) == 1
    assert sum(figures(driver, key).accepted for key in range(len(SOURCES))) > 0
    assert [figures(driver, key).drafted for key in range(len(SOURCES), len(asked))] == [0, 0, 0]


@BOTH
def test_a_grammar_that_does_not_propose_decodes_as_ever(ahead: Ahead) -> None:
    plain = make_request([3, 7, 9], 80, [EOS], constraint=ruled(SCHEMA).copy)
    driver = make_driver(ahead)
    driver.prefill(0, plain)
    driver.finish()
    assert driver.tokens(0) == alone(plain)
    assert (figures(driver, 0).drafted, figures(driver, 0).forwards_saved) == (0, 0)


def test_what_is_expected_of_a_grammar_follows_what_it_did() -> None:
    free, bound = Forcing(), Forcing()
    for _ in range(30):
        free.saw(0)
        bound.saw(10)
        bound.verified(10, 10)
    assert free.expected(31)[0] < 0.05
    assert bound.expected(31)[0] > 0.9
    assert len(bound.expected(31)) == 11
    assert len(bound.expected(4)) == 5
    for _ in range(30):
        bound.verified(10, 0)
    assert bound.chances(10)[0] < 0.3
