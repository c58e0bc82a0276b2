"""Adaptive depth, on made-up traces and measured cost curves with a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import PAYS, Depth, best_depth, tokens, worth_waiting
from mlxbcd.spec.rates import Believed, Rates

CURVES: Final[Mapping[str, dict[int, float]]] = {
    "cpu, float32": {1: 56.0, 2: 65.0, 4: 97.0, 8: 128.0, 16: 138.0, 32: 206.0},
    "cpu, context of 1000": {1: 76.0, 2: 96.0, 4: 138.0, 8: 209.0, 16: 288.0, 32: 495.0},
    "gpu, bf16": {1: 8.1, 2: 8.3, 4: 8.7, 8: 10.4, 16: 12.0, 32: 15.3},
    "gpu, 4 bits": {1: 7.5, 2: 11.0, 4: 18.0, 8: 33.0, 16: 60.0, 32: 112.0},
}
"""Milliseconds of one row's rounds by width, as measured on such machines."""

LENGTH: Final = 1000
MOST: Final = 12

Trace = list[int]
"""For each place in a text, how many proposals of a draft that starts there are right, if it is deep enough."""


def along(right: list[bool]) -> Trace:
    """A trace of a drafter that is right or wrong about tokens, wherever it starts."""
    trace, run = [], 0
    for one in reversed(right):
        run = run + 1 if one else 0
        trace.append(min(run, MOST))
    return trace[::-1]


def geometric(rate: float) -> Callable[[random.Random], Trace]:
    return lambda rng: along([rng.random() < rate for _ in range(LENGTH)])


def copying(rng: random.Random) -> Trace:
    """Stretches that are copied, and stretches that are not."""
    right: list[bool] = []
    while len(right) < LENGTH:
        right += [rng.random() < 0.15 for _ in range(rng.randrange(5, 120))]
        right += [rng.random() < 0.97 for _ in range(rng.randrange(5, 120))]
    return along(right[:LENGTH])


def shallow(rng: random.Random) -> Trace:
    """Of a head that knows the next two tokens and little behind them."""

    def right() -> int:
        return next((depth for depth in range(MOST) if rng.random() > (0.9 if depth < 2 else 0.1)), MOST)

    return [right() for _ in range(LENGTH)]


TRACES: Final = {
    "useless": geometric(0.0),
    "0.2": geometric(0.2),
    "0.5": geometric(0.5),
    "0.8": geometric(0.8),
    "0.95": geometric(0.95),
    "perfect": geometric(1.0),
    "shallow": shallow,
    "copying": copying,
}


def costs_of(curve: dict[int, float]) -> VerifyCosts:
    costs = VerifyCosts(dict(curve))
    costs.saw_plain(1, curve[1])
    return costs


def run(trace: Trace, curve: dict[int, float], depth: Callable[[], int], saw: Callable[[int, int], None]) -> float:
    """Tokens per millisecond of one row that drafts as deep as it is told."""
    costs = costs_of(curve)
    seconds = [costs.plain(1), *(costs.round(1, drafted + 1) for drafted in range(1, MOST + 1))]
    at, clock = 0, 0.0
    while at < len(trace):
        drafted = min(depth(), len(trace) - at - 1)
        right = min(drafted, trace[at])
        clock += seconds[drafted]
        if drafted:
            saw(drafted, right)
        at += right + 1
    return at / clock


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("trace", TRACES)
def test_throughput_comes_within_five_percent_of_the_best_fixed_depth(trace: str, curve: str) -> None:
    text = TRACES[trace](random.Random(f"{trace} {curve}"))
    depth = Depth(MOST, costs_of(CURVES[curve]))
    ours = run(text, CURVES[curve], lambda: depth.next(MOST, [0]), lambda d, a: depth.saw(0, d, a))
    fixed = {n: run(text, CURVES[curve], lambda n=n: n, lambda d, a: None) for n in range(MOST + 1)}
    best = max(fixed, key=fixed.__getitem__)
    print(f"{ours / fixed[best]:.3f} of depth {best}")
    assert ours >= 0.95 * fixed[best], f"{ours / fixed[best]:.3f} of depth {best}"


@pytest.mark.parametrize("curve", CURVES)
def test_a_useless_drafter_is_given_up_within_32_tokens(curve: str) -> None:
    depth = Depth(MOST, costs_of(CURVES[curve]))
    costs = costs_of(CURVES[curve])
    depths, probes, seconds = [], 0, 0.0
    for _ in range(1000):
        drafted = depth.next(MOST, [0])
        seconds += costs.round(1, drafted + 1) if drafted else costs.plain(1)
        depths.append(0 if depth.probing else drafted)
        probes += depth.probing
        if drafted:
            depth.saw(0, drafted, 0)
    assert depths[0] > 0, "a drafter that nobody knows is tried"
    assert not any(depths[32:])
    assert probes > 0
    assert seconds <= 1.03 * 1000 * costs.plain(1), "trying it again and again costs next to nothing"


def test_probes_grow_rare_while_they_fail_and_one_that_succeeds_brings_drafts_back() -> None:
    depth = Depth(MOST, costs_of(CURVES["cpu, float32"]))
    probes = []
    for at in range(2000):
        drafted = depth.next(MOST, [0])
        if drafted:
            depth.saw(0, drafted, 0)
        if depth.probing:
            probes.append(at)
    gaps = [after - before for before, after in pairwise(probes)]
    assert 15 <= len(probes) <= 100
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]
    for _ in range(2000):
        drafted = depth.next(MOST, [0])
        if drafted:
            depth.saw(0, drafted, drafted)
    assert depth.next(MOST, [0]) >= 6
    assert not depth.probing


@pytest.mark.parametrize("token_ms", [0.0, 3.0, 30.0])
def test_a_useless_drafter_is_probed_by_shadows_within_the_share_of_time(token_ms: float) -> None:
    costs = costs_of(CURVES["cpu, float32"])
    depth = Depth(MOST, costs, draft_s=lambda rows, drafted: drafted * token_ms)
    shadows, rounds, seconds = 0, 0, 0.0
    for at in range(3000):
        drafted = depth.next(MOST, [0], shadows=True)
        assert not (drafted and depth.shadowing)
        assert at < 32 or depth.probing or not drafted, "it is given up"
        guessed = max(drafted, int(depth.shadowing))
        if at >= 32:
            seconds += (costs.round(1, drafted + 1) if drafted else costs.plain(1)) + guessed * token_ms
            shadows += depth.shadowing
            rounds += drafted > 0
        if guessed:
            depth.saw(0, guessed, 0)
    assert shadows > rounds, "rounds are for as long as there is hope"
    assert seconds <= 1.025 * (3000 - 32) * costs.plain(1)


def test_a_probe_is_a_round_where_a_shadow_loses_as_much() -> None:
    """Verifying one token more costs nothing there, and a right guess is a token gained; or nothing is in flight."""

    def probes(curve: dict[int, float], *, shadows: bool) -> list[bool]:
        depth, seen = Depth(MOST, costs_of(curve)), []
        for _ in range(500):
            drafted = depth.next(MOST, [0], shadows=shadows)
            if depth.probing:
                seen.append(depth.shadowing)
            if drafted or depth.shadowing:
                depth.saw(0, max(drafted, 1), 0)
        return seen

    free, dear = {1: 56.0, 2: 56.0, 4: 97.0}, {1: 56.0, 2: 112.0, 4: 220.0}
    assert set(probes(free, shadows=True)) == {False}
    assert set(probes(dear, shadows=True)) == {True}
    assert set(probes(dear, shadows=False)) == {False}


def test_a_shadow_that_is_right_brings_drafts_back() -> None:
    depth = Depth(MOST, costs_of(CURVES["cpu, float32"]))
    for right, steps in ((0, 500), (1, 500)):
        drafts = 0
        for _ in range(steps):
            drafted = depth.next(MOST, [0], shadows=True)
            if depth.shadowing:
                depth.saw(0, 1, right)
            elif drafted:
                depth.saw(0, drafted, drafted * right)
                drafts += 1
        assert (drafts > 300) == bool(right)


def test_rows_that_join_bring_the_estimate_back_to_the_prior() -> None:
    depth = Depth(MOST, costs_of(CURVES["gpu, bf16"]))
    first = depth.next(MOST, [0])
    for _ in range(40):
        depth.saw(0, 4, 0)
    assert depth.next(MOST, [0]) == 0
    depth.renew()
    assert depth.next(MOST, [0]) == first


def test_a_prior_outlives_the_rows_that_taught_it() -> None:
    prior = Rates(16, Believed([0.7]), keeps=0.99)
    for _ in range(3):
        depth = Depth(MOST, costs_of(CURVES["gpu, bf16"]), (prior, prior))
        for _ in range(20):
            depth.saw(0, 4, 0)
    assert Depth(MOST, costs_of(CURVES["gpu, bf16"]), (prior, prior)).next(MOST, [0]) == 0


def test_without_measured_costs_the_depth_is_fixed() -> None:
    depth = Depth(4, VerifyCosts())
    for _ in range(50):
        assert depth.next(9, [0]) == 4
        depth.saw(0, 4, 0)
    assert depth.next(2, [0]) == 2
    assert depth.next(0, [0]) == 0


CHANCES = st.lists(st.floats(0.01, 0.99), max_size=12)
SECONDS = st.floats(0.01, 1.0)


@st.composite
def machines(draw: st.DrawFn) -> VerifyCosts:
    steps = draw(st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6))
    seconds, curve = 0.01, {}
    for width, step in zip((1, 2, 4, 8, 16, 32), steps, strict=True):
        seconds += step
        curve[width] = seconds
    costs = VerifyCosts(curve)
    for rows in draw(st.sets(st.integers(1, 8), max_size=4)):
        costs.saw_plain(rows, draw(SECONDS))
    for _ in range(draw(st.integers(0, 3))):
        costs.saw_round(draw(st.integers(1, 8)), draw(st.integers(1, 32)), draw(SECONDS))
    return costs


@settings(deadline=None)
@given(st.lists(CHANCES, min_size=1, max_size=8), machines())
def test_the_depth_of_a_round_gives_the_most_tokens_per_second(rows: list[list[float]], costs: VerifyCosts) -> None:
    depth = best_depth(rows, costs)
    assert 0 <= depth <= max(map(len, rows))

    def rate(n: int) -> float:
        return sum(tokens(chances[:n]) for chances in rows) / costs.round(len(rows), n + 1)

    plain = len(rows) / costs.plain(len(rows))
    best = max((rate(n) for n in range(1, max(map(len, rows)) + 1)), default=0.0)
    if depth:
        assert rate(depth) == pytest.approx(best)
        assert rate(depth) > plain
    else:
        assert best <= PAYS * plain * (1 + 1e-9)


@given(st.lists(CHANCES, min_size=1, max_size=8), machines())
def test_nobody_waits_for_a_sample_that_confirms_nothing(rows: list[list[float]], costs: VerifyCosts) -> None:
    assert not worth_waiting([chances[:1] for chances in rows], costs)


@given(CHANCES, machines())
def test_what_is_waited_for_pays_once_it_is_confirmed(chances: list[float], costs: VerifyCosts) -> None:
    if worth_waiting([chances], costs):
        depths = range(1, len(chances))
        assert any(tokens(chances[1:], n) * costs.plain(1) > costs.round(1, n + 1) for n in depths)


@given(machines(), st.integers(1, 8), st.integers(1, 32))
def test_costs_are_positive_and_what_was_measured_is_believed(costs: VerifyCosts, rows: int, width: int) -> None:
    assert costs.round(rows, width) > 0
    assert costs.plain(rows) > 0
    for _ in range(60):
        costs.saw_round(rows, width, 0.3)
    assert costs.round(rows, width) == pytest.approx(0.3, rel=0.05)
    before = costs.round(rows, width)
    costs.saw_round(rows, width, 1000.0)
    assert costs.round(rows, width) <= 2 * before, "one figure, however odd, changes little"


def test_a_width_that_looked_dear_once_is_tried_again() -> None:
    costs = costs_of(CURVES["cpu, float32"])
    before = costs.round(1, 8)
    for _ in range(5):
        costs.saw_round(1, 8, 2.5 * before)
    assert costs.round(1, 8) > 1.8 * before
    assert costs.round(1, 9) > 1.8 * before, "its neighbours are not much cheaper"
    for _ in range(1000):
        costs.saw_round(1, 2, CURVES["cpu, float32"][2])
    assert costs.round(1, 8) == pytest.approx(before, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=50), st.sampled_from([0.0, 6.0]))
def test_rates_lie_between_what_is_believed_and_what_was_seen(drafts: list[tuple[int, int]], chained: float) -> None:
    rates = Rates(8, Believed([0.7, 0.6, 0.5]), keeps=0.9, chained=chained)
    for drafted, accepted in drafts:
        rates.saw_draft(drafted, min(drafted, accepted))
    assert all(0 < rate < 1 for rate in rates.table())
    assert [rates.at(place) for place in range(8)] == rates.table()
    for _ in range(200):
        rates.saw_draft(3, 2)
    assert rates.at(1) > 0.9
    assert rates.at(2) < (0.35 if chained else 0.1)
