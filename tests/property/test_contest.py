"""A contest finds the faster way, whatever is noise, and costs little once it has."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.methods.contest import Contest, Way

TRIAL = 4 * 11
"""Rounds of one trial: four blocks of three uncounted and eight counted ones."""


def play(contest: Contest, rounds: int, familiar: float, other: float, rng: random.Random) -> list[Way]:
    """Rounds as a machine runs them that is now and then busy with something else."""
    ways = []
    for _ in range(rounds):
        way = contest.way
        ways.append(way)
        busy = rng.choice([0, 0, 0, rng.random()])
        contest.note(way, (familiar if way is Way.FAMILIAR else other) * (1 + busy))
    return ways


@given(st.floats(1e-4, 10), st.floats(0.2, 0.9) | st.floats(1.0, 5), st.integers(0, 1000))
def test_the_faster_way_wins(seconds: float, ratio: float, seed: int) -> None:
    contest = Contest(0.95)
    ways = play(contest, TRIAL + 100, seconds, ratio * seconds, random.Random(seed))
    assert set(ways[TRIAL:]) == {Way.OTHER if ratio < 0.95 else Way.FAMILIAR}
    assert contest.ratio is not None
    assert abs(contest.ratio - ratio) < 0.3 * ratio


@settings(max_examples=12)
@given(st.floats(0.2, 5), st.integers(0, 1000))
def test_the_slower_way_is_done_ever_more_rarely(ratio: float, seed: int) -> None:
    contest = Contest(0.95)
    ways = play(contest, 40_000, 1.0, ratio, random.Random(seed))
    slower = Way.FAMILIAR if ratio < 0.9 else Way.OTHER
    if abs(ratio - 0.95) > 0.1:
        assert ways.count(slower) <= 7 * TRIAL / 2


@given(st.lists(st.tuples(st.sampled_from(Way), st.floats(0, 10)), max_size=300))
def test_anything_may_be_noted(rounds: list[tuple[Way, float]]) -> None:
    contest = Contest(0.95)
    for way, seconds in rounds:
        contest.note(way, seconds)
        assert contest.way in Way


def test_a_machine_that_changes_changes_the_winner() -> None:
    contest, rng = Contest(0.95), random.Random(0)
    play(contest, TRIAL, 1.0, 0.5, rng)
    assert contest.winner is Way.OTHER
    play(contest, 1000 + TRIAL, 1.0, 2.0, rng)
    assert contest.winner is Way.FAMILIAR
