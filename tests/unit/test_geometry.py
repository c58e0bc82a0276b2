"""Where rows live: capacity classes, and the plan of a membership change."""

from __future__ import annotations

import itertools

import pytest

from mlxbcd.state.geometry import SMALLEST, Change, Class, Move, Place, capacity_for, plan, slots_for, together

SMALL, LARGE = Class(SMALLEST), Class(2 * SMALLEST)


def test_each_class_is_twice_the_one_before() -> None:
    capacities = sorted({capacity_for(length) for length in range(1, 40_000, 7)})
    assert capacities[0] == SMALLEST
    assert all(large == 2 * small for small, large in itertools.pairwise(capacities))


@pytest.mark.parametrize("capacity", [SMALLEST, 2 * SMALLEST, 64 * SMALLEST])
def test_a_row_fills_its_class_before_it_needs_the_next(capacity: int) -> None:
    assert capacity_for(capacity) == capacity
    assert capacity_for(capacity + 1) == 2 * capacity


def test_a_prompt_of_a_round_length_has_room_to_grow() -> None:
    assert all(capacity_for(256 << i) >= (256 << i) + 16 for i in range(8))


def test_slots_double_and_shrink_only_when_three_quarters_are_spare() -> None:
    assert [slots_for(rows, 0) for rows in (1, 2, 3, 5, 8, 9, 13, 17, 25)] == [1, 2, 4, 8, 8, 12, 16, 24, 32]
    assert slots_for(3, 8) == 8
    assert slots_for(2, 8) == 2


def test_rows_that_share_one_class_take_the_longest_ones_and_shrink_late() -> None:
    assert together([3, SMALLEST + 1, 9], present=0) == 2 * SMALLEST
    assert together([3], present=2 * SMALLEST) == 2 * SMALLEST
    assert together([3], present=4 * SMALLEST) == SMALLEST
    assert together([], present=0) == SMALLEST


def test_a_row_that_leaves_is_replaced_by_the_last_of_its_class() -> None:
    before = _places(SMALL, "a", "b", "c")
    change = plan(before, {SMALL: 4}, keep=["b", "c"], classes={})
    assert change.places == {"c": Place(SMALL, 0), "b": Place(SMALL, 1)}
    assert change.moves == (Move("c", Place(SMALL, 2), Place(SMALL, 0)),)


def test_a_joiner_takes_the_first_hole() -> None:
    before = _places(SMALL, "a", "b", "c")
    change = plan(before, {SMALL: 4}, keep=["a", "c"], classes={"d": SMALL}, joining=["d"])
    assert change.places == {"a": Place(SMALL, 0), "d": Place(SMALL, 1), "c": Place(SMALL, 2)}
    assert change.moves == (Move("d", None, Place(SMALL, 1)),)


def test_a_row_that_grows_changes_its_class_and_nobody_elses() -> None:
    before = _places(SMALL, "a", "b") | _places(LARGE, "c")
    change = plan(before, {SMALL: 2, LARGE: 1}, keep="abc", classes={"b": LARGE})
    assert change.places == {"a": Place(SMALL, 0), "c": Place(LARGE, 0), "b": Place(LARGE, 1)}
    assert change.moves == (Move("b", Place(SMALL, 1), Place(LARGE, 1)),)
    assert change.slots == {SMALL: 2, LARGE: 2}


def test_a_row_that_is_quantised_changes_its_class() -> None:
    quantised = Class(SMALLEST, quantised=True)
    change = plan(_places(SMALL, "a", "b"), {SMALL: 2}, keep="ab", classes={"a": quantised})
    assert change.places == {"b": Place(SMALL, 0), "a": Place(quantised, 0)}


def test_when_all_rows_leave_nothing_is_held() -> None:
    change = plan(_places(SMALL, "a"), {SMALL: 1}, keep=(), classes={})
    assert change == Change(("a",), {}, (), {})


def test_unknown_rows_and_rows_that_are_in_already_are_refused() -> None:
    before = _places(SMALL, "a")
    with pytest.raises(ValueError, match="not in this collection"):
        plan(before, {SMALL: 1}, keep=["a", "b"], classes={})
    with pytest.raises(ValueError, match="already"):
        plan(before, {SMALL: 1}, keep=["a"], classes={"a": SMALL}, joining=["a"])
    with pytest.raises(ValueError, match="already"):
        plan(before, {SMALL: 1}, keep=[], classes={"b": SMALL}, joining=["b", "b"])


def test_a_key_that_left_may_join_again_at_once() -> None:
    change = plan(_places(SMALL, "a"), {SMALL: 1}, keep=[], classes={"a": SMALL}, joining=["a"])
    assert change.moves == (Move("a", None, Place(SMALL, 0)),)


def _places(group: Class, *keys: str) -> dict[object, Place]:
    return {key: Place(group, slot) for slot, key in enumerate(keys)}
