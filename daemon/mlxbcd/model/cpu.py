"""Owns what makes the zoo's layers faster where MLX computes on a Linux CPU. On a GPU nothing here is used.

That back end has no fused kernels: `mx.fast.rope` becomes some twenty small operations in every layer, and its `exp` is
several times slower than its `power`. So, in forwards of a bound model only and for float32 only:

* rotary tables are computed once per forward instead of twice per layer;
* SwiGLU and the softmax of wide attention take their exponentials as powers of two.

The results differ from the zoo's by rounding (relative 1e-6). Classes of instances are swapped and module functions
rebound as in `forward`; outside `computing` every one of them is the zoo's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn

_LOG2_E: Final = math.log2(math.e)
_WIDE_SCORES: Final = 8192
"""Scores from which attention by powers is faster than the back end's own, as measured."""

_LEAN_SCORES: Final = 1 << 18
"""Scores of a decode step from which it is not used: it holds them twice, and decoding must not need memory that grows
with the context beside the state itself."""

_computing = False


@contextmanager
def computing() -> Iterator[None]:
    """Inside, one forward of a bound model builds its graph with this module's operations."""
    global _computing
    _computing = True
    try:
        yield
    finally:
        _computing = False
        # Lazy arrays belong to the thread and the forward that made them.
        _known.clear()


def bind(model: nn.Module) -> None:
    """Make a model use this module's operations inside `computing`. Idempotent."""
    for _, module in model.named_modules():
        if type(module) is nn.RoPE and not module.traditional:
            module.__class__ = SharedRope
    _rebind(model)


class SharedRope(nn.RoPE):  # type: ignore[misc]  # mlx.nn has no types
    """Rotary positions from tables that all layers of a forward share.

    Layers share them by passing the same offset object, which a forward's cache views do. Groups that run packed take
    turns in every layer, each with an offset of its own.
    """

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [B, heads, N, dims] by positions offset … offset + N − 1; `offset` is an int, or int32 [B] or []."""
        if not _computing or x.dtype != mx.float32 or x.shape[-1] != self.dims:
            return cast(mx.array, super().__call__(x, offset=offset))
        cos, sin = _tables(offset, x.shape[-2], self.dims, self.base, self.scale)
        half = self.dims // 2
        turned = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return x * cos + turned * sin


_known: Final[dict[tuple[Any, ...], tuple[Any, tuple[mx.array, mx.array]]]] = {}


def _tables(offset: int | mx.array, width: int, dims: int, base: float, scale: float) -> tuple[mx.array, mx.array]:
    """Cosines and signed sines [1 or B, 1, width, dims], kept for the layers that follow."""
    # An array by its identity, which is its own for as long as it is held here.
    key = (id(offset) if isinstance(offset, mx.array) else offset, type(offset), width, dims, base, scale)
    if key in _known:
        return _known[key][1]
    half = dims // 2
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    first = offset.reshape(-1, 1, 1) if isinstance(offset, mx.array) else offset
    positions = (mx.arange(width, dtype=mx.float32)[:, None] + first) * scale
    angles = positions * frequencies
    cos, sin = mx.cos(angles), mx.sin(angles)
    tables = (mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1))
    if isinstance(offset, mx.array):
        tables = (tables[0][:, None], tables[1][:, None])
    _known[key] = (offset, tables)
    return tables


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array | None:
    """Scaled dot-product attention of queries [B, heads, N, dim], or None where the back end's own is better."""
    rows, heads, width, dim = queries.shape
    reach = keys.shape[2]
    masked = mask is None or mask == "causal" if not isinstance(mask, mx.array) else mask.dtype == mx.bool_
    if not _computing or sinks is not None or queries.dtype != mx.float32 or not masked:
        return None
    scores_count = rows * heads * width * reach
    if scores_count < _WIDE_SCORES or (width == 1 and scores_count > _LEAN_SCORES):
        return None
    # All query heads of one key head are one matrix product.
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    together = (queries * (scale * _LOG2_E)).reshape(rows, kv_heads, group * width, dim)
    scores = (together @ keys.swapaxes(-1, -2)).reshape(rows, kv_heads, group, width, reach)
    if isinstance(mask, mx.array):
        scores = mx.where(mask[:, :, None] if mask.ndim == 4 else mask, scores, mx.finfo(mx.float32).min)
    elif mask == "causal":
        seen = mx.arange(reach)[None] <= mx.arange(reach - width, reach)[:, None]
        scores = mx.where(seen, scores, mx.finfo(mx.float32).min)
    weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.sum(weights, axis=-1, keepdims=True)
    out = weights.reshape(rows, kv_heads, group * width, reach) @ values
    return (out.reshape(rows, kv_heads, group, width, -1) / total).reshape(rows, heads, width, -1)


_zoo_swiglu: Callable[[mx.array, mx.array], mx.array] | None = None


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if not _computing or gate.dtype != mx.float32:
        assert _zoo_swiglu is not None
        return _zoo_swiglu(gate, x)
    return gate / (1.0 + mx.power(2.0, gate * -_LOG2_E)) * x


def _rebind(model: nn.Module) -> None:
    global _zoo_swiglu
    from mlx_lm.models import activations

    if _zoo_swiglu is None:
        _zoo_swiglu = activations.swiglu
    homes = {cls.__module__ for _, module in model.named_modules() for cls in type(module).__mro__}
    for name in homes:
        home = sys.modules.get(name)
        if home is not None and getattr(home, "swiglu", None) is _zoo_swiglu and home is not activations:
            vars(home)["swiglu"] = _swiglu
