"""Owns drafting by a second, smaller model: it decodes ahead of the target, from rows of its own.

Its rows cover what the target's rows cover. While it drafts it runs ahead by the pending token and all proposals but
the last; what of that turns out wrong is cut off again, and what it has not read (the last proposal, tokens that came
from elsewhere, plain steps) is owed and read before the next draft, all of it in one forward where it fits.

Each token is drawn by the row's own rules with the noise of the very draw it stands for, so where both models are of
one mind about the odds they draw the same token. Or it is the likeliest one, whatever the row's rules.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import mlx.core as mx

from mlxbcd.model.forward import Forward, Group
from mlxbcd.sampling.sampler import Samplers
from mlxbcd.spec.drafter import Asked, Companion, Covered, Selection, token_list
from mlxbcd.spec.followers import Followers, FollowersChange
from mlxbcd.spec.pace import Pace
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key
from mlxbcd.state.layout import Stored
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit

CHUNK: Final = 64
"""Tokens that are read at once of what is owed, so that a row with a long text holds nobody up for long."""


@dataclass(slots=True)
class ModelDrafter:
    """Drafts with a model that shares the target's vocabulary.

    Args:
        vocab_size: of the target. The model's logits may be wider or narrower, since checkpoints of one tokenizer are
            padded differently: what it has beyond is left out, and what it lacks it neither scores nor draws.
        selection: how tokens of a draft are drawn.

    Raises:
        ValueError: the model's state can't be shared or cut back.
    """

    forward: Forward
    composition: Composition
    vocab_size: int
    name: str = "model"
    selection: Selection = Selection.REQUEST
    reads_hidden: bool = field(default=False, init=False)
    taps: Sequence[int] = field(default=(), init=False)
    token_bytes: float = field(init=False)
    _width: int = field(init=False)
    _ids: mx.array | None = field(default=None, init=False)
    _own: Followers[list[int]] = field(init=False)
    _pace: Pace = field(default_factory=Pace, init=False)

    def __post_init__(self) -> None:
        if self.composition.reason:
            raise ValueError(f"the draft model's rows run alone: {self.composition.reason}")
        if self.composition.recorder is not None or self.composition.rollback_reason:
            raise ValueError("the draft model's state can't be cut back token by token; take one with attention alone")
        self._own = Followers(Rows(self.composition, widest=CHUNK), lambda companion: list(companion.owed))
        self.token_bytes, self._width = self._measured()
        if self._width < self.vocab_size:
            self._ids = token_list(range(self._width), self.vocab_size)

    def __repr__(self) -> str:
        return f"ModelDrafter({self.name}, {self._own.rows})"

    @property
    def nbytes(self) -> int:
        return self._own.rows.nbytes

    def seconds(self, rows: int, depth: int) -> float:
        """See `Drafter.seconds`."""
        return self._pace.expected(rows, depth)

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> FollowersChange[list[int]]:
        """See `Drafter.prepare`."""
        return self._own.prepare(keep=keep, join=join)

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        """See `Drafter.draft`. A row that owes much reads some of it, and proposes nothing yet."""
        ready = [row for row in rows if len(self._own.owed[row.key]) < CHUNK and row.most > 0]
        self._read({row.key: self._own.owed[row.key][:CHUNK] for row in rows if len(self._own.owed[row.key]) >= CHUNK})
        if not ready:
            return [[] for _ in rows]
        began = time.perf_counter()
        inputs = {row.key: [*self._own.owed[row.key], row.pending] for row in ready}
        self._own.make_room({key: len(tokens) + depth - 1 for key, tokens in inputs.items()})
        last = self._feed(inputs, {key: len(tokens) for key, tokens in inputs.items()})
        samplers = Samplers([row.sampler.supposing(())[0] for row in ready], self._ids)
        drafts: list[mx.array] = []
        for step in range(depth):
            if step:
                ids = {row.key: drafts[-1][i : i + 1] for i, row in enumerate(ready)}
                last = self._feed(ids, dict.fromkeys(ids, 1))
            logits = self._logits(mx.concatenate([last[row.key] for row in ready]))
            drafts.append(self.selection.draw(logits, samplers))
        read = cast("list[list[int]]", mx.stack(drafts, axis=1).tolist())
        proposals = {row.key: tokens for row, tokens in zip(ready, read, strict=True)}
        for row in ready:
            self._own.owed[row.key] = []
            self._own.ahead[row.key] = depth
        self._pace.saw(len(ready), depth, time.perf_counter() - began)
        return [proposals.get(row.key, []) for row in rows]

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        """See `Drafter.commit`."""
        for row in covered:
            known = self._own.resolve(row.key, len(row.tokens))
            self._own.owed[row.key] += row.tokens[known:]

    def settle(self, key: Key) -> None:
        """Read all that a row owes."""
        while owed := self._own.owed[key]:
            self._read({key: owed[:CHUNK]})

    def capture(self, key: Key) -> Companion:
        """See `Drafter.capture`."""
        self.settle(key)
        return Companion(self._own.rows.extract(key), [])

    @property
    def kept(self) -> Sequence[Stored]:
        """See `Drafter.kept`."""
        return self._own.rows.layouts

    def held(self, key: Key, length: int) -> RowState | None:
        """See `Drafter.held`. What ran ahead of the target is left out, and so is what is owed."""
        rows = self._own.rows
        state = rows.read(key)
        covered = min(length, state.length - self._own.ahead.get(key, 0))
        if covered == state.length:
            return state
        return replace(state, length=covered) if all(layout.positional for layout in rows.layouts) else None

    def revived(self, state: RowState, tokens: Sequence[int], hidden: mx.array | None) -> Companion:
        """See `Drafter.revived`."""
        return Companion(state, list(tokens[state.length :]))

    def discard(self) -> None:
        """See `Drafter.discard`."""
        self._own.discard()

    def _read(self, tokens: Mapping[Key, Sequence[int]]) -> None:
        """Process owed tokens for their state alone."""
        if not tokens:
            return
        self._feed(tokens, {key: len(own) for key, own in tokens.items()})
        mx.eval(self._own.rows.arrays())
        for key, own in tokens.items():
            del self._own.owed[key][: len(own)]

    def _feed(self, inputs: Mapping[Key, Sequence[int] | mx.array], lengths: Mapping[Key, int]) -> dict[Key, mx.array]:
        """Run rows over their inputs, at most `CHUNK` each; the others stay as they are.

        Returns:
            Hidden state of each one's last input, [1, 1, D].
        """
        width = max(lengths.values())
        turn = self._own.rows.begin(width)
        order = self._own.rows.order
        ids = mx.concatenate([_padded(inputs[key], width) if key in inputs else _padded([0], width) for key in order])
        # A token that it has no embedding of is read as another one.
        (hidden,) = self.forward.run([Group(mx.minimum(ids, self._width - 1), turn.caches)])
        turn.resolve([lengths.get(key, 0) for key in order])
        ends = {key: (i, lengths[key]) for i, key in enumerate(order) if key in lengths}
        return {key: hidden[i : i + 1, n - 1 : n] for key, (i, n) in ends.items()}

    def _logits(self, hidden: mx.array) -> mx.array:
        """Of the tokens that both vocabularies have, [B, K], of hidden states [B, 1, D]."""
        return self.forward.head(hidden)[:, -1, : self.vocab_size]

    def _measured(self) -> tuple[float, int]:
        """Bytes per token, of a row that has read one; and the width of the logits."""
        rows = Rows(self.composition, widest=1)
        commit(rows.prepare(join=[Joiner("probe", COLD, 1)]))
        turn = rows.begin(1)
        (hidden,) = self.forward.run([Group(mx.zeros((1, 1), dtype=mx.int32), turn.caches)])
        turn.resolve()
        mx.eval(rows.arrays())
        return rows.nbytes / rows.place("probe").group.capacity, self.forward.head(hidden).shape[-1]


def _padded(tokens: Sequence[int] | mx.array, width: int) -> mx.array:
    """One row of ids, int32 [1, width]."""
    if isinstance(tokens, mx.array):
        return mx.broadcast_to(tokens.astype(mx.int32)[None], (1, width))
    return mx.array([[*tokens, *[tokens[-1]] * (width - len(tokens))]], dtype=mx.int32)
