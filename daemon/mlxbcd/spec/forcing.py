"""Owns what a row's grammar proposes: how often it leaves no choice, how long, and how often that comes true. Pure.

A grammar that knows the next text does not know its tokens: the model may spell it otherwise. So forced tokens are
verified like any proposals. They are only known once the token before them has been read, and whether to read it early
depends on how often that has paid.
"""

from __future__ import annotations

from typing import Final

from mlxbcd.spec.rates import Believed, Rates

_PLACES: Final = 8
_SMOOTHING: Final = 0.2


class Forcing:
    """One row's grammar as a source of proposals."""

    def __init__(self) -> None:
        self._known = Rates(1, Believed([0.3]), keeps=0.9)
        self._right = Rates(_PLACES, Believed([0.9]), keeps=0.95, chained=4.0)
        self._length = 4.0

    def __repr__(self) -> str:
        return f"Forcing(known {self._known.at(0):.2f}, {self._length:.1f} long, {self._right})"

    def chances(self, n: int) -> list[float]:
        """How likely each of n forced tokens is right if all before it are."""
        rates = self._right.table()
        return [rates[min(place, _PLACES - 1)] for place in range(n)]

    def expected(self, most: int) -> list[float]:
        """The chance that the token in flight is followed by forced ones, and those of as many as there usually are."""
        return [self._known.at(0), *self.chances(min(round(self._length), most))]

    def saw(self, forced: int) -> None:
        """A token was read, and this many are forced behind it."""
        self._known.saw(0, right=forced > 0)
        if forced:
            self._length += _SMOOTHING * (forced - self._length)

    def verified(self, drafted: int, accepted: int) -> None:
        """Of so many forced tokens the first ones were drawn."""
        self._right.saw_draft(drafted, accepted)
