"""How much memory a machine allows, who takes how much, and who makes room: decisions without a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.engine.budget import GIB, MIB, MemoryBudget, limits
from mlxbcd.residency.eviction import Candidate, make_room

SIZES = st.integers(0, 50)


@pytest.mark.parametrize(
    ("total", "recommended", "everything", "cache"),
    [
        (8, 0, 4.0, 256 * MIB),
        (8, 5.3, 4.0, 256 * MIB),
        (16, 10.7, 10.0, 640 * MIB),
        (24, 16.0, 16.0, GIB),
        (64, 48.0, 48.0, 2 * GIB),
        (64, 0, 48.0, 2 * GIB),
    ],
)
def test_machines_of_usual_sizes(total: int, recommended: float, everything: float, cache: int) -> None:
    found = limits(total * GIB, int(recommended * GIB))
    assert found.budget + found.cache == pytest.approx(everything * GIB, rel=0.001)
    assert found.cache == pytest.approx(cache, rel=0.001)
    assert found.wired <= 0.9 * (recommended or total) * GIB


@given(
    total=st.integers(0, 600 * GIB),
    recommended=st.integers(0, 600 * GIB),
    wanted=st.none() | st.integers(MIB, 600 * GIB),
    cache=st.none() | st.integers(MIB, 600 * GIB),
)
def test_limits_leave_something_for_others_and_keep_the_users_word(
    total: int, recommended: int, wanted: int | None, cache: int | None
) -> None:
    found = limits(total, recommended, wanted=wanted, cache=cache)
    assert min(found.budget, found.cache) >= 0
    assert found.wired <= found.budget
    everything = found.budget + found.cache
    if wanted is not None:
        assert everything == wanted
    elif total:
        assert everything <= 0.75 * total + 1
    if cache is not None:
        assert found.cache <= cache
    assert found.budget >= everything // 2


def test_meters_are_read_when_asked_and_a_figure_recovers_when_its_owner_lets_go() -> None:
    held = {"kv": 30}
    budget = MemoryBudget(100)
    budget.measure("a", "weights", 50)
    budget.measure("a", "kv", lambda: held["kv"])
    assert (budget.used, budget.free, budget.lacks(20), budget.lacks(25)) == (80, 20, 0, 5)
    held["kv"] = 0
    assert budget.lacks(50) == 0
    budget.measure("a", "weights", 60)
    assert (budget.held("a"), budget.held(kind="weights"), budget.held("a", "kv")) == (60, 60, 0)
    budget.forget("a")
    assert budget.used == 0
    budget.limit = -5
    assert budget.lacks(1) == 6


CANDIDATES = st.lists(
    st.builds(
        lambda n, used, busy, pinned: (n, used, busy, pinned), SIZES, st.integers(0, 9), st.booleans(), st.booleans()
    ),
    max_size=8,
).map(lambda rows: [Candidate(key, *row) for key, row in enumerate(rows)])


@given(candidates=CANDIDATES, needed=st.integers(-5, 200))
def test_room_is_made_by_the_least_recently_used_idle_ones_and_by_no_more_than_it_takes(
    candidates: list[Candidate], needed: int
) -> None:
    room = make_room(candidates, needed)
    by_key = {one.key: one for one in candidates}
    drop, wait_for = [by_key[key] for key in room.drop], [by_key[key] for key in room.wait_for]
    assert not any(one.pinned for one in drop + wait_for)
    assert not any(one.busy for one in drop)
    assert all(one.busy for one in wait_for)
    freed = sum(one.bytes for one in drop + wait_for)
    assert room.enough == (freed >= needed)
    if needed > 0 and room.enough:
        assert freed - (drop + wait_for)[-1].bytes < needed, "the last one was needed"
    if wait_for:
        idle = [one for one in candidates if not one.busy and not one.pinned and one.bytes]
        assert {one.key for one in drop} == {one.key for one in idle}, "busy ones only after all idle ones"
    for chosen, busy in ((drop, False), (wait_for, True)):
        others = [one for one in candidates if one.busy is busy and not one.pinned and one.bytes and one not in chosen]
        if chosen and others:
            assert max(one.used for one in chosen) <= min(one.used for one in others)
