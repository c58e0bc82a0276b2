"""Owns the filters: which tokens a random draw may choose, by top_k and top_p.

A filter is a lower bound per row, so tokens tied with the last one kept are kept too, and filters combine
as the largest bound. Probability mass is summed in whole units of 2**-40 of the likeliest token's weight:
integer sums are the same in any order, so a bound depends neither on padding of the vocabulary nor on how
it was searched.
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_UNITS: Final = 2.0**40
"""Units in a weight of 1. A vocabulary of 2**22 tokens still sums far below 2**63."""
_SORTED: Final = 1024
"""Values left to sort after halving; the time is flat from 512 to 2048."""


def top_k_bound(scores: mx.array, top_k: mx.array, top_p: mx.array, widest: int) -> mx.array:
    """The lowest score that passes top_k and then top_p: float32 [G, 1].

    top_p is a share of the mass of the k tokens that top_k chose: the bound is the last of the fewest
    likeliest tokens whose mass reaches it.

    Args:
        scores: float32 [G, V], log-weights relative to each row's likeliest token (0 or less).
        top_k: int32 [G, 1], from 1 to `widest`.
        top_p: float32 [G, 1]; 1 is off.
        widest: the largest top_k, V at most.
    """
    best = -mx.sort(-mx.topk(scores, widest, axis=-1), axis=-1)
    last = top_k - 1
    mass = mx.cumsum(_units(mx.exp(best)), axis=-1)
    target = _share(mx.take_along_axis(mass, last, axis=-1), top_p)
    reached = mx.minimum(_count_below(mass, target), last)
    return mx.take_along_axis(best, mx.where(top_p < 1.0, reached, last), axis=-1)


def nucleus_bound(weights: mx.array, top_p: mx.array, *, halve: bool | None = None) -> mx.array:
    """The lowest weight in each row's nucleus: float32 [G, 1].

    The nucleus is the fewest likeliest tokens whose share of the mass reaches top_p.

    Args:
        weights: float32 [G, V], relative to each row's likeliest token (0 to 1).
        top_p: float32 [G, 1].
        halve: search by halving before sorting. None does so on the CPU only: a GPU partitions by sorting, so
            there one sort is all it takes.
    """
    if halve is None:
        halve = mx.default_device() == mx.Device(mx.cpu)
    total = mx.sum(_units(weights), axis=-1, keepdims=True)
    target = _share(total, top_p)
    above = mx.zeros_like(total)
    size = weights.shape[-1]
    # Sorting a vocabulary costs four times what this does: partition, keep the half of each row that the
    # bound lies in, repeat. In an odd window the upper half holds one value that `mass` has not
    # counted; it is the lowest there, so the bound stays the same.
    while halve and size > _SORTED:
        half = (size + 1) // 2
        split = mx.partition(weights, half, axis=-1)
        mass = above + mx.sum(_units(split[:, half:]), axis=-1, keepdims=True)
        inside = mass >= target
        weights = mx.where(inside, split[:, size - half :], split[:, :half])
        above = mx.where(inside, above, mass)
        size = half
    best = -mx.sort(-weights, axis=-1)
    mass = above + mx.cumsum(_units(best), axis=-1)
    reached = mx.minimum(_count_below(mass, target), size - 1)
    return mx.take_along_axis(best, reached, axis=-1)


def _units(weights: mx.array) -> mx.array:
    return (weights * _UNITS).astype(mx.int64)


def _share(total: mx.array, top_p: mx.array) -> mx.array:
    """`top_p` of an integer mass, to float32's precision of 6e-8."""
    return (total.astype(mx.float32) * top_p).astype(mx.int64)


def _count_below(mass: mx.array, target: mx.array) -> mx.array:
    """How many leading entries of an ascending mass fall short of the target: int32 [G, 1]."""
    return mx.sum(mass < target, axis=-1, keepdims=True).astype(mx.int32)
