"""Any sequence of membership changes leaves rows packed, in batch order, and where they were if they can stay."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.state.geometry import SMALLEST, Change, Class, Key, Place, plan

CLASSES = [Class(SMALLEST << i, quantised) for i in range(3) for quantised in (False, True)]

Step: TypeAlias = tuple[set[int], dict[int, Class], list[Class]]
"""Who leaves, who changes its class, and the classes of those who join."""

groups = st.sampled_from(CLASSES)
steps = st.lists(
    st.tuples(
        st.sets(st.integers(0, 30)),
        st.dictionaries(st.integers(0, 30), groups, max_size=4),
        st.lists(groups, max_size=6),
    ),
    max_size=8,
)


@given(steps)
@settings(deadline=None, derandomize=True)
def test_rows_are_packed_and_in_batch_order_after_any_changes(
    steps: list[tuple[set[int], dict[int, Class], list[Class]]],
) -> None:
    places: dict[Key, Place] = {}
    slots: dict[Class, int] = {}
    born = 0
    for leaving, changing, entering in steps:
        keep = [key for key in places if key not in leaving]
        joining: dict[Key, Class] = {born + i: group for i, group in enumerate(entering)}
        born += len(entering)
        changed: dict[Key, Class] = {key: group for key, group in changing.items() if key in keep}
        classes = changed | joining
        change = plan(places, slots, keep=keep, classes=classes, joining=list(joining))

        assert set(change.places) == {*keep, *joining}
        assert list(change.places.values()) == sorted(change.places.values())
        _check_packed(change, slots)
        _check_moves(change, places)
        for key, place in change.places.items():
            assert place.group == classes.get(key, places[key].group if key in places else None)
        places, slots = dict(change.places), dict(change.slots)


def _check_packed(change: Change, present: dict[Class, int]) -> None:
    """Slots 0 … n − 1 of every class are taken, and no class has many more than it needs."""
    rows = Counter(place.group for place in change.places.values())
    assert set(change.slots) == set(rows)
    for group, n in rows.items():
        taken = {place.slot for place in change.places.values() if place.group == group}
        assert taken == set(range(n))
        slots = change.slots[group]
        assert n <= slots
        assert slots < 2 * n or slots == present[group]
        assert slots < 8 * n


def _check_moves(change: Change, before: dict[Key, Place]) -> None:
    """Exactly the rows whose place changes are moved, and no row that could have stayed."""
    moved = {move.key: move for move in change.moves}
    assert len(moved) == len(change.moves)
    for key, place in change.places.items():
        if before.get(key) == place:
            assert key not in moved
            continue
        move = moved[key]
        assert (move.source, move.target) == (before.get(key), place)
        if move.source is not None and move.source.group == place.group:
            rows = sum(other.group == place.group for other in change.places.values())
            assert move.source.slot >= rows
