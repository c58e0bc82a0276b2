"""Owns what verifying costs on this machine: measured seconds of forwards by rows and width. Pure.

A *plain step* is one of pipelined decode. A *round* is a forward that somebody waits for, `width` tokens in each row,
with all the host does around it. Rounds of one row are measured when a model is loaded; what running ones take refines
that, and says how it is with several rows and longer contexts. All of it is kept from one load to the next.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_SMOOTHING: Final = 0.2
_OUTLIER: Final = 3.0
"""A figure this many times what was expected counts as no more: the machine was busy with something else."""
_FADING: Final = 0.995
"""What each further round leaves of one that was seen: contexts grow, and what looked too dear is tried again."""


@dataclass(slots=True)
class _Seen:
    """Rounds of one shape: their seconds by what was expected of them, and when one was seen last."""

    ratio: float
    at: int


@dataclass(slots=True)
class VerifyCosts:
    """Measured seconds.

    Attributes:
        curve: of one row's rounds by width, as measured at a load; empty where nobody has measured.
        plain_s: of plain steps by rows.
    """

    curve: dict[int, float] = field(default_factory=dict)
    plain_s: dict[int, float] = field(default_factory=dict)
    _seen: dict[tuple[int, int], _Seen] = field(default_factory=dict)
    _rounds: int = 0

    @property
    def known(self) -> bool:
        """Whether widths can be compared at all."""
        return bool(self.curve)

    def saw_plain(self, rows: int, seconds: float) -> None:
        """A plain step of `rows` rows took this long."""
        self.plain_s[rows] = _smoothed(self.plain_s.get(rows, seconds), seconds)

    def saw_round(self, rows: int, width: int, seconds: float) -> None:
        """A round took this long."""
        if self.known:
            expected = self._model(rows, width)
            before = self.round(rows, width) / expected
            self._rounds += 1
            self._seen[rows, width] = _Seen(_smoothed(before, seconds / expected), self._rounds)

    def saved(self) -> dict[str, Any]:
        """What was seen of steps and rounds as plain values, which `recall` takes. The curve is another's to keep."""
        rounds = [[rows, width, self.round(rows, width)] for rows, width in self._seen] if self.known else []
        return {"plain": [[rows, seconds] for rows, seconds in self.plain_s.items()], "rounds": rounds}

    def recall(self, saved: Mapping[str, Any]) -> None:
        """Believe what `saved` gave, until it is seen again. What was seen here already stays.

        Raises:
            ValueError: it is nothing that `saved` gives.
        """
        try:
            plain = {int(rows): float(seconds) for rows, seconds in saved.get("plain", ())}
            rounds = {(int(rows), int(width)): float(seconds) for rows, width, seconds in saved.get("rounds", ())}
        except (AttributeError, TypeError) as error:
            raise ValueError(f"these are no costs of verifying: {error}") from error
        shapes = [*((rows, 1) for rows in plain), *rounds]
        seconds = [*plain.values(), *rounds.values()]
        if min(map(min, shapes), default=1) < 1 or not all(0.0 < one < math.inf for one in seconds):
            raise ValueError("these costs of verifying can't be true")
        self.plain_s = plain | self.plain_s
        if self.known:
            old = {shape: _Seen(one / self._model(*shape), self._rounds) for shape, one in rounds.items()}
            self._seen = old | self._seen

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
        seen = self._seen.get((rows, width))
        near = self._nearest(rows, width)
        around = near.ratio if near is not None else 1.0
        if seen is None:
            ratio = around
        else:
            ratio = around + (seen.ratio - around) * _FADING ** (self._rounds - seen.at)
        return self._model(rows, width) * ratio

    def idle(self, rows: int) -> float:
        """Expected seconds that a step loses if it can't be built ahead."""
        return max(self._shape(1) - self.plain(1), 0.0)

    def _nearest(self, rows: int, width: int) -> _Seen | None:
        """The round of so many rows whose width is nearest to this one, itself left out."""
        near = [other for of, other in self._seen if of == rows and other != width]
        if not near:
            return None
        return self._seen[rows, min(near, key=lambda other: (abs(other - width), other))]

    def _model(self, rows: int, width: int) -> float:
        """A round that has not been seen: as much more than a plain step as its further tokens cost one row."""
        return self.plain(rows) + self.idle(rows) + max(self._shape(rows * width) - self._shape(rows), 0.0)

    def _shape(self, tokens: int) -> float:
        """Seconds of one row's round of that many tokens: a line from one measured width to the next."""
        widths = sorted(self.curve)
        at = min(max(bisect_left(widths, tokens), 1), len(widths) - 1) if len(widths) > 1 else 0
        if not at:
            return self.curve[widths[0]]
        low, high = widths[at - 1], widths[at]
        slope = max(self.curve[high] - self.curve[low], 0.0) / (high - low)
        return self.curve[low] + slope * (tokens - low)


def _smoothed(before: float, seconds: float) -> float:
    return before + _SMOOTHING * (min(seconds, _OUTLIER * before) - before)
