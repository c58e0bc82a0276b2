"""Owns the suffix index: where in a text the newest tokens stand already, and what followed there. Pure.

Runs of `SHORTEST` tokens are chained from the newest to the oldest place they end at, and the best of the newest few is
the one whose past agrees longest. Appending is constant time; so is looking up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

SHORTEST: Final = 3
"""Tokens that must agree at least."""

LONGEST: Final = 48
"""Agreement is not counted further back than this."""
_TRIED: Final = 12
"""Places compared in one search."""
_BITS: Final = 21
"""Of a token id in a key: more than any vocabulary needs. Larger ids would only collide, and be compared."""
_RUN: Final = (1 << _BITS * SHORTEST) - 1


@dataclass(frozen=True, slots=True)
class Match:
    """A place in the text whose past is that of another text.

    Attributes:
        position: index of the token that followed.
        length: tokens before it that agree.
    """

    position: int
    length: int


class SuffixIndex:
    """A growing text of token ids that knows where runs of tokens end.

    Attributes:
        text: the tokens. Negative ones match nothing; they keep what stands on either side apart.
    """

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._key = 0
        self._run = 0
        self._newest: dict[int, int] = {}
        self._older: list[int] = [0]
        for token in text:
            self.append(token)

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        return f"SuffixIndex({len(self)} tokens)"

    def append(self, token: int) -> None:
        """Add a token at the end."""
        self.text.append(token)
        older = 0
        if token < 0:
            self._run = 0
        else:
            self._key = (self._key << _BITS | token) & _RUN
            self._run += 1
            if self._run >= SHORTEST:
                older = self._newest.get(self._key, 0)
                self._newest[self._key] = len(self.text)
        self._older.append(older)

    def find(self, recent: Sequence[int]) -> Match | None:
        """Where the last tokens of `recent`, at least `SHORTEST` of them, stand in the text with something behind them.

        The longest agreement among the newest places wins, the newest of equal ones.
        """
        if len(recent) < SHORTEST:
            return None
        key = 0
        for token in recent[-SHORTEST:]:
            if token < 0:
                return None
            key = (key << _BITS | token) & _RUN
        best: Match | None = None
        position = self._newest.get(key, 0)
        for _ in range(_TRIED):
            if not position:
                break
            if position < len(self.text) and self.text[position] >= 0:
                length = self._agreement(position, recent)
                if length >= SHORTEST and (best is None or length > best.length):
                    best = Match(position, length)
            position = self._older[position]
        return best

    def follow(self, position: int, most: int) -> list[int]:
        """Up to `most` tokens from `position` on, as far as they belong together.

        At the end of the text they go on as if it repeated from `position` on: what copies itself is a loop.
        """
        run = self.text[position : position + most]
        end = next((i for i, token in enumerate(run) if token < 0), None)
        if end is not None:
            return run[:end]
        while run and len(run) < most:
            run += run[: most - len(run)]
        return run

    def _agreement(self, position: int, recent: Sequence[int]) -> int:
        """How many tokens before `position` are the last ones of `recent`."""
        text, most = self.text, min(position, len(recent), LONGEST)
        for back in range(1, most + 1):
            if text[position - back] != recent[-back]:
                return back - 1
        return most
