"""Owns the two sides of `rows`: our collection and mlx-lm's batch caches, which hold the same made-up rows.

Keys and values are random, since nothing but their size costs time, and every row has its own. Both sides get the same
arrays, so the logits of a step over either must agree: `difference` is what shows that both did the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.generate import _extend_cache, _merge_caches
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlxbcd.model.forward import Forward
from mlxbcd.state.attention import AttentionLayout
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.rows import Joiner, Rows, RowState, Turn, commit
from mlxbcd.state.schemes import Plain
from mlxbcd.state.store import Prefix

Predict: TypeAlias = Callable[[mx.array, Sequence[Any]], mx.array]
"""Logits [B, N, vocab] of token ids [B, N], which are appended to the caches of all layers."""

_FIRST_TOKEN = 100
_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True)
class MadeRow:
    """A row that no model has computed: keys and values [1, heads, length, dim] of every layer, evaluated."""

    key: int
    length: int
    layers: tuple[tuple[mx.array, mx.array], ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for layer in self.layers for part in layer)

    def beginning(self, key: int, length: int) -> MadeRow:
        """Another row, which has the first `length` tokens of this one."""
        layers = tuple((keys[:, :, :length], values[:, :, :length]) for keys, values in self.layers)
        return MadeRow(key, length, layers)

    def state(self) -> RowState:
        """The row as one of our collections takes it in."""
        return RowState(self.length, tuple(Prefix(layer, 0, Plain()) for layer in self.layers))

    def caches(self) -> list[KVCache]:
        """The row as mlx-lm holds it alone."""
        caches = []
        for keys, values in self.layers:
            caches.append(KVCache())
            caches[-1].state = (keys, values, self.length)
        return caches


class Pair:
    """One model on both sides, with the same arrays: behind our seams, and as the zoo has it.

    Args:
        forward: ours; every layer of the model has plain attention.
        model_type: the model's.
        twin: the peer's.
    """

    def __init__(self, forward: Forward, model_type: str, twin: Any) -> None:
        self._forward = forward
        self._twin = twin
        self._composition = inspect(forward.model, model_type)
        caches = self._composition.make_stock()
        twin(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
        self._layers = len(caches)
        _, self._heads, _, self._dim = caches[0].keys.shape

    def ours(self, *, widest: int = 1) -> Ours:
        """Our rows, empty, for forwards of at most `widest` tokens."""
        return Ours(self._ahead, self._composition, widest)

    def theirs(self) -> Theirs:
        """The peer's rows, empty."""
        return Theirs(lambda ids, caches: self._twin(ids, cache=caches))

    def theirs_in_our_forward(self) -> Theirs:
        """The peer's caches, empty, with all the rest ours."""
        return Theirs(self._ahead)

    def row(self, key: int, length: int) -> MadeRow:
        """A row of `length` tokens, the same for the same `key`."""
        seed, made = mx.random.key(key), []
        for _ in range(self._layers):
            seed, *own = mx.random.split(seed, 3)
            shape = (1, self._heads, length, self._dim)
            keys, values = (mx.random.uniform(-1, 1, shape, key=part) for part in own)
            made.append((keys, values))
        mx.eval(made)
        return MadeRow(key, length, tuple(made))

    def _ahead(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        return self._forward.head(self._forward.hidden(ids, caches))


class Side(Protocol):
    """Rows that decode together. What an operation defers is computed by `settle` or by the next `step`."""

    @property
    def order(self) -> list[int]:
        """The rows' keys in batch order."""
        ...

    def merge(self, rows: Sequence[MadeRow]) -> None:
        """Take the first rows in."""
        ...

    def ready(self, row: MadeRow) -> Any:
        """What `join` takes: the row as it is when its prompt has been processed."""
        ...

    def join(self, ready: Any) -> None:
        """Take a row in among the running ones."""
        ...

    def drop(self, key: int) -> None:
        """Let a row go."""
        ...

    def step(self) -> mx.array:
        """One decode step; its logits [B, vocab] in batch order, evaluated."""
        ...

    def verify(self, width: int) -> None:
        """A forward of `width` tokens per row, evaluated, which `take_back` ends."""
        ...

    def take_back(self, kept: Mapping[int, int]) -> None:
        """Row by row, keep the first so many tokens of `verify`."""
        ...

    def settle(self) -> None:
        """Compute the rows' state."""
        ...


class Ours:
    """Our rows."""

    def __init__(self, predict: Predict, composition: Composition, widest: int) -> None:
        self._predict = predict
        self._rows = Rows(composition, widest=widest)
        self._turn: Turn | None = None

    @property
    def order(self) -> list[int]:
        return [key for key in self._rows.order if isinstance(key, int)]

    def merge(self, rows: Sequence[MadeRow]) -> None:
        commit(self._rows.prepare(join=[self.ready(row) for row in rows]))
        self.settle()

    def ready(self, row: MadeRow) -> Joiner:
        return Joiner(row.key, row.state(), row.length + 1)

    def join(self, ready: Joiner) -> None:
        commit(self._rows.prepare(join=[ready]))

    def drop(self, key: int) -> None:
        commit(self._rows.prepare(keep=[other for other in self._rows.order if other != key]))

    def step(self) -> mx.array:
        turn = self._rows.begin(1)
        logits = self._predict(_tokens(self.order, 1), turn.caches)[:, -1]
        turn.resolve()
        mx.eval(logits)
        return logits

    def verify(self, width: int) -> None:
        self._turn = self._rows.begin(width, reversible=True)
        with self._turn.forward() as caches:
            mx.eval(self._predict(_tokens(self.order, width), caches))

    def take_back(self, kept: Mapping[int, int]) -> None:
        assert self._turn is not None, "verify first"
        self._turn.resolve([kept[key] for key in self.order])
        self._turn = None

    def settle(self) -> None:
        mx.eval([layout.arrays() for layout in self._rows.layouts])

    def class_bytes(self, key: int) -> int:
        """Bytes of the buffers that a row shares with those of its class, in all layers."""
        group = self._rows.place(key).group
        layouts = [layout for layout in self._rows.layouts if isinstance(layout, AttentionLayout)]
        return sum(layout.stores[group].nbytes for layout in layouts)


class Theirs:
    """mlx-lm's batch caches, changed as its BatchGenerator changes them."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._caches: list[BatchKVCache] = []
        self._width = 0
        self.order: list[int] = []

    def merge(self, rows: Sequence[MadeRow]) -> None:
        self._caches = _merge_caches([row.caches() for row in rows])
        self.order = [row.key for row in rows]
        self.settle()

    def ready(self, row: MadeRow) -> Theirs:
        alone = Theirs(self._predict)
        alone.merge([row])
        return alone

    def join(self, ready: Theirs) -> None:
        self._caches = _extend_cache(self._caches, ready._caches)
        self.order += ready.order

    def drop(self, key: int) -> None:
        keep = [i for i, other in enumerate(self.order) if other != key]
        for cache in self._caches:
            cache.filter(keep)
        self.order.remove(key)

    def step(self) -> mx.array:
        logits = self._predict(_tokens(self.order, 1), self._caches)[:, -1]
        mx.eval(logits)
        return logits

    def verify(self, width: int) -> None:
        self._width = width
        mx.eval(self._predict(_tokens(self.order, width), self._caches))

    def take_back(self, kept: Mapping[int, int]) -> None:
        # Its caches keep every row's end at one index: what all rows give back is trimmed, and for the rest it has what
        # it does to prompts of different lengths, which it pads on the right and then rolls into place.
        back = [self._width - kept[key] for key in self.order]
        common = min(back)
        for cache in self._caches:
            cache.trim(common)
            cache.prepare(right_padding=[count - common for count in back])
            cache.finalize()

    def settle(self) -> None:
        mx.eval([[cache.keys, cache.values, cache.offset, cache.left_padding] for cache in self._caches])


def difference(ours: Side, our_logits: mx.array, theirs: Side, their_logits: mx.array) -> float:
    """The largest difference between two sides' logits [B, vocab] of one step, relative to a row's largest logit.

    Raises:
        RuntimeError: the two have not computed the same thing, so comparing their times would mean nothing.
    """
    if sorted(ours.order) != sorted(theirs.order):
        raise RuntimeError(f"one side has the rows {ours.order}, the other {theirs.order}")
    mine, other = np.array(our_logits), np.array(their_logits)[[theirs.order.index(key) for key in ours.order]]
    worst = float((np.abs(mine - other).max(axis=-1) / np.abs(other).max(axis=-1)).max())
    if not worst <= _DIFFERENCE:
        raise RuntimeError(f"the two sides have computed different things: {worst:.1e} apart")
    return worst


def _tokens(order: Sequence[int], width: int) -> mx.array:
    """The tokens that rows are given next: the same for the same key."""
    return mx.array([[_FIRST_TOKEN + key * width + n for n in range(width)] for key in order])
