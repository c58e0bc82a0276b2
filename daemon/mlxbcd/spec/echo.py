"""Owns a row's echo: which span of known text the row may be copying just now, and what would follow. Pure.

Known text is the row's own, prompt and output, and sources that a client supplies: a file to edit, a tool's answer. A
*span* opens where the newest tokens stand in it already. Nothing is risked on it until then, and each token that is
drawn confirms it or ends it, whoever proposed what. A row that copies with changes goes on behind them: after a
mismatch in a long span the next tokens are tried at the places where the original would continue if tokens had been
replaced, left out or put in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from mlxbcd.spec.lookup import LONGEST, SHORTEST, SuffixIndex
from mlxbcd.spec.rates import Believed, Rates

_STEPS: Final = (SHORTEST + 1, SHORTEST + 2, SHORTEST + 4, 10, 15, 24, 40)
_LENGTHS: Final = len(_STEPS) + 1
_RESUMED: Final = 4
PLACES: Final = _LENGTHS + _RESUMED
"""Places of an echo's rates: by how many tokens have agreed, then by how many have since it resumed after a change."""

BELIEVED: Final = Believed([0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 0.92, 0.96, 0.3, 0.5, 0.7, 0.85])
"""Rates of spans before any have been seen."""

_RESUMABLE: Final = 8
"""Tokens that must have agreed for a span to be taken up again behind a change."""
_CHANGED: Final = 12
"""Most tokens of a change that it is taken up behind."""
_NEAR: Final = 12
"""How far ahead in the original a drawn token is looked for."""


class Origin(Enum):
    """Whose text a span copies."""

    OWN = "own"
    SOURCE = "source"


def place_of(agreed: int, since: int | None) -> int:
    """Place in an echo's rates of the next token of a span.

    Args:
        agreed: tokens that agreed, those before the span opened included.
        since: tokens that agreed since it resumed; None if it has not.
    """
    if since is not None and since < _RESUMED:
        return _LENGTHS + since
    return next((place for place, step in enumerate(_STEPS) if agreed < step), len(_STEPS))


@dataclass(slots=True)
class Span:
    """A stretch of known text that the row seems to copy.

    Attributes:
        position: of the token that would be next.
        agreed: tokens that agreed.
        since: of them, those since it resumed after a change; None if it has not.
        anchor: where the original stood when the change began.
        changed: tokens drawn since then that did not agree.
    """

    position: int
    agreed: int
    since: int | None = None
    anchor: int = 0
    changed: int = 0

    @property
    def place(self) -> int:
        return place_of(self.agreed, self.since)


class Echo:
    """One row's echo. Every token the row draws is told to it; it never needs to be taken back.

    Args:
        prompt: the row's tokens so far.
        sources: texts supplied for this row, as token ids.
        rates: of spans by their origin; several rows may believe and teach the same prior.
        own: whether the row's own text may be copied too.

    Attributes:
        span: the open one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sources: Iterable[Sequence[int]] = (),
        *,
        rates: dict[Origin, Rates] | None = None,
        own: bool = True,
    ) -> None:
        self.span: Span | None = None
        self._own = own
        self._rates = rates or {origin: Rates(PLACES, BELIEVED, keeps=0.97) for origin in Origin}
        self._index = SuffixIndex()
        for source in sources:
            for token in (*source, -1):
                self._index.append(token)
        self._sources = len(self._index)
        self._recent = list(prompt[-LONGEST:])
        if own:
            for token in prompt:
                self._index.append(token)
        self._open()

    def __repr__(self) -> str:
        return f"Echo({self._index}, {self.span})"

    @property
    def origin(self) -> Origin:
        """Of the open span."""
        assert self.span is not None
        return Origin.SOURCE if self.span.position < self._sources else Origin.OWN

    def propose(self, most: int) -> list[int]:
        """Up to `most` tokens that would follow; none without an open span."""
        return self._index.follow(self.span.position, most) if self.span is not None and most > 0 else []

    def chances(self, n: int) -> list[float]:
        """Of the next n tokens of the open span, how likely each is right if all before it are."""
        span = self.span
        if span is None:
            return []
        rates = self._rates[self.origin].table()
        since = span.since
        return [rates[place_of(span.agreed + i, None if since is None else since + i)] for i in range(n)]

    def observe(self, token: int) -> None:
        """The row has drawn a token."""
        span, expected = self.span, None
        if span is not None:
            expected = self._index.text[span.position] if span.position < len(self._index) else -1
            if expected >= 0:
                self._rates[self.origin].saw(span.place, right=expected == token)
        self._recent = [*self._recent[1 - LONGEST :], token]
        if self._own:
            self._index.append(token)
        if span is not None and expected == token:
            span.position += 1
            span.agreed += 1
            if span.since is not None:
                span.since += 1
            if self.propose(1):
                return
            # The original has ended; perhaps it stands elsewhere too.
            self.span = None
        lost = self.span
        self._open()
        if self.span is None and lost is not None:
            self.span = self._resume(lost, token)

    def settle(self) -> None:
        """Close the open span."""
        self.span = None

    def _open(self) -> None:
        match = self._index.find(self._recent)
        self.span = None if match is None else Span(match.position, match.length)

    def _resume(self, lost: Span, token: int) -> Span | None:
        """Where a span may go on after `token` was drawn instead of its next one."""
        firm = lost.since is None or lost.since >= _RESUMED
        if firm and lost.agreed < _RESUMABLE:
            return None
        anchor = lost.position if firm else lost.anchor
        changed = 1 if firm else lost.changed + 1
        if changed > _CHANGED:
            return None
        ahead = self._index.follow(anchor, _NEAR + changed)
        if token in ahead:
            # It, or a token like it, stands further on: what lies between has been left out or replaced.
            position = anchor + ahead.index(token) + 1
        else:
            position = anchor + changed
        if position >= anchor + len(ahead):
            return None
        return Span(position, _RESUMABLE, 0, anchor, changed)
