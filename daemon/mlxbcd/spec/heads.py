"""Owns drafting by a multi-token-prediction head: one layer that reads the target's hidden states.

An entry of the head's state is a hidden state of the target and the token behind it. The pending token makes an entry
with the newest hidden state, whose answer is the first proposal; from there on the head reads its own answers, and
those entries are cut off again when the target's own states are known. Of a prompt it reads the end: more would have
to be kept for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import mlx.core as mx

from mlxbcd.model.forward import Forward
from mlxbcd.model.heads import Head, embedding
from mlxbcd.sampling.sampler import Samplers
from mlxbcd.spec.drafter import READ_OF_PROMPT, Asked, Companion, Covered, Selection
from mlxbcd.state.composition import of_keys_and_values
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, PreparedChange, Rows

_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class _Owed:
    """What a row's head has not read: tokens that are covered, and their hidden states, [1, 1, D] or longer each."""

    tokens: list[int] = field(default_factory=list)
    hidden: list[mx.array] = field(default_factory=list)

    def add(self, tokens: Sequence[int], hidden: mx.array) -> None:
        self.tokens += tokens
        self.hidden.append(hidden)
        if len(self.tokens) > READ_OF_PROMPT:
            whole = mx.concatenate(self.hidden, axis=1)[:, -READ_OF_PROMPT:]
            self.tokens, self.hidden = self.tokens[-READ_OF_PROMPT:], [whole]


@dataclass(slots=True)
class HeadDrafter:
    """Drafts with a head of the target's own checkpoint."""

    forward: Forward
    head: Head
    vocab_size: int
    name: str = "mtp"
    selection: Selection = Selection.REQUEST
    reads_hidden: bool = field(default=True, init=False)
    _rows: Rows = field(init=False)
    _owed: dict[Key, _Owed] = field(default_factory=dict, init=False)
    _ahead: dict[Key, int] = field(default_factory=dict, init=False)
    _token_s: dict[int, float] = field(default_factory=dict, init=False)
    _token_bytes: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._rows = Rows(of_keys_and_values(1), widest=READ_OF_PROMPT)

    def __repr__(self) -> str:
        return f"HeadDrafter({self._rows})"

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def token_bytes(self) -> float:
        """See `Drafter.token_bytes`. Of its newest rows; 0 before the first."""
        rooms = sum(self._rows.place(key).group.capacity for key in self._rows.order)
        if rooms and self._rows.nbytes:
            self._token_bytes = self._rows.nbytes / rooms
        return self._token_bytes

    def seconds(self, rows: int, depth: int) -> float:
        """What a draft is expected to take; 0 before the first."""
        if not self._token_s:
            return 0.0
        return depth * self._token_s[min(self._token_s, key=lambda seen: (abs(seen - rows), seen))]

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> _Change:
        """See `Drafter.prepare`."""
        kept = [key for key in self._rows.order if key in keep]
        joiners = [Joiner(key, companion.state, companion.length + 1) for key, companion in join.items()]
        return _Change(self, [self._rows.prepare(keep=kept, join=joiners)], set(kept), dict(join))

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        """See `Drafter.draft`. A row of which no hidden state is known yet proposes nothing."""
        ready = [row for row in rows if self._owed[row.key].tokens and row.most > 0]
        if not ready:
            return [[] for _ in rows]
        began = time.perf_counter()
        hidden, tokens = {}, {}
        for row in ready:
            owed = self._owed[row.key]
            hidden[row.key] = mx.concatenate(owed.hidden, axis=1)
            tokens[row.key] = mx.array([[*owed.tokens[1:], row.pending]], dtype=mx.int32)
            self._owed[row.key] = _Owed()
        samplers = Samplers([row.sampler.supposing(())[0] for row in ready])
        drafts: list[mx.array] = []
        for step in range(depth):
            if step:
                tokens = {row.key: drafts[-1][i : i + 1, None] for i, row in enumerate(ready)}
            hidden = self._feed(hidden, tokens)
            last = mx.concatenate([hidden[row.key] for row in ready])
            logits = self.forward.head(last)[:, -1, : self.vocab_size]
            greedy = self.selection is Selection.LIKELIEST
            drafts.append(mx.argmax(logits, axis=-1).astype(mx.uint32) if greedy else samplers.draw(logits).tokens)
        read = cast("list[list[int]]", mx.stack(drafts, axis=1).tolist())
        proposals = {row.key: own for row, own in zip(ready, read, strict=True)}
        for row in ready:
            self._ahead[row.key] = depth - 1
        self._saw(len(ready), depth, time.perf_counter() - began)
        return [proposals.get(row.key, []) for row in rows]

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        """See `Drafter.commit`."""
        assert hidden is not None, "a head reads hidden states"
        for i, row in enumerate(covered):
            if ahead := self._ahead.pop(row.key, 0):
                self._rows.trim(row.key, self._rows.lengths[row.key] - ahead)
            self._owed[row.key].add(row.tokens, hidden[i : i + 1, : len(row.tokens)])

    def capture(self, key: Key) -> Companion:
        """See `Drafter.capture`. What is owed needs the token behind it, so that stays owed."""
        owed = self._owed[key]
        hidden = mx.concatenate(owed.hidden, axis=1) if owed.hidden else None
        return Companion(self._rows.extract(key), list(owed.tokens), hidden)

    def discard(self) -> None:
        """See `Drafter.discard`."""
        self._rows = self._rows.successor()
        self._owed.clear()
        self._ahead.clear()

    def _feed(self, hidden: Mapping[Key, mx.array], tokens: Mapping[Key, mx.array]) -> dict[Key, mx.array]:
        """Let the head read entries: hidden states [1, n, D] and tokens [1, n] of some rows.

        Returns:
            Its answer to each one's last entry, [1, 1, D].
        """
        width = max(ids.shape[1] for ids in tokens.values())
        blank = mx.zeros((1, width, next(iter(hidden.values())).shape[-1]), next(iter(hidden.values())).dtype)
        turn = self._rows.begin(width)
        order = self._rows.order
        lengths = [tokens[key].shape[1] if key in tokens else 0 for key in order]
        states = [
            mx.concatenate([hidden[key], blank[:, n:]], axis=1) if n else blank
            for key, n in zip(order, lengths, strict=True)
        ]
        ids = [
            mx.pad(tokens[key].astype(mx.int32), [(0, 0), (0, width - n)]) if n else mx.zeros((1, width), mx.int32)
            for key, n in zip(order, lengths, strict=True)
        ]
        embedded = embedding(self.forward.model)(mx.concatenate(ids))
        out = self.head(mx.concatenate(states), embedded, turn.caches[0])
        turn.resolve(lengths)
        return {key: out[i : i + 1, n - 1 : n] for i, (key, n) in enumerate(zip(order, lengths, strict=True)) if n}

    def _saw(self, rows: int, depth: int, seconds: float) -> None:
        before = self._token_s.get(rows, seconds / depth)
        self._token_s[rows] = before + _SMOOTHING * (seconds / depth - before)


@dataclass(slots=True)
class _Change:
    """A membership change of the head's rows; see `spec.drafter.Change`."""

    drafter: HeadDrafter
    prepared: Sequence[PreparedChange]
    keep: set[Key]
    join: dict[Key, Companion]

    def commit(self) -> None:
        drafter = self.drafter
        drafter._owed = {key: owed for key, owed in drafter._owed.items() if key in self.keep}
        drafter._ahead = {key: n for key, n in drafter._ahead.items() if key in self.keep}
        for key, companion in self.join.items():
            drafter._owed[key] = _Owed()
            if companion.hidden is not None and companion.owed:
                drafter._owed[key].add(companion.owed[-companion.hidden.shape[1] :], companion.hidden)
