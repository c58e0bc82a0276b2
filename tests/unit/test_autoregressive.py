"""Plain decoding of a group: what a row makes of its samples, and what a step costs in memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from tiny import LLAMA, VOCABULARY, make_model, make_request, oracle, parts

from mlxbcd.engine.calibrate import faster_ahead
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.methods.events import Drawn, Event, Failed
from mlxbcd.methods.step import EagerSteps
from mlxbcd.model.forward import Forward, Group
from mlxbcd.sampling.sampler import RowSampler, Sample, sample
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from tracing import needs_a_compiler, traced

BOTH = pytest.mark.parametrize("ahead", Ahead)
EOS = 7


def make_row(key: Any = 0, max_tokens: int = 3, drawn: int = 0) -> Row:
    request = make_request([1], max_tokens, eos=[EOS])
    return Row(key, request, RowSampler(request.sampling, [1], VOCABULARY, drawn), drawn=drawn)


# -- one token


def test_a_row_goes_on_after_an_ordinary_token() -> None:
    row = make_row()
    assert row.take(Sample(5, finite=True)) == Drawn(0, Sample(5, finite=True), None)
    assert (row.pending, row.drawn, row.ended) == (5, 1, False)


@pytest.mark.parametrize(("token", "drawn", "end"), [(EOS, 0, "stop"), (5, 2, "length"), (EOS, 2, "stop")])
def test_the_end_token_goes_before_the_budget(token: int, drawn: int, end: str) -> None:
    row = make_row(drawn=drawn)
    event = row.take(Sample(token, finite=True))
    assert isinstance(event, Drawn)
    assert event.ended == end
    assert row.ended
    assert row.exhausted


@pytest.mark.parametrize("token", [5, EOS])
def test_a_token_of_broken_logits_is_a_failure_whatever_it_is(token: int) -> None:
    row = make_row()
    event = row.take(Sample(token, finite=False))
    assert isinstance(event, Failed)
    assert event.error.code == "device_error"
    assert row.ended
    assert row.poisoned


def test_a_row_is_exhausted_as_soon_as_its_last_token_is_in_flight() -> None:
    row = make_row(max_tokens=2, drawn=1)
    before = row.exhausted
    row.sampler.advance(mx.array([4]))
    assert (before, row.exhausted, row.ended) == (False, True, False)


# -- groups


@pytest.fixture
def events() -> list[Event]:
    return []


@BOTH
def test_a_group_delivers_a_step_one_call_later(ahead: Ahead, events: list[Event]) -> None:
    group = make_group(ahead)
    group.step(events.extend)
    assert events == []
    group.step(events.extend)
    assert len(events) == 1


@BOTH
def test_settling_delivers_what_is_in_flight_and_changes_no_token(ahead: Ahead, events: list[Event]) -> None:
    group = make_group(ahead, max_tokens=8)
    while len(group):
        group.step(events.extend)
        group.settle(events.extend)
    expected = oracle(make_request([1], 8))[1:]
    assert [event.sample.token for event in events if isinstance(event, Drawn)] == expected


@BOTH
def test_a_discarded_group_is_empty_and_takes_rows_again(ahead: Ahead, events: list[Event]) -> None:
    group = make_group(ahead)
    group.step(events.extend)
    assert group.discard() == [0]
    assert len(group) == 0
    assert group.nbytes == 0
    group.step(events.extend)
    assert events == []
    enter(group, make_row(1))
    group.step(events.extend)
    group.settle(events.extend)
    assert [event.key for event in events] == [1]


def test_a_row_that_runs_alone_takes_its_state_with_it(events: list[Event]) -> None:
    forward, composition = parts("llama")
    group = DecodeGroup(forward, None, Ahead.BUILD)
    state = AloneRow(composition, 0)
    row = prefilled(forward, state, make_row(max_tokens=4))
    group.adopt(row, state)
    assert group.nbytes > 0
    while len(group):
        group.step(events.extend)
    assert [e.sample.token for e in events if isinstance(e, Drawn)] == oracle(make_request([1], 4))[1:]
    assert group.nbytes == 0


@BOTH
def test_steps_are_timed_once_and_from_when_the_device_was_free(ahead: Ahead, events: list[Event]) -> None:
    group = make_group(ahead, max_tokens=6)
    began = time.perf_counter()
    group.step(events.extend)
    assert group.timings() == []
    group.wait()
    group.wait()
    (first,) = group.timings()
    group.step(events.extend)
    group.step(events.extend)
    group.settle(events.extend)
    timings = [first, *group.timings()]
    assert [rows for rows, _ in timings] == [1, 1, 1]
    assert sum(seconds for _, seconds in timings) <= time.perf_counter() - began


@pytest.mark.parametrize("faster", Ahead)
@pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])
def test_the_mode_that_decodes_faster_is_found_by_trying_both(
    faster: Ahead, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, composition = parts("llama")
    if alone:
        composition = dataclasses.replace(composition, reason="told to")
    now = [0.0]
    step = DecodeGroup.step

    def timed(group: DecodeGroup, emit: Any) -> None:
        step(group, emit)
        now[0] += 1.0 if group._ahead is faster else 1.5

    monkeypatch.setattr(DecodeGroup, "step", timed)
    monkeypatch.setattr("mlxbcd.engine.calibrate.time.perf_counter", lambda: now[0])
    assert faster_ahead(forward, composition, VOCABULARY) is faster


# -- memory


ROWS = 8


@BOTH
@pytest.mark.parametrize("layers", [1, 2, 30])
def test_a_step_needs_no_copy_of_the_keys_and_values(layers: int, ahead: Ahead) -> None:
    assert max(shares_of_state(layers, ahead)) <= 0.05


@needs_a_compiler
@BOTH
@pytest.mark.parametrize("layers", [1, 2, 30])
def test_neither_does_a_compiled_step(layers: int, ahead: Ahead) -> None:
    with traced():
        assert max(shares_of_state(layers, ahead, compiled=True)) <= 0.05


def test_that_measurement_would_see_a_copy() -> None:
    assert max(shares_of_state(1, Ahead.BUILD, hold_a_view=True)) > 0.3


def shares_of_state(layers: int, ahead: Ahead, *, hold_a_view: bool = False, compiled: bool = False) -> Iterator[float]:
    """For each of some decode steps: the peak of memory over what was active, as a share of the state's bytes."""
    shape = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": layers}
    model = make_model(LLAMA | shape)
    forward, composition = Forward(model), inspect(model, "llama")
    steps = CompiledSteps(forward, always=True) if compiled else EagerSteps(forward)
    group = DecodeGroup(forward, Rows(composition), ahead, steps)
    fill(group, forward, composition, 3000 if layers < 3 else 1000)
    for _ in range(3):
        group.step(ignore)
    for _ in range(6):
        state = group._state
        assert isinstance(state, Rows)
        view = state.layouts[0].arrays()[0][:1] if hold_a_view else None
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        group.step(ignore)
        del view
        yield (mx.get_peak_memory() - active) / group.nbytes
        assert (steps.off is None) == compiled
    group.settle(ignore)


def fill(group: DecodeGroup, forward: Forward, composition: Composition, length: int) -> None:
    """Let rows of somewhat different lengths join, all with prefixes of one long prompt."""
    rows = Rows(composition)
    commit(rows.prepare(join=[Joiner("long", COLD, length)]))
    for _ in range(length // 500):
        turn = rows.begin(500)
        forward.run([Group(mx.zeros((1, 500), mx.int32), turn.caches)])
        mx.eval(turn.arrays())
        turn.resolve()
    for key in range(ROWS):
        row = make_row(key, 1000)
        row.take(Sample(1, finite=True))
        own = length - 5 * key
        group.join(row, Joiner(key, rows.extract("long", own), own + 1))


# -- helpers


def ignore(events: Any) -> None:
    """Nobody listens."""


def prefilled(forward: Forward, state: Rows | AloneRow, row: Row) -> Row:
    """The row after its prompt of one token."""
    turn = state.begin(1)
    (hidden,) = forward.run([Group(mx.array([[1]]), turn.caches)])
    (drawn,) = sample(forward.head(hidden)[:, -1], [row.sampler]).read()
    row.take(drawn)
    turn.resolve()
    return row


def enter(group: DecodeGroup, row: Row) -> None:
    forward, composition = parts("llama")
    state = Rows(composition)
    commit(state.prepare(join=[Joiner(row.key, COLD, 1)]))
    prefilled(forward, state, row)
    group.join(row, Joiner(row.key, state.read(row.key), 2))


def make_group(ahead: Ahead, max_tokens: int = 4) -> DecodeGroup:
    """A group of one row, whose first token has been drawn."""
    forward, composition = parts("llama")
    group = DecodeGroup(forward, Rows(composition), ahead)
    enter(group, make_row(max_tokens=max_tokens))
    return group
