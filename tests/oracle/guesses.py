"""Owns drafters that propose whatever a test wants, on the host alone, and check what they are told."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlxbcd.spec.drafter import Asked, Companion, Covered
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, PreparedChange

Guess = Callable[[Key, int, int], list[int]]
"""Given a row, how many tokens it has drawn, and the depth: what to propose."""


@dataclass
class Guesses:
    """A drafter without a model.

    Attributes:
        texts: each row's tokens that the target has processed, as it was told.
        asked: drafts made.
    """

    guess: Guess
    texts: dict[Key, list[int]] = field(default_factory=dict)
    prompts: dict[Key, int] = field(default_factory=dict)
    asked: int = 0
    name: str = "guesses"
    reads_hidden: bool = False
    taps: Sequence[int] = ()
    nbytes: int = 0
    token_bytes: float = 0.0

    def seconds(self, rows: int, depth: int) -> float:
        return 0.0

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> _Change:
        return _Change(self, set(keep), dict(join))

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        self.asked += 1
        # What has been processed and the pending token have been drawn, but for the prompt.
        return [self.guess(row.key, len(self.texts[row.key]) - self.prompts[row.key] + 1, depth) for row in rows]

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        for row in covered:
            self.texts[row.key] += row.tokens

    def capture(self, key: Key) -> Companion:
        return Companion(COLD, list(self.texts[key]))

    def discard(self) -> None:
        self.texts.clear()


@dataclass
class _Change:
    drafter: Guesses
    keep: set[Key]
    join: dict[Key, Companion]
    prepared: Sequence[PreparedChange] = ()

    def commit(self) -> None:
        drafter = self.drafter
        drafter.texts = {key: text for key, text in drafter.texts.items() if key in self.keep}
        for key, companion in self.join.items():
            drafter.texts[key] = list(companion.owed)
            drafter.prompts[key] = len(companion.owed)


def right(texts: Mapping[Key, Sequence[int]]) -> Guess:
    """The very tokens that each row will draw."""
    return lambda key, drawn, depth: list(texts[key][drawn : drawn + depth])


def wrong(texts: Mapping[Key, Sequence[int]], vocabulary: int) -> Guess:
    """Never what comes."""
    return lambda key, drawn, depth: [(token + 1) % vocabulary for token in texts[key][drawn : drawn + depth]]


def always(token: int) -> Guess:
    return lambda key, drawn, depth: [token] * depth


def anything(vocabulary: int) -> Guess:
    rng = random.Random(0)
    return lambda key, drawn, depth: [rng.randrange(vocabulary) for _ in range(depth)]


def mixed(texts: Mapping[Key, Sequence[int]], vocabulary: int) -> Guess:
    """What comes, with mistakes, and as many as it likes: none, fewer than asked for, or more."""
    rng = random.Random(1)

    def guess(key: Key, drawn: int, depth: int) -> list[int]:
        own = texts[key][drawn : drawn + rng.randrange(depth + 4)]
        return [token if rng.random() < 0.8 else rng.randrange(vocabulary) for token in own]

    return guess
