"""Owns a toy model over a collection of rows: layers of every kind, whose states tell which row they are of."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from mlxbcd.model import zoo
from mlxbcd.model.forward import HeldKeys
from mlxbcd.state.composition import Composition, KvScheme, Traits
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, Rows, RowState, commit

HEADS: Final = 2
DIM: Final = 64
BYTES_PER_TOKEN: Final = 2 * HEADS * DIM * 4
"""Of one attention layer: keys and values in float32."""


def composition(*kinds: str, opaque: bool = True, kv: KvScheme | None = None) -> Composition:
    """Layers of the given kinds: "full", "window" (of 8 positions), "recurrent" or "nested" (full and recurrent)."""
    zoo.bind()
    from mlx_lm.models import cache

    def make(kind: str) -> Any:
        match kind:
            case "full":
                return cache.KVCache()
            case "window":
                return cache.RotatingKVCache(max_size=8)
            case "recurrent":
                return cache.ArraysCache(size=1)
            case "nested":
                return cache.CacheList(cache.KVCache(), cache.ArraysCache(size=1))
        raise AssertionError(kind)

    traits = Traits(opaque=opaque, scheme=None if kv is None else kv.scheme)
    return Composition(kinds, lambda: [make(kind) for kind in kinds], traits=traits, kv=kv)


def rows_of(made: Composition, lengths: dict[Key, int], *, widest: int = 4) -> Rows:
    """A collection with rows that have run that many tokens each, prepared alone as an engine would."""
    rows = Rows(made, widest=widest)
    for key, length in lengths.items():
        commit(rows.prepare(join=[Joiner(key, prepared(made, key, length), length + 1)]))
    mx.eval([array for layout in rows.layouts for array in layout.arrays()])
    return rows


def prepared(made: Composition, key: Key, length: int) -> RowState:
    """The state of a row that has run `length` tokens alone."""
    alone = Rows(made, widest=max(length, 1))
    commit(alone.prepare(join=[Joiner(key, RowState(0), length)]))
    forward(alone, length)
    return alone.extract(key)


def forward(rows: Rows, width: int = 1, kept: Sequence[int] | None = None) -> mx.array:
    """Run the toy model and evaluate it; what it answers, [B, width, DIM]: a function of each row's key and tokens."""
    turn = rows.begin(width)
    order, starts = rows.order, turn.step.starts
    token = mx.stack([_token(key, start, width) for key, start in zip(order, starts, strict=True)])
    answer = mx.zeros_like(token)
    for view in turn.caches:
        answer = answer + _layer(view, token, width)
    mx.eval(answer)
    turn.resolve(kept)
    return answer


def _token(key: Key, start: int, width: int) -> mx.array:
    """What a row's tokens look like, [width, DIM]; the same whatever shares the forward."""
    positions = mx.arange(start, start + width, dtype=mx.float32)[:, None]
    phase = mx.arange(DIM, dtype=mx.float32)[None] * 0.37 + zlib.crc32(str(key).encode()) % 97
    return mx.sin(positions * 0.7 + phase)


def _layer(view: Any, token: mx.array, width: int) -> mx.array:
    if hasattr(view, "caches"):
        return sum((_layer(inner, token, width) for inner in view.caches), mx.zeros_like(token))
    if hasattr(view, "update_and_fetch"):
        heads = mx.repeat(token[:, None], HEADS, axis=1)
        mask = view.make_mask(width)
        keys, values = view.update_and_fetch(heads, heads * 2)
        if isinstance(keys, HeldKeys):
            attended = keys.attend(heads, values, 1.0, mask, None)
        else:
            attended = mx.fast.scaled_dot_product_attention(heads, keys, values, scale=1.0, mask=mask)
        return attended[:, 0]
    state = view[0]
    state = mx.zeros((token.shape[0], DIM)) if state is None else state
    for i in range(width):
        state = 0.5 * state + token[:, i]
    view[0] = state
    return state[:, None]


def contents(rows: Rows) -> dict[Key, list[mx.array]]:
    """Copies of everything the rows hold."""
    return {key: rows.extract(key).arrays for key in rows.order}


def same(before: dict[Key, list[mx.array]], after: dict[Key, list[mx.array]]) -> bool:
    """Whether two contents agree bit by bit, in the same batch order."""
    return list(before) == list(after) and all(
        len(before[key]) == len(after[key])
        and all(mx.array_equal(a, b).item() for a, b in zip(before[key], after[key], strict=True))
        for key in before
    )


def live_arrays() -> int:
    """Arrays that somebody holds."""
    gc.collect()
    return sum(isinstance(found, mx.array) for found in gc.get_objects())
