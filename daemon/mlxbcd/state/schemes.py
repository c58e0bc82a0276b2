"""Owns how keys and values are written down and attended over: plain, or quantised by groups of a row's last axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

from mlxbcd.model import cpu, cuda

Parts: TypeAlias = tuple[mx.array, ...]
"""Keys and values as a scheme stores them: arrays [rows, heads, positions, …]."""


class Scheme(Protocol):
    """One way to write keys and values down."""

    def encode(self, keys: mx.array, values: mx.array) -> Parts:
        """Keys and values [rows, heads, positions, dim] as parts."""
        ...

    def origin(self, parts: Parts) -> tuple[int, int, mx.Dtype]:
        """The dimension of the keys, of the values, and the type that were encoded as these parts."""
        ...

    def attend(self, queries: mx.array, parts: Parts, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of queries [rows, query heads, N, dim] over parts."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Keys and values as they come: two parts."""

    def encode(self, keys: mx.array, values: mx.array) -> Parts:
        return keys, values

    def origin(self, parts: Parts) -> tuple[int, int, mx.Dtype]:
        keys, values = parts
        return keys.shape[3], values.shape[3], keys.dtype

    def attend(self, queries: mx.array, parts: Parts, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        keys, values = parts
        if (out := cpu.attention(queries, keys, values, scale, mask, sinks)) is not None:
            return out
        if (out := cuda.attention(queries, keys, values, scale, mask, sinks)) is not None:
            return out
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Affine quantisation along the head dimension: six parts (packed, scales, biases of keys, then of values)."""

    bits: int
    group_size: int

    def encode(self, keys: mx.array, values: mx.array) -> Parts:
        for array in (keys, values):
            if array.shape[3] % self.group_size:
                raise ValueError(f"heads of {array.shape[3]} are not a multiple of the group size {self.group_size}")
        packed = [mx.quantize(array, group_size=self.group_size, bits=self.bits) for array in (keys, values)]
        return tuple(part for parts in packed for part in parts)

    def origin(self, parts: Parts) -> tuple[int, int, mx.Dtype]:
        keys, scales, _, values, *_ = parts
        return keys.shape[3] * 32 // self.bits, values.shape[3] * 32 // self.bits, scales.dtype

    def attend(self, queries: mx.array, parts: Parts, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        if sinks is not None:
            raise ValueError("attention sinks are not defined over quantised keys")
        rows, heads, width, dim = queries.shape
        kv_heads = parts[0].shape[1]
        grouped = heads != kv_heads
        scaled = queries * scale
        if grouped:
            # Query heads of one group share keys: a further axis that broadcasts against the parts.
            scaled = scaled.reshape(rows, kv_heads, heads // kv_heads, width, dim)
            parts = tuple(part[:, :, None] for part in parts)
        keys, key_scales, key_biases, values, value_scales, value_biases = parts
        scores = mx.quantized_matmul(
            scaled, keys, key_scales, key_biases, transpose=True, group_size=self.group_size, bits=self.bits
        )
        if isinstance(mask, str):
            reach = scores.shape[-1]
            mask = mx.arange(reach)[None] <= mx.arange(reach - width, reach)[:, None]
        elif mask is not None and grouped:
            mask = mask[:, :, None]
        if mask is not None:
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
        weights = mx.softmax(scores, axis=-1, precise=True)
        out = mx.quantized_matmul(
            weights, values, value_scales, value_biases, transpose=False, group_size=self.group_size, bits=self.bits
        )
        return out.reshape(rows, heads, width, -1)
