"""Owns deciding between two ways of doing the same work by doing it both ways. Pure.

The ways take turns in short blocks; each block's first rounds are not counted, since they still carry what the other
way left running, and may have to build something. Then the faster way goes on, and is asked again ever more rarely.
"""

from __future__ import annotations

from enum import Enum
from statistics import median
from typing import Final

_UNCOUNTED: Final = 3
_COUNTED: Final = 8
_BLOCKS: Final = 2
"""Blocks of each way in one trial."""
_LOW: Final = 0.25
"""The quantile compared: whatever else the machine does in between only ever makes a round longer."""
_CONTENT: Final = 1000
"""Rounds that the first winner goes on for; after each further trial twice as many."""
_MOST_CONTENT: Final = 64_000


class Way(Enum):
    """Two ways."""

    FAMILIAR = "familiar"
    OTHER = "other"


class Contest:
    """One decision.

    Args:
        margin: the other way must take at most this share of the familiar one's time to be preferred.

    Attributes:
        winner: the way preferred since the last trial; None before the first has ended.
        ratio: the other way's time over the familiar one's in the last trial; None before.
    """

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self.winner: Way | None = None
        self.ratio: float | None = None
        self._blocks: list[list[float]] = []
        self._block: list[float] = []
        self._uncounted = 0
        self._content_for = 0
        self._next_content = _CONTENT

    def __repr__(self) -> str:
        ratio = "" if self.ratio is None else f", ratio {self.ratio:.2f}"
        return f"Contest({self.winner.value if self.winner else 'undecided'}{ratio})"

    @property
    def way(self) -> Way:
        """How to do the next round."""
        if self._content_for > 0 and self.winner is not None:
            return self.winner
        return Way.FAMILIAR if len(self._blocks) % 2 == 0 else Way.OTHER

    def note(self, way: Way, seconds: float) -> None:
        """A round was done this way and took this long. One not done the way asked for tells nothing."""
        if way is not self.way:
            return
        if self._content_for > 0:
            self._content_for -= 1
            return
        if self._uncounted < _UNCOUNTED:
            self._uncounted += 1
            return
        self._block.append(seconds)
        if len(self._block) == _COUNTED:
            self._blocks.append(self._block)
            self._block, self._uncounted = [], 0
        if len(self._blocks) == 2 * _BLOCKS:
            self._decide()

    def _decide(self) -> None:
        familiar, other = (median(map(_low, self._blocks[first::2])) for first in (0, 1))
        self.ratio = other / familiar if familiar > 0 else 1.0
        self.winner = Way.OTHER if self.ratio <= self.margin else Way.FAMILIAR
        self._blocks = []
        self._content_for = self._next_content
        self._next_content = min(2 * self._next_content, _MOST_CONTENT)


def _low(times: list[float]) -> float:
    return sorted(times)[int(_LOW * len(times))]
