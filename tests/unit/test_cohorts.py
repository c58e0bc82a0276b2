"""Which rows share a prefill forward follows from what such forwards were measured to cost."""

from __future__ import annotations

import json

import pytest

from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs

FIXED_S, TOKEN_S = 0.03, 0.001


@pytest.fixture
def costs() -> Costs:
    costs = Costs()
    costs.saw_step(1, FIXED_S)
    costs.saw_piece(100, 0, FIXED_S + 100 * TOKEN_S)
    return costs


def test_one_row_is_expected_to_take_what_a_piece_takes(costs: Costs) -> None:
    assert Cohorts().expected([(20, 7)], costs) == costs.piece(20, 7)


def test_several_are_expected_to_take_the_fixed_part_once_and_a_little_more_until_measured(costs: Costs) -> None:
    cohorts, parts = Cohorts(), [(20, 0), (5, 300)]
    assert cohorts.expected(parts, costs) == pytest.approx(1.1 * (FIXED_S + 25 * TOKEN_S))
    cohorts.saw(parts, 0.1, costs)
    assert cohorts.expected(parts, costs) == pytest.approx(0.1)
    assert cohorts.expected([(50, 0), (50, 0)], costs) == pytest.approx(1.1 * (FIXED_S + 0.1)), "of another size"


def test_a_row_comes_along_if_that_costs_at_most_half_of_its_own_forward(costs: Costs) -> None:
    cohorts = Cohorts()
    for _ in range(30):
        cohorts.saw([(16, 0), (10, 0)], FIXED_S + 26 * TOKEN_S, costs)
        cohorts.saw([(16, 0), (40, 0)], FIXED_S + 56 * TOKEN_S, costs)
    assert cohorts.takes([(16, 0)], (10, 0), costs, 1.0)
    assert not cohorts.takes([(16, 0)], (40, 0), costs, 1.0)
    assert not cohorts.takes([(16, 0)], (10, 0), costs, 0.05), "the budget"


def test_where_sharing_was_slow_it_is_not_done_until_that_is_forgotten(costs: Costs) -> None:
    cohorts = Cohorts()
    assert cohorts.takes([(16, 0)], (10, 0), costs, 1.0)
    cohorts.saw([(16, 0), (10, 0)], 3 * (FIXED_S + 26 * TOKEN_S), costs)
    assert not cohorts.takes([(16, 0)], (10, 0), costs, 1.0)
    forwards = 0
    while not cohorts.takes([(16, 0)], (10, 0), costs, 1.0):
        cohorts.saw([(100, 0)], FIXED_S + 100 * TOKEN_S, costs)
        forwards += 1
    assert 20 < forwards < 1000


def test_an_outlier_counts_as_twice_what_was_known(costs: Costs) -> None:
    cohorts, parts = Cohorts(), [(16, 0), (10, 0)]
    model = FIXED_S + 26 * TOKEN_S
    cohorts.saw(parts, model, costs)
    cohorts.saw(parts, 100 * model, costs)
    assert cohorts.expected(parts, costs) == pytest.approx(1.3 * model)


def test_nothing_is_shared_before_anything_was_measured() -> None:
    cohorts, unknown = Cohorts(), Costs()
    assert not cohorts.takes([(4, 0)], (4, 0), unknown, 1.0)
    unknown.saw_piece(32, 0, 0.1)
    assert not cohorts.takes([(4, 0)], (4, 0), unknown, 1.0), "without a step nobody knows the fixed part"


def test_what_was_found_out_comes_back(costs: Costs) -> None:
    cohorts = Cohorts()
    cohorts.saw([(16, 0), (10, 0)], 0.2, costs)
    again = Cohorts.restored(json.loads(json.dumps(cohorts.saved())))
    assert again.expected([(16, 0), (10, 0)], costs) == cohorts.expected([(16, 0), (10, 0)], costs)
