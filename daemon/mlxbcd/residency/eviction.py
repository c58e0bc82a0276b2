"""Owns the decision which models make room for another one. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident model.

    Attributes:
        bytes: that dropping it frees.
        used: when it was last used, on any clock.
        busy: somebody needs it now.
        pinned: it stays whatever happens.
    """

    key: Hashable
    bytes: int
    used: float
    busy: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What to do for room.

    Attributes:
        drop: at once, in this order: the least recently used first, and no more than it takes.
        wait_for: busy ones that have to go as soon as they can; what `drop` names doesn't suffice without them.
        enough: after all of that there is room. If not, nothing is worth doing.
    """

    drop: tuple[Hashable, ...]
    wait_for: tuple[Hashable, ...]
    enough: bool


def make_room(candidates: Sequence[Candidate], needed: int) -> Room:
    """How to free `needed` bytes. Never by a pinned model, and by a busy one only if the idle ones don't suffice."""
    drop: list[Hashable] = []
    wait_for: list[Hashable] = []
    for busy, chosen in ((False, drop), (True, wait_for)):
        movable = (one for one in candidates if not one.pinned and one.busy is busy and one.bytes > 0)
        for one in sorted(movable, key=lambda one: one.used):
            if needed <= 0:
                break
            chosen.append(one.key)
            needed -= one.bytes
    return Room(tuple(drop), tuple(wait_for), enough=needed <= 0)
