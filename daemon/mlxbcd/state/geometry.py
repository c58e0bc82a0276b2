"""Owns where rows live: classes, slots, the batch order, and the moves a membership change needs. Pure.

Rows of similar length share buffers of one *capacity class*; each capacity is twice the one before, so a long row
doesn't make short ones long. Within a class, rows fill slots 0, 1, 2, … without holes, so the rows in use are one slice
of the buffer. The batch order is the classes in order, then the slots: a forward's rows are always in that order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

Key: TypeAlias = Hashable
"""Names a row; chosen by the owner of the collection."""

SMALLEST: Final = 272
"""Positions of the smallest class: sixteen spare ones over a multiple of 256, and so on up the doublings, since prompts
of a round length are about to grow a little."""

_SHRINK_AT: Final = 4
_HALF_STEPS_FROM: Final = 8


def capacity_for(length: int) -> int:
    """The smallest capacity that holds `length` positions."""
    capacity = SMALLEST
    while capacity < length:
        capacity *= 2
    return capacity


@dataclass(frozen=True, slots=True, order=True)
class Class:
    """Rows whose buffers are shared.

    Attributes:
        capacity: positions a slot holds.
        quantised: attention layers store these rows quantised.
    """

    capacity: int
    quantised: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A row's slot in the buffers of its class."""

    group: Class
    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Put a row at `target`: from `source` in the same collection, or from outside where that is None."""

    key: Key
    source: Place | None
    target: Place


@dataclass(frozen=True, slots=True)
class Change:
    """A membership change, worked out but not applied.

    Attributes:
        before: the batch order until now.
        places: where every row will be, in batch order.
        moves: rows whose place changes, joiners among them. Sources are read before any target is written.
        slots: slots each class's buffers must have afterwards; a class that is absent is freed.
    """

    before: tuple[Key, ...]
    places: Mapping[Key, Place]
    moves: tuple[Move, ...]
    slots: Mapping[Class, int]


def slots_for(rows: int, present: int) -> int:
    """Slots a class should have for `rows` rows when it has `present`: 1, 2, 4, 8, 12, 16, 24, 32, …, fewer only at a
    quarter. Growing copies the class, so it happens rarely; steps of a half keep what it holds beside it bounded."""
    power = 1 << max(rows - 1, 0).bit_length()
    between = power // 4 * 3
    wanted = between if power > _HALF_STEPS_FROM and between >= rows else power
    return wanted if wanted > present or wanted * _SHRINK_AT <= present else present


def together(lengths: Iterable[int], present: int) -> int:
    """The one capacity for rows that must share a class, when they have `present` (0 for none)."""
    needed = max(map(capacity_for, lengths), default=SMALLEST)
    return needed if needed > present or needed * _SHRINK_AT <= present else present


def plan(
    places: Mapping[Key, Place],
    slots: Mapping[Class, int],
    *,
    keep: Iterable[Key],
    classes: Mapping[Key, Class],
    joining: Sequence[Key] = (),
) -> Change:
    """Work out a change: rows not in `keep` leave, those in `joining` enter.

    A kept row stays in its slot when it can; a hole is filled by the class's last row.

    Args:
        classes: the class of every joiner, and of every kept row that changes its class.

    Raises:
        ValueError: a key is unknown, or joins twice.
    """
    kept = list(keep)
    unknown = [key for key in kept if key not in places]
    if unknown:
        raise ValueError(f"rows {unknown} are not in this collection")
    taken, joiners = set(kept), set(joining)
    for key in joining:
        if key in taken:
            raise ValueError(f"row {key!r} is in this collection already")
        taken.add(key)

    stay: dict[Class, list[Key]] = {}
    enter: dict[Class, list[Key]] = {}
    for key in kept:
        present = places[key].group
        wanted = classes.get(key, present)
        (stay if wanted == present else enter).setdefault(wanted, []).append(key)
    for key in joining:
        enter.setdefault(classes[key], []).append(key)

    result: dict[Key, Place] = {}
    moves: list[Move] = []
    room: dict[Class, int] = {}
    for group in sorted({*stay, *enter}):
        staying = sorted(stay.get(group, ()), key=lambda key: places[key].slot)
        entering = enter.get(group, [])
        rows = len(staying) + len(entering)
        by_slot: dict[int, Key] = {places[key].slot: key for key in staying if places[key].slot < rows}
        displaced = [key for key in staying if places[key].slot >= rows]
        holes = (slot for slot in range(rows) if slot not in by_slot)
        for key in [*displaced, *entering]:
            slot = next(holes)
            by_slot[slot] = key
            moves.append(Move(key, None if key in joiners else places[key], Place(group, slot)))
        for slot in range(rows):
            result[by_slot[slot]] = Place(group, slot)
        room[group] = slots_for(rows, slots.get(group, 0))
    return Change(tuple(places), result, tuple(moves), room)
