"""Packing is learnt: used where it pays on a machine that the test makes up, tried rarely, never past the budget."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.engine.packing import PackingRanges

ridings = st.integers(1, 32)
pieces = st.integers(1, 512)
seconds = st.floats(1e-3, 10)
runs = st.lists(st.tuples(ridings, pieces, seconds, seconds, st.booleans()), max_size=60)


def learn(
    ranges: PackingRanges,
    sizes: Callable[[random.Random], tuple[int, int]],
    gain: Callable[[int, int], float],
    *,
    times: int = 400,
    noise: float = 0.1,
    room: float = 2.0,
    seed: int = 0,
) -> list[tuple[int, int, bool]]:
    """Run mixed forwards on a machine where packing makes them `gain` times faster; what was chosen."""
    chance = random.Random(seed)
    chosen = []
    for _ in range(times):
        riding, total = sizes(chance)
        expected = 0.05 + 0.005 * total
        packed = ranges.choose(riding, total, expected, room * expected)
        took = expected * (1 + noise * chance.uniform(-1, 1)) / (gain(riding, total) if packed else 1)
        ranges.saw(riding, total, took, expected, packed=packed)
        chosen.append((riding, total, packed))
    return chosen


@given(ridings, pieces, seconds, seconds)
def test_what_was_never_measured_runs_separately(riding: int, piece: int, expected: float, budget: float) -> None:
    assert not PackingRanges().choose(riding, riding + piece, expected, budget)


@settings(max_examples=25)
@given(st.integers(1, 32), st.integers(1, 512), st.floats(1.25, 3), st.integers(0, 99))
def test_where_packing_pays_it_is_what_is_done(riding: int, piece: int, gain: float, seed: int) -> None:
    ranges = PackingRanges()
    chosen = learn(ranges, lambda _: (riding, riding + piece), lambda *_: gain, seed=seed)
    assert sum(packed for _, _, packed in chosen[100:]) >= 280
    ((_, _, measured),) = ranges.paying()
    assert measured == pytest.approx(gain, rel=0.2)


@settings(max_examples=15)
@given(st.integers(1, 32), st.integers(1, 512), st.floats(0.5, 1.0), st.integers(0, 99))
def test_where_packing_does_not_pay_it_is_tried_ever_more_rarely(
    riding: int, piece: int, gain: float, seed: int
) -> None:
    ranges = PackingRanges()
    chosen = learn(ranges, lambda _: (riding, riding + piece), lambda *_: gain, noise=0.04, times=2000, seed=seed)
    tried = [i for i, (_, _, packed) in enumerate(chosen) if packed]
    assert len(tried) <= 20
    assert sum(i >= 1000 for i in tried) <= 5
    assert not ranges.paying()


@settings(max_examples=25)
@given(st.floats(0.4, 0.9), st.integers(0, 99))
def test_each_range_of_sizes_is_learnt_by_itself(other: float, seed: int) -> None:
    def sizes(chance: random.Random) -> tuple[int, int]:
        return chance.choice([(8, 40), (2, 500)])

    ranges = PackingRanges()
    learn(ranges, sizes, lambda riding, _: 1.5 if riding == 8 else other, seed=seed)
    assert [(riding, total) for riding, total, _ in ranges.paying()] == [(8, 64)]


@given(runs, ridings, pieces, seconds)
def test_nothing_is_tried_that_is_not_expected_to_fit(
    seen: list[tuple[int, int, float, float, bool]], riding: int, piece: int, expected: float
) -> None:
    """With no room for it, the way not taken is never tried, however long it hasn't been."""
    ranges = measured(seen)
    usual = bool([sizes for sizes in ranges.paying() if _holds(sizes, riding, riding + piece)])
    assert ranges.choose(riding, riding + piece, expected, 0.0) == usual


@given(runs, ridings, pieces, seconds, seconds)
def test_what_was_kept_across_a_restart_decides_as_before(
    seen: list[tuple[int, int, float, float, bool]], riding: int, piece: int, expected: float, budget: float
) -> None:
    ranges = measured(seen)
    again = PackingRanges.restored(json.loads(json.dumps(ranges.saved())))
    assert again.saved() == ranges.saved()
    assert again.choose(riding, riding + piece, expected, budget) == ranges.choose(
        riding, riding + piece, expected, budget
    )


def test_a_machine_that_changes_is_learnt_anew() -> None:
    ranges = PackingRanges()
    learn(ranges, lambda _: (8, 40), lambda *_: 1.5)
    assert ranges.paying()
    learn(ranges, lambda _: (8, 40), lambda *_: 0.8)
    assert not ranges.paying()
    learn(ranges, lambda _: (8, 40), lambda *_: 1.5, times=2000)
    assert ranges.paying()


def test_a_measurement_taken_while_the_machine_slept_changes_nothing() -> None:
    ranges = PackingRanges()
    learn(ranges, lambda _: (8, 40), lambda *_: 1.6)
    ranges.saw(8, 40, 1000.0, 0.25, packed=True)
    assert ranges.paying()


@pytest.mark.parametrize(
    "kept",
    [
        {"8": {}},
        {"8/64": None},
        {"64/8": {"separate": [1, 1.0], "packed": [0, 1.0], "packs": False, "waited": 0, "patience": 8}},
        {"8/64": {"separate": [1, -1.0], "packed": [0, 1.0], "packs": False, "waited": 0, "patience": 8}},
        {"8/64": {"separate": [1, float("nan")], "packed": [0, 1.0], "packs": False, "waited": 0, "patience": 8}},
        [],
    ],
)
def test_what_is_no_record_of_ranges_is_refused(kept: object) -> None:
    with pytest.raises(ValueError, match="packing ranges"):
        PackingRanges.restored(kept)


def measured(seen: list[tuple[int, int, float, float, bool]]) -> PackingRanges:
    ranges = PackingRanges()
    for riding, piece, took, expected, packed in seen:
        ranges.saw(riding, riding + piece, took, expected, packed=packed)
    return ranges


def _holds(sizes: tuple[int, int, float], riding: int, total: int) -> bool:
    most_riding, most, _ = sizes
    return most_riding // 2 < riding <= most_riding and most // 2 < total <= most
