"""Owns what drafts take, as they were timed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_SMOOTHING: Final = 0.2
_OUTLIER: Final = 3.0
"""A draft that takes this many times what was expected counts as no more: the process did not run meanwhile. And where
one takes so much less, what was expected was never true: the first one reads the weights from the disk."""


@dataclass(slots=True)
class Pace:
    """Seconds per drafted token, by the number of rows that drafted together."""

    _token_s: dict[int, float] = field(default_factory=dict)

    def expected(self, rows: int, depth: int) -> float:
        """Seconds that a draft of so many tokens is expected to take; 0 before the first."""
        if not self._token_s:
            return 0.0
        return depth * self._token_s[min(self._token_s, key=lambda seen: (abs(seen - rows), seen))]

    def saw(self, rows: int, depth: int, seconds: float) -> None:
        """A draft took so long."""
        token_s = seconds / depth
        before = min(self._token_s.get(rows, token_s), _OUTLIER * token_s)
        self._token_s[rows] = before + _SMOOTHING * (min(token_s, _OUTLIER * before) - before)
