"""What forwards cost: learnt from few measurements, for a machine whose true costs the test knows."""

from __future__ import annotations

import random

import pytest

from mlxbcd.engine.costs import START_WIDTH, WIDTHS, Costs, FadingLine


def true_piece(width: int, context: int) -> float:
    """Seconds on a made-up machine, much like a small CPU."""
    return 0.06 + width * (0.0045 + 8e-6 * (context + width / 2))


def learn(costs: Costs, prompt: int, budget_s: float = 0.25, noise: float = 0.0) -> list[int]:
    """Prefill a prompt as the scheduler would; the widths it took."""
    chance = random.Random(prompt)
    costs.saw_step(1, 0.06)
    position, widths = 0, []
    while position < prompt:
        width = min(costs.width(budget_s, position), prompt - position)
        costs.saw_piece(width, position, true_piece(width, position) * (1 + noise * chance.uniform(-1, 1)))
        widths.append(width)
        position += width
    return widths


def test_the_first_piece_has_a_modest_width() -> None:
    assert Costs().width(100.0, 0) == START_WIDTH


@pytest.mark.parametrize("context", [0, 300, 1500])
@pytest.mark.parametrize("width", [4, 32, 64])
def test_after_a_few_pieces_costs_are_predicted_at_any_context(context: int, width: int) -> None:
    costs = Costs()
    learn(costs, 1500)
    assert costs.piece(width, context) == pytest.approx(true_piece(width, context), rel=0.2)


def test_a_long_prompt_does_not_make_the_next_short_one_slow() -> None:
    costs = Costs()
    assert learn(costs, 4000)[-1] <= 8
    assert learn(costs, 200)[2:5] == [32, 32, 32]


def test_a_measurement_taken_while_the_machine_slept_is_soon_forgotten() -> None:
    costs = Costs()
    learn(costs, 200)
    assert costs.width(0.25, 0) == 32
    costs.saw_piece(32, 0, 3600.0)
    costs.saw_step(1, 3600.0)
    learn(costs, 200)
    learn(costs, 200)
    assert costs.width(0.25, 0) == 32
    assert costs.step(1) < 0.1


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_machine_that_changes_its_speed_is_followed(factor: float) -> None:
    costs = Costs()
    learn(costs, 200)
    for _ in range(25):
        costs.saw_step(1, factor * 0.06)
        costs.saw_piece(16, 100, factor * true_piece(16, 100))
    assert costs.piece(16, 100) == pytest.approx(factor * true_piece(16, 100), rel=0.2)


@pytest.mark.parametrize("budget", [0.1, 0.25, 1.0])
def test_widths_follow_the_budget_once_measured(budget: float) -> None:
    costs = Costs()
    learn(costs, 1000, budget, noise=0.1)
    for context in (0, 500, 1000):
        width = costs.width(budget, context)
        assert true_piece(width, context) <= budget * 1.25
        wider = WIDTHS[WIDTHS.index(width) + 1]
        assert true_piece(wider, context) >= budget * 0.8


def test_widths_grow_by_one_doubling_at_a_time() -> None:
    costs = Costs()
    widths = [costs.width(1e9, 0)]
    while widths[-1] < WIDTHS[-1]:
        costs.saw_piece(widths[-1], 0, 1e-3)
        widths.append(costs.width(1e9, 0))
    assert widths == [32, 64, 128, 256, 512]


def test_a_budget_that_nothing_fits_still_gets_a_few_tokens() -> None:
    costs = Costs()
    learn(costs, 100)
    assert costs.width(-1.0, 0) == 4


def test_the_default_gap_keeps_three_quarters_of_the_best_rate() -> None:
    costs = Costs()
    learn(costs, 600)
    gap = costs.gap_s(1, 0, 0.05)
    width = costs.width(gap - costs.step(1), 0)
    best = max(w / true_piece(w, 0) for w in WIDTHS if w <= costs.widest)
    assert width / true_piece(width, 0) >= 0.7 * best
    assert costs.width(gap - costs.step(1) - 0.01, 0) < width, "no more than that"


def test_the_default_gap_is_never_below_its_floor() -> None:
    assert Costs().gap_s(4, 0, 0.05) == 0.05
    fast = Costs()
    fast.saw_step(4, 0.001)
    fast.saw_piece(32, 0, 0.002)
    assert fast.gap_s(4, 0, 0.05) == 0.05


def test_a_step_of_unseen_size_is_taken_for_the_nearest_one() -> None:
    costs = Costs()
    assert costs.step(3) == 0.0
    costs.saw_step(1, 0.01)
    costs.saw_step(8, 0.03)
    assert costs.step(2) == 0.01
    assert costs.step(32) == 0.03


def test_step_costs_follow_change_slowly() -> None:
    costs = Costs()
    costs.saw_step(1, 0.01)
    costs.saw_step(1, 0.05)
    assert 0.01 < costs.step(1) < 0.03
    for _ in range(20):
        costs.saw_step(1, 0.05)
    assert costs.step(1) == pytest.approx(0.05, rel=0.01)


def test_a_line_through_points_far_apart_is_that_line() -> None:
    line = FadingLine()
    for x in range(0, 4000, 100):
        line.see(x, 2.0 + x / 1000, 32)
    assert line.at(2000) == pytest.approx(4.0, rel=0.02)
    assert line.at(0) == pytest.approx(2.0, rel=0.1)


def test_a_line_never_falls_and_never_reaches_zero() -> None:
    falling, steep = FadingLine(), FadingLine()
    for x in (1000, 2000, 3000):
        falling.see(x, 5000 - x, 1)
        steep.see(x, x - 900, 1)
    assert falling.at(5000) == falling.at(0) > 0
    assert steep.at(0) > 0
    assert FadingLine().at(10) == 0


def test_a_forward_that_is_late_anyway_is_not_made_once_per_token() -> None:
    costs = Costs()
    costs.saw_step(1, 0.3)
    costs.saw_piece(64, 0, 0.3 + 64 * 0.01)
    # Even one token takes longer than the budget; sixteen cost half as much again.
    assert costs.width(0.25, 0) == 16
    assert costs.width(0.0, 0) == 16
    dear = Costs()
    dear.saw_step(1, 0.3)
    dear.saw_piece(64, 0, 0.3 + 64 * 1.0)
    assert dear.width(0.25, 0) == 1
