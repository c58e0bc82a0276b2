"""Owns acceptance rates: how often a proposal at some place was right, of late. Pure.

A place is a small integer: how deep in its draft a proposal stands, or how long a copied span has been right. Each
place forgets at its own pace, and where little has been seen of it what is believed beforehand counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

_CERTAIN: Final = 0.998
"""No rate is taken to be higher: a proposal can always be wrong."""


class Prior(Protocol):
    """What is believed about each place before anything has been seen there."""

    def at(self, place: int) -> float:
        """The rate of a place, in (0, 1)."""
        ...

    def saw(self, place: int, *, right: bool) -> None:
        """A proposal at a place was right or wrong, somewhere."""
        ...


class Believed:
    """Fixed rates; the last one holds for all places behind it."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates = tuple(rates)

    def at(self, place: int) -> float:
        return self._rates[min(place, len(self._rates) - 1)]

    def saw(self, place: int, *, right: bool) -> None:
        """Nothing changes them."""


class Rates:
    """Decayed counts of right and wrong proposals for each of `places` places.

    Args:
        prior: what is believed of places that little is known of; it learns from what is seen here.
        keeps: what an observation at a place leaves of the earlier ones there.
        weight: observations that the prior counts for; what is seen of a place fades it too.
        chained: observations that each place's predecessor counts for. For drafts, whose places follow each other as
            they do in the prior: those that have rarely been reached are as good, or as bad, as the ones before them.
            0 takes every place by itself.
    """

    def __init__(self, places: int, prior: Prior, *, keeps: float, weight: float = 2.0, chained: float = 0.0) -> None:
        self._prior = prior
        self._keeps = keeps
        self._chained = chained
        self._weight = [weight] * places
        self._right = [0.0] * places
        self._seen = [0.0] * places

    def __repr__(self) -> str:
        return f"Rates({', '.join(f'{rate:.2f}' for rate in self.table())})"

    def at(self, place: int) -> float:
        """The rate of a place, in (0, 1)."""
        place = min(place, len(self._seen) - 1)
        return self.table()[place] if self._chained else self._rate(place, self._prior.at(place), self._weight[place])

    def table(self) -> list[float]:
        """The rates of all places."""
        rates: list[float] = []
        before = 0.0
        for place, weight in enumerate(self._weight):
            believed = self._prior.at(place)
            if self._chained and rates:
                rates.append(self._rate(place, min(rates[-1] * believed / before, 1.0), self._chained))
            else:
                rates.append(self._rate(place, believed, weight))
            before = believed
        return rates

    def saw(self, place: int, *, right: bool) -> None:
        """A proposal at a place was right or wrong."""
        place = min(place, len(self._seen) - 1)
        self._weight[place] *= self._keeps
        self._seen[place] = self._seen[place] * self._keeps + 1.0
        self._right[place] = self._right[place] * self._keeps + right
        self._prior.saw(place, right=right)

    def saw_draft(self, drafted: int, accepted: int) -> None:
        """The first `accepted` of `drafted` proposals were right, and the next one, if any, was wrong."""
        for place in range(accepted):
            self.saw(place, right=True)
        if accepted < drafted:
            self.saw(accepted, right=False)

    def _rate(self, place: int, believed: float, weight: float) -> float:
        return min((self._right[place] + weight * believed) / (self._seen[place] + weight), _CERTAIN)
