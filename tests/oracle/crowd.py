"""Owns a crowd: rows of one family that come, run together, go back and leave, each checked against its text alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit
from oracle.alone import LENGTH, Text, texts
from oracle.families import Family

WIDEST: Final = 4
"""Tokens of a crowd's widest step; a window's ring has room for one less beside the window."""

CHUNK: Final = 16
"""Tokens of the widest step in preparation."""


@dataclass(frozen=True)
class Newcomer:
    """A row to be admitted cold: `length` tokens of a text, with room for more than that."""

    text: int
    length: int
    spare: int = 1


@dataclass(frozen=True)
class Saved:
    """What `extract` gave for a row of a text."""

    text: int
    state: RowState


class Crowd:
    """Rows of one family in one collection.

    Args:
        composition: another than the family's own; then `alone` says what a row of it gives alone.

    Attributes:
        rows: the collection.
        text_of: which text each row is a prefix of.
    """

    def __init__(
        self, family: Family, composition: Composition | None = None, alone: Sequence[Text] | None = None
    ) -> None:
        self.family = family
        self.composition = composition or family.composition
        self.texts = alone or texts(family.name)
        self.rows = Rows(self.composition, widest=WIDEST)
        self.text_of: dict[Key, int] = {}
        self._born = 0

    def __repr__(self) -> str:
        held = ", ".join(f"{key}: {self.text_of[key]}[:{n}]" for key, n in self.rows.lengths.items())
        return f"Crowd({self.family.name}: {held})"

    @property
    def keys(self) -> list[int]:
        """The rows, in batch order."""
        return [int(str(key)) for key in self.rows.order]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def reversible(self) -> bool:
        """Whether rows may take tokens back."""
        return not self.composition.rollback_reason

    @property
    def begins(self) -> bool:
        """Whether recurrent layers have seen nothing yet."""
        return self.composition.recorder is not None and 0 in self.rows.lengths.values()

    def admit(self, newcomers: Sequence[Newcomer], widths: Sequence[int] = (CHUNK,)) -> list[int]:
        """Prepare rows together, in forwards of `widths` (over and over) where no row ends sooner, and let each join
        when its prompt ends. Their keys, in order."""
        keys = [self._key(newcomer.text) for newcomer in newcomers]
        cohort = Rows(self.composition, widest=CHUNK)
        left = dict(zip(keys, (newcomer.length for newcomer in newcomers), strict=True))
        spare = dict(zip(keys, (newcomer.spare for newcomer in newcomers), strict=True))
        commit(cohort.prepare(join=[Joiner(key, COLD, left[key]) for key in keys]))
        i = 0
        while left:
            width = min(*left.values(), widths[i % len(widths)], CHUNK)
            self._run(cohort, width)
            i += 1
            left = {key: n - width for key, n in left.items()}
            done = [key for key, n in left.items() if not n]
            left = {key: n for key, n in left.items() if n}
            if done:
                joiners = [Joiner(key, cohort.read(key), cohort.lengths[key] + spare[key]) for key in done]
                commit(self.rows.prepare(join=joiners), cohort.prepare(keep=left))
        return keys

    def restore(self, saved: Sequence[Saved], newcomers: Sequence[int] = ()) -> list[int]:
        """Let rows join from what `extract` gave, together with cold rows of the texts `newcomers`; where recurrent
        layers can't begin among others, those have run their first token."""
        joiners = [Joiner(self._key(each.text), each.state, each.state.length + 1) for each in saved]
        cold = [Joiner(self._key(text), COLD, 1) for text in newcomers]
        apart = bool(cold) and bool(joiners or len(self)) and self.composition.recorder is not None
        commit(self.rows.prepare(join=joiners if apart else joiners + cold))
        if apart:
            with contextlib.suppress(ValueError):
                self.rows.prepare(join=cold)
                raise AssertionError("a cold row got a recurrent state made up for it")
            return [int(str(joiner.key)) for joiner in joiners] + self.admit([Newcomer(t, 1) for t in newcomers])
        return [int(str(joiner.key)) for joiner in joiners + cold]

    def step(self, width: int = 1, kept: Sequence[int] | None = None) -> None:
        """Run all rows, checking every position's logits; row i of the batch order keeps ``kept[i]`` tokens."""
        self.retire(width)
        if len(self):
            self._run(self.rows, width, kept)

    def retire(self, width: int) -> None:
        """Let rows leave whose text has no `width` tokens left."""
        self.filter(key for key, n in self.rows.lengths.items() if n + width <= LENGTH)

    def filter(self, keep: Iterable[Key]) -> None:
        """Let the other rows leave."""
        keep = list(keep)
        if len(keep) < len(self):
            commit(self.rows.prepare(keep=keep))

    def extract(self, key: int, length: int | None = None) -> Saved:
        """Take a copy of a row's state, or of its first `length` tokens, and check it."""
        saved = Saved(self.text_of[key], self.rows.extract(key, length))
        self._text(key).check_state(saved.state.length, saved.state.layers)
        return saved

    def check_states(self) -> None:
        """Every row's state is that of its text alone."""
        for key in self.keys:
            self.extract(key)

    def _run(self, rows: Rows, width: int, kept: Sequence[int] | None = None) -> None:
        with_undo = kept is not None
        before = dict(rows.lengths)
        turn = rows.begin(width, reversible=with_undo)
        order = rows.order
        ids = [self._text(key).tokens[before[key] : before[key] + width] for key in order]
        with turn.forward() as caches:
            hidden = self.family.forward.hidden(mx.array(ids), caches)
        logits = self.family.forward.head(hidden)
        mx.eval(logits)
        turn.resolve(kept)
        for i, key in enumerate(order):
            self._text(key).check_logits(before[key], logits[i])
            assert rows.lengths[key] == before[key] + (width if kept is None else kept[i])

    def _text(self, key: Key) -> Text:
        return self.texts[self.text_of[key]]

    def _key(self, text: int) -> int:
        self._born += 1
        self.text_of[self._born] = text
        return self._born
