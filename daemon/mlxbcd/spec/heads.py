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
from typing import cast

import mlx.core as mx

from mlxbcd.model.forward import Forward
from mlxbcd.model.heads import Head, embedding
from mlxbcd.sampling.sampler import Samplers
from mlxbcd.spec.drafter import READ_OF_PROMPT, Asked, Companion, Covered, Selection, token_list
from mlxbcd.spec.followers import Followers, FollowersChange
from mlxbcd.spec.pace import Pace
from mlxbcd.state.composition import of_keys_and_values
from mlxbcd.state.geometry import Key
from mlxbcd.state.layout import Stored
from mlxbcd.state.recurrent import Recurrence
from mlxbcd.state.rows import Rows, RowState


@dataclass(frozen=True, slots=True)
class _Whole:
    """Stored as it is at one length: what a head has read begins where it was first asked, not at the row's start."""

    positional: bool = False


_WHOLE = _Whole()


@dataclass(slots=True)
class _Owed:
    """What a row's head has not read: tokens that are covered, and their hidden states, [1, 1, D] or longer each.

    Attributes:
        end: so many of the row's tokens the head has been told of, these the last of them.
    """

    tokens: list[int] = field(default_factory=list)
    hidden: list[mx.array] = field(default_factory=list)
    end: int = 0

    @classmethod
    def of(cls, companion: Companion) -> _Owed:
        """What a row owes that joins: tokens whose hidden states were kept."""
        owed = cls()
        if companion.hidden is not None and companion.owed:
            owed.add(companion.owed[-companion.hidden.shape[1] :], companion.hidden)
        owed.end = companion.length
        return owed

    def add(self, tokens: Sequence[int], hidden: mx.array) -> None:
        self.tokens += tokens
        self.end += len(tokens)
        self.hidden.append(hidden)
        if len(self.tokens) > READ_OF_PROMPT:
            whole = mx.concatenate(self.hidden, axis=1)[:, -READ_OF_PROMPT:]
            self.tokens, self.hidden = self.tokens[-READ_OF_PROMPT:], [whole]


@dataclass(slots=True)
class HeadDrafter:
    """Drafts with a head of the target's own checkpoint.

    Args:
        selection: how tokens of a draft are drawn.
        listed: the tokens that the head's own output layer scores, if it has one.

    Raises:
        ValueError: the list is not that of the head, or not one of the vocabulary.
    """

    forward: Forward
    head: Head
    vocab_size: int
    name: str = "mtp"
    selection: Selection = Selection.REQUEST
    listed: Sequence[int] = ()
    reads_hidden: bool = field(default=True, init=False)
    taps: Sequence[int] = field(default=(), init=False)
    _own: Followers[_Owed] = field(init=False)
    _pace: Pace = field(default_factory=Pace, init=False)
    _token_bytes: float = field(default=0.0, init=False)
    _ids: mx.array | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if len(self.listed) != self.head.scores:
            raise ValueError(f"the head scores {self.head.scores} listed tokens, and the list names {len(self.listed)}")
        if self.listed:
            self._ids = token_list(self.listed, self.vocab_size)
        self._own = Followers(Rows(of_keys_and_values(1), widest=READ_OF_PROMPT), _Owed.of)

    def __repr__(self) -> str:
        return f"HeadDrafter({self._own.rows})"

    @property
    def nbytes(self) -> int:
        return self._own.rows.nbytes

    @property
    def token_bytes(self) -> float:
        """See `Drafter.token_bytes`. Of its newest rows; 0 before the first."""
        rooms = sum(self._own.rows.place(key).group.capacity for key in self._own.rows.order)
        if rooms and self._own.rows.nbytes:
            self._token_bytes = self._own.rows.nbytes / rooms
        return self._token_bytes

    def seconds(self, rows: int, depth: int) -> float:
        """See `Drafter.seconds`."""
        return self._pace.expected(rows, depth)

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> FollowersChange[_Owed]:
        """See `Drafter.prepare`."""
        return self._own.prepare(keep=keep, join=join)

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        """See `Drafter.draft`. A row of which no hidden state is known yet proposes nothing."""
        ready = [row for row in rows if self._own.owed[row.key].tokens and row.most > 0]
        if not ready:
            return [[] for _ in rows]
        began = time.perf_counter()
        hidden, tokens = {}, {}
        for row in ready:
            owed = self._own.owed[row.key]
            hidden[row.key] = mx.concatenate(owed.hidden, axis=1)
            tokens[row.key] = mx.array([[*owed.tokens[1:], row.pending]], dtype=mx.int32)
            self._own.owed[row.key] = _Owed(end=owed.end)
        samplers = Samplers([row.sampler.supposing(())[0] for row in ready], self._ids)
        drafts: list[mx.array] = []
        for step in range(depth):
            if step:
                tokens = {row.key: drafts[-1][i : i + 1, None] for i, row in enumerate(ready)}
            hidden = self._feed(hidden, tokens)
            last = mx.concatenate([hidden[row.key] for row in ready])
            drafts.append(self.selection.draw(self._logits(last), samplers))
        read = cast("list[list[int]]", mx.stack(drafts, axis=1).tolist())
        proposals = {row.key: own for row, own in zip(ready, read, strict=True)}
        for row in ready:
            self._own.ahead[row.key] = depth - 1
        self._pace.saw(len(ready), depth, time.perf_counter() - began)
        return [proposals.get(row.key, []) for row in rows]

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        """See `Drafter.commit`."""
        assert hidden is not None, "a head reads hidden states"
        for i, row in enumerate(covered):
            self._own.resolve(row.key, 0)
            self._own.owed[row.key].add(row.tokens, hidden[i : i + 1, : len(row.tokens)])

    def capture(self, key: Key) -> Companion:
        """See `Drafter.capture`. What is owed needs the token behind it, so that stays owed."""
        owed = self._own.owed[key]
        hidden = mx.concatenate(owed.hidden, axis=1) if owed.hidden else None
        return Companion(self._own.rows.extract(key), list(owed.tokens), hidden)

    @property
    def kept(self) -> Sequence[Stored]:
        """See `Drafter.kept`: entries, and the hidden states that are owed."""
        return (_WHOLE, _WHOLE)

    def held(self, key: Key, length: int) -> RowState | None:
        """See `Drafter.held`. Of what is owed the end can be left out, and of entries nothing.

        The target may have processed a token that nobody was told of, since the row had ended when it was drawn.
        """
        owed, state = self._own.owed[key], self._own.rows.read(key)
        left = len(owed.tokens) - max(owed.end - length, 0)
        if left <= 0 or not state.layers or self._own.ahead.get(key, 0):
            return None
        hidden = mx.concatenate(owed.hidden, axis=1)[:, :left]
        return RowState(min(length, owed.end), (*state.layers, Recurrence((hidden,))))

    def revived(self, state: RowState, tokens: Sequence[int], hidden: mx.array | None) -> Companion:
        """See `Drafter.revived`. Where hidden states behind the kept ones are not known it begins anew."""
        known, behind = 0 if hidden is None else hidden.shape[1], len(tokens) - state.length
        if known < behind:
            return Companion.cold(tokens, hidden)
        entries, owed = state.layers
        (whole,) = owed.slots
        if hidden is not None:
            whole = mx.concatenate([whole, hidden[:, known - behind :]], axis=1)
        read = entries.parts[0].shape[2]
        return Companion(RowState(read, (entries,)), list(tokens[read:]), whole)

    def discard(self) -> None:
        """See `Drafter.discard`."""
        self._own.discard()

    def _logits(self, hidden: mx.array) -> mx.array:
        """Of the tokens that are scored, [B, V] or [B, K], of the head's answers [B, 1, D]."""
        if self._ids is not None:
            return cast(mx.array, self.head.output(hidden))[:, -1]
        return self.forward.head(hidden)[:, -1, : self.vocab_size]

    def _feed(self, hidden: Mapping[Key, mx.array], tokens: Mapping[Key, mx.array]) -> dict[Key, mx.array]:
        """Let the head read entries: hidden states [1, n, D] and tokens [1, n] of some rows.

        Returns:
            Its answer to each one's last entry, [1, 1, D].
        """
        width = max(ids.shape[1] for ids in tokens.values())
        blank = mx.zeros((1, width, next(iter(hidden.values())).shape[-1]), next(iter(hidden.values())).dtype)
        turn = self._own.rows.begin(width)
        order = self._own.rows.order
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
