"""Owns the few statistics that the benchmarks share. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` (0 … 1) of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def gaps_during(arrivals: Sequence[float], begin: float, end: float) -> list[float]:
    """Times between successive arrivals that overlap the interval from `begin` to `end`.

    A gap that began before the interval, or ended after it, counts whole: that is how long a reader waited.
    """
    return [later - earlier for earlier, later in pairwise(arrivals) if later > begin and earlier < end]
