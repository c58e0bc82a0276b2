"""Owns when rows in preparation share a forward as a *cohort*: where that was measured to pay. Pure.

A forward costs a fixed part and a part per token. What a cohort saves is fixed parts; but each of its rows has its
first token only when all are done. So a row comes along only where that costs at most half of a forward of its own:
then its tokens cost no more than the fixed part does, and even the mean wait is shorter together. Longer prompts are
bound by computing, and go one after the other, least remaining first.

What a cohort's forward takes by what was expected of it is kept by the power of two that its tokens come to. Where
nothing is known a little more is assumed than for one row's forward, and what was found out is slowly forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, TypeAlias

from mlxbcd.engine.costs import Costs

Part: TypeAlias = tuple[int, int]
"""A row's tokens in a forward, and how many of its tokens are before them."""

_WORTH: Final = 0.5
"""The share of its own forward that coming along may cost a row."""
_UNKNOWN: Final = 1.1
_SMOOTHING: Final = 0.3
_OUTLIER: Final = 2.0
_FADING: Final = 0.99
"""What each further forward leaves of what was found out."""


@dataclass(slots=True)
class _Seen:
    """Forwards of about one size: their time by what was expected, and when there was one last."""

    ratio: float
    at: int


@dataclass(slots=True)
class Cohorts:
    """What one model's cohorts have cost on this machine."""

    _seen: dict[int, _Seen] = field(default_factory=dict)
    _forwards: int = 0

    def expected(self, parts: Sequence[Part], costs: Costs) -> float:
        """Seconds that one forward of these rows is expected to take."""
        if len(parts) == 1:
            return costs.piece(*parts[0])
        return self._ratio(_size(parts)) * _model(parts, costs)

    def takes(self, parts: Sequence[Part], more: Part, costs: Costs, budget_s: float) -> bool:
        """Whether one more row should come along, in a forward that is to keep to a budget."""
        if not costs.widest:
            return False
        together = self.expected([*parts, more], costs)
        return together <= budget_s and together - self.expected(parts, costs) <= _WORTH * costs.piece(*more)

    def saw(self, parts: Sequence[Part], seconds: float, costs: Costs) -> None:
        """A prefill forward of these rows, by itself, took this long."""
        self._forwards += 1
        if len(parts) > 1 and costs.widest and isfinite(seconds):
            size = _size(parts)
            ratio, known = seconds / _model(parts, costs), self._seen.get(size)
            if known is not None:
                ratio = known.ratio + _SMOOTHING * (min(ratio, _OUTLIER * known.ratio) - known.ratio)
            self._seen[size] = _Seen(ratio, self._forwards)

    def saved(self) -> dict[str, float]:
        """Plain values for `restored`, to be kept across restarts."""
        return {str(size): self._ratio(size) for size in self._seen}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Cohorts:
        """What `saved` gave.

        Raises:
            ValueError: it is nothing that `saved` gives.
        """
        try:
            ratios = {int(size): float(ratio) for size, ratio in saved.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"these are no cohorts: {error}") from error
        if not all(size > 0 and isfinite(ratio) and ratio > 0 for size, ratio in ratios.items()):
            raise ValueError("what cohorts have cost can't be true")
        return cls({size: _Seen(ratio, 0) for size, ratio in ratios.items()})

    def _ratio(self, size: int) -> float:
        known = self._seen.get(size)
        if known is None:
            return _UNKNOWN
        return _UNKNOWN + (known.ratio - _UNKNOWN) * _FADING ** (self._forwards - known.at)


def _model(parts: Sequence[Part], costs: Costs) -> float:
    """Seconds of one forward for all, if it made no difference whose the tokens are."""
    return costs.fixed + sum(costs.piece(*part) - costs.fixed for part in parts)


def _size(parts: Sequence[Part]) -> int:
    return 1 << (sum(width for width, _ in parts) - 1).bit_length()
