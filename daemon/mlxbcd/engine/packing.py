"""Owns when a decode step and a prefill piece are run as one packed forward: where that was measured to pay. Pure.

What is compared is a forward's time by the time that was expected of the two separate ones, so that runs at different
depths of a context can be told against each other. It is kept by ranges of two sizes: the positions that ride along
(those of the decode step) and the positions of the whole forward, both up to the next power of two. In a range of which
nothing is known groups run separately; now and then the way that isn't taken is tried once, ever more rarely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

_ENOUGH: Final = 3
"""Measurements of both ways before packing can be taken to pay."""
_GAIN: Final = 0.05
"""Packing begins where it saves more than this, and ends where it saves nothing."""
_SMOOTHING: Final = 0.2
_OUTLIER: Final = 2.0
"""A figure this many times another than expected counts as no more: the machine did something else."""
_PATIENCE: Final = 8
"""Runs one way before the other is tried, at first; doubled by every look that changes nothing."""
_MOST_PATIENCE: Final = 256
_UNKNOWN: Final = 1.1
"""How much longer than expected a forward may take that was never tried."""


@dataclass(slots=True)
class Figure:
    """Times by what was expected of separate forwards.

    Attributes:
        seen: how many there were.
        ratio: their fading mean.
    """

    seen: int = 0
    ratio: float = 1.0

    def see(self, ratio: float) -> None:
        """Take in a run."""
        self.seen += 1
        if self.seen > 1:
            ratio = min(max(ratio, self.ratio / _OUTLIER), self.ratio * _OUTLIER)
        self.ratio += max(_SMOOTHING, 1 / self.seen) * (ratio - self.ratio)


@dataclass(slots=True)
class Range:
    """What is known of forwards of about one size.

    Attributes:
        packs: packing is what is done.
        waited: runs since the way not taken was last tried.
        patience: how many there are between two tries.
    """

    separate: Figure = field(default_factory=Figure)
    packed: Figure = field(default_factory=Figure)
    packs: bool = False
    waited: int = 0
    patience: int = _PATIENCE

    @property
    def curious(self) -> bool:
        """The way not taken is to be tried."""
        return self.waited >= self.patience

    def see(self, ratio: float, *, packed: bool) -> None:
        """Take in a run."""
        (self.packed if packed else self.separate).see(ratio)
        if packed == self.packs:
            self.waited += 1
            looked = False
        else:
            self.waited = 0
            looked = True
        before, self.packs = self.packs, self._pays()
        if self.packs != before:
            self.waited, self.patience = 0, _PATIENCE
        elif looked and min(self.separate.seen, self.packed.seen) >= _ENOUGH:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)

    def _pays(self) -> bool:
        if min(self.separate.seen, self.packed.seen) < _ENOUGH:
            return False
        margin = 0.0 if self.packs else _GAIN
        return self.packed.ratio < (1 - margin) * self.separate.ratio


class PackingRanges:
    """What one model's mixed forwards have cost on this machine."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], Range] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackingRanges) and self._ranges == other._ranges

    def __repr__(self) -> str:
        paying = [f"{riding}/{total}: {gain:.2f}" for riding, total, gain in self.paying()]
        return f"PackingRanges({', '.join(paying) or 'nothing pays'})"

    def choose(self, riding: int, total: int, expected_s: float, budget_s: float) -> bool:
        """Whether to pack.

        Args:
            riding: positions of the decode step.
            total: positions of both forwards.
            expected_s: what is expected of them one after the other.
            budget_s: what they should take at most; nothing is tried that is not expected to fit.
        """
        known = self._ranges.get(_sizes(riding, total))
        if known is None:
            return False
        other = known.separate if known.packs else known.packed
        likely = other.ratio if other.seen else _UNKNOWN
        explores = known.curious and likely * expected_s <= budget_s
        return known.packs != explores

    def saw(self, riding: int, total: int, seconds: float, expected_s: float, *, packed: bool) -> None:
        """A mixed forward, or the two separate ones together, took this long. Ignored where nothing was expected."""
        if expected_s > 0 and isfinite(seconds):
            known = self._ranges.setdefault(_sizes(riding, total), Range())
            known.see(seconds / expected_s, packed=packed)

    def paying(self) -> list[tuple[int, int, float]]:
        """Where packing is what is done: the largest sizes of each range, and how many times faster it is."""
        return [
            (*sizes, known.separate.ratio / known.packed.ratio)
            for sizes, known in sorted(self._ranges.items())
            if known.packs
        ]

    def saved(self) -> dict[str, Any]:
        """Plain values for `restored`, to be kept across restarts."""
        return {
            f"{riding}/{total}": {
                "separate": [known.separate.seen, known.separate.ratio],
                "packed": [known.packed.seen, known.packed.ratio],
                "packs": known.packs,
                "waited": known.waited,
                "patience": known.patience,
            }
            for (riding, total), known in self._ranges.items()
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> PackingRanges:
        """What `saved` gave.

        Raises:
            ValueError: it is nothing that `saved` gives.
        """
        ranges = cls()
        try:
            for name, entry in saved.items():
                riding, total = map(int, name.split("/"))
                known = Range(
                    _figure(*entry["separate"]),
                    _figure(*entry["packed"]),
                    packs=bool(entry["packs"]),
                    waited=int(entry["waited"]),
                    patience=min(max(int(entry["patience"]), _PATIENCE), _MOST_PATIENCE),
                )
                ranges._ranges[_sizes(riding, total)] = known
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are no packing ranges: {error}") from error
        return ranges


def _sizes(riding: int, total: int) -> tuple[int, int]:
    if not 0 < riding <= total:
        raise ValueError(f"{riding} positions can't ride in a forward of {total}")
    return 1 << (riding - 1).bit_length(), 1 << (total - 1).bit_length()


def _figure(seen: Any, ratio: Any) -> Figure:
    seen, ratio = int(seen), float(ratio)
    if seen < 0 or not (isfinite(ratio) and ratio > 0):
        raise ValueError(f"a ratio of {ratio} after {seen} runs")
    return Figure(seen, ratio)
