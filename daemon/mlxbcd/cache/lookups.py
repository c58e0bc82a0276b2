"""Owns what a lookup in the prefix cache gives: a prefix that stays while it is in use, what is known about one that
nobody takes, and how often something was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxbcd.cache.index import Match, Why

if TYPE_CHECKING:
    from mlxbcd.cache.service import PrefixCache
    from mlxbcd.state.layout import Stored
    from mlxbcd.state.rows import RowState


@dataclass(slots=True)
class Counters:
    """What has happened since the start.

    Attributes:
        lookups: requests that asked.
        hits: those that found something.
        tokens: prompt tokens of all that asked.
        reused: tokens they found.
        from_disk: tokens of these that were read from the disk for them.
        published: pieces taken in.
        evicted: pieces dropped from RAM for want of room.
        refused: pieces not taken in, since what is in use left no room.
    """

    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    reused: int = 0
    from_disk: int = 0
    published: int = 0
    evicted: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Explained:
    """What the cache knows about a prompt.

    Attributes:
        tokens: of the prompt.
        ram, disk: reusable tokens, in RAM alone and with what is on disk.
        matched: tokens that something stored begins with alike.
        why: why it isn't more.
    """

    tokens: int
    ram: int
    disk: int
    matched: int
    why: Why


class Lease:
    """A prefix that stays until `release`, which may be called on any thread and more than once."""

    def __init__(self, cache: PrefixCache, match: Match) -> None:
        self._cache: PrefixCache | None = cache
        self.match = match

    def __repr__(self) -> str:
        return f"Lease({self.match}{', released' if self._cache is None else ''})"

    @property
    def length(self) -> int:
        """Tokens it covers."""
        return self.match.length

    def restore(self, layouts: Sequence[Stored], capacity: int = 0) -> RowState:
        """The state, as copies of its own, with room for `capacity` positions. On the device thread.

        Raises:
            ValueError: it is not of a row with these layouts.
        """
        from mlxbcd.cache import portable

        path = self.match.node.path
        blocks = [node.payload for node in path if not node.anchor]
        anchor = path[-1].payload if path[-1].anchor else None
        return portable.restore(layouts, blocks, anchor, self.length, self.match.node.converted_at, capacity)

    def release(self) -> None:
        """Let it go."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.release(self.match.node)
