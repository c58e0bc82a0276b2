"""Owns the rows that a drafter keeps beside the target's: which there are, what they owe, how far they ran ahead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mlxbcd.spec.drafter import Companion
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, PreparedChange, Rows, commit

Owed = TypeVar("Owed")
"""What a drafter needs to catch up with the target."""


@dataclass(slots=True)
class Followers(Generic[Owed]):
    """One row for each of the target's.

    Attributes:
        rows: their state. It covers what the target's covers, but for what is owed, and what ran ahead in addition.
        owed_of: what a row owes that joins with a companion.
        owed: by row.
        ahead: by row, what its last draft has processed beyond the target, until that is taken back or kept.
    """

    rows: Rows
    owed_of: Callable[[Companion], Owed]
    owed: dict[Key, Owed] = field(default_factory=dict)
    ahead: dict[Key, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Followers({self.rows})"

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> FollowersChange[Owed]:
        """See `Drafter.prepare`."""
        kept = [key for key in self.rows.order if key in keep]
        joiners = [Joiner(key, companion.state, companion.length + 1) for key, companion in join.items()]
        return FollowersChange(self, [self.rows.prepare(keep=kept, join=joiners)], set(kept), dict(join))

    def make_room(self, more: Mapping[Key, int]) -> None:
        """Let rows that are about to take so many more tokens have the room before the first of them: of one that moves
        later, what a window no longer sees would be lost, and could not be seen again once these are taken back."""
        rows = self.rows
        room = {key: rows.lengths[key] + n for key, n in more.items()}
        if any(wanted > rows.place(key).group.capacity for key, wanted in room.items()):
            commit(rows.prepare(room=room))

    def resolve(self, key: Key, kept: int) -> int:
        """Keep at most so much of what a row ran ahead, and cut the rest off; how much there was to keep."""
        ahead = self.ahead.pop(key, 0)
        kept = min(ahead, kept)
        if kept < ahead:
            self.rows.trim(key, self.rows.lengths[key] - (ahead - kept))
        return kept

    def discard(self) -> None:
        """See `Drafter.discard`."""
        self.rows = self.rows.successor()
        self.owed.clear()
        self.ahead.clear()


@dataclass(slots=True)
class FollowersChange(Generic[Owed]):
    """A membership change of the rows; see `spec.drafter.Change`."""

    followers: Followers[Owed]
    prepared: Sequence[PreparedChange]
    keep: set[Key]
    join: dict[Key, Companion]

    def commit(self) -> None:
        """See `Change.commit`."""
        own = self.followers
        own.owed = {key: owed for key, owed in own.owed.items() if key in self.keep}
        own.owed |= {key: own.owed_of(companion) for key, companion in self.join.items()}
        own.ahead = {key: n for key, n in own.ahead.items() if key in self.keep}
