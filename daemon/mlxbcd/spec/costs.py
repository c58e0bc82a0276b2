"""Owns what verifying costs on this machine: measured seconds of forwards by rows and width. Pure.

A *plain step* is one of pipelined decode. A *round* is a forward that somebody waits for, `width` tokens in each row,
with all the host does around it. Rounds of one row are measured when a model is loaded; what running ones take refines
that, and says how it is with several rows and longer contexts.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

MEASURED: Final = (1, 2, 4, 8, 16, 32)
"""Widths that are measured at load."""

_SMOOTHING: Final = 0.2
_OUTLIER: Final = 3.0
"""A figure this many times what was expected counts as no more: the machine was busy with something else."""


@dataclass(slots=True)
class VerifyCosts:
    """Measured seconds.

    Attributes:
        curve: of one row's rounds by width, as measured at load; empty where nobody has measured.
        plain_s: of plain steps by rows.
        round_s: of rounds by (rows, width), as they run.
    """

    curve: dict[int, float] = field(default_factory=dict)
    plain_s: dict[int, float] = field(default_factory=dict)
    round_s: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether widths can be compared at all."""
        return bool(self.curve)

    def saw_plain(self, rows: int, seconds: float) -> None:
        """A plain step of `rows` rows took this long."""
        self.plain_s[rows] = _smoothed(self.plain_s.get(rows), seconds)

    def saw_round(self, rows: int, width: int, seconds: float) -> None:
        """A round took this long."""
        expected = self.round(rows, width) if self.known else seconds
        before = self.round_s.get((rows, width), expected)
        self.round_s[rows, width] = _smoothed(before, seconds)

    def plain(self, rows: int) -> float:
        """Expected seconds of a plain step. Needs to be `known`, as all that follows."""
        if rows in self.plain_s:
            return self.plain_s[rows]
        if not self.plain_s:
            return self._shape(rows)
        nearest = min(self.plain_s, key=lambda seen: (abs(seen - rows), seen))
        return self.plain_s[nearest] * self._shape(rows) / self._shape(nearest)

    def round(self, rows: int, width: int) -> float:
        """Expected seconds of a round."""
        if (rows, width) in self.round_s:
            return self.round_s[rows, width]
        expected = self._model(rows, width)
        near = [seen for of, seen in self.round_s if of == rows]
        if not near:
            return expected
        nearest = min(near, key=lambda seen: (abs(seen - width), seen))
        return expected * self.round_s[rows, nearest] / self._model(rows, nearest)

    def alone(self, rows: int) -> float:
        """Expected seconds of a round without proposals: what a step costs that is not built ahead."""
        return max(self.round(rows, 1), self.plain(rows))

    def _model(self, rows: int, width: int) -> float:
        """A round that has not been seen: as much more than a round of width 1 as those tokens cost one row."""
        return max(self.plain(rows), self._shape(rows)) + max(self._shape(rows * width) - self._shape(rows), 0.0)

    def _shape(self, tokens: int) -> float:
        """Seconds of one row's round of that many tokens: a line from one measured width to the next."""
        widths = sorted(self.curve)
        at = min(max(bisect_left(widths, tokens), 1), len(widths) - 1) if len(widths) > 1 else 0
        if not at:
            return self.curve[widths[0]]
        low, high = widths[at - 1], widths[at]
        slope = max(self.curve[high] - self.curve[low], 0.0) / (high - low)
        return self.curve[low] + slope * (tokens - low)


def _smoothed(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    return before + _SMOOTHING * (min(seconds, _OUTLIER * before) - before)
