"""Owns the noise: the Gumbel draw of a token is a pure function of (seed, draw index, candidate, token id).

`key` turns the first three into two 32-bit words on the host; `gumbel` hashes them with each token id on the
device. No state is kept and no shape enters the hash, so the noise is the same alone or in any batch,
over the whole vocabulary, a padded one or a subset. ``argmax(scores + gumbel)`` is a token drawn from
``softmax(scores)``.

The mixers are published ones: SplitMix64 (Steele, Lea, Flood 2014) and lowbias32 (Wellons 2018).
"""

from __future__ import annotations

from typing import Final

import mlx.core as mx

_MASK64: Final = 2**64 - 1
_INDEX_STEP: Final = 0x9E3779B97F4A7C15
_CANDIDATE_STEP: Final = 0xD1B54A32D192ED03
_FIRST: Final = 0x7FEB352D
_SECOND: Final = 0x846CA68B
_ONE_AS_BITS: Final = 0x3F800000


def key(seed: int, index: int, candidate: int = 0) -> tuple[int, int]:
    """The two uint32 words that key draw `index` of candidate `candidate`. Arguments are not negative.

    Each step is a bijection of 64 bits, so keys that differ in one argument alone are always distinct;
    any other two coincide with probability 2**-64.
    """
    return key_at(stem(seed, candidate), index)


def stem(seed: int, candidate: int = 0) -> int:
    """What the keys of all draws of one candidate have in common."""
    return _mix64(_mix64(seed + _INDEX_STEP) + candidate * _CANDIDATE_STEP)


def key_at(stem: int, index: int) -> tuple[int, int]:
    """The key of draw `index`."""
    state = _mix64(stem + index * _INDEX_STEP)
    return state >> 32, state & 0xFFFFFFFF


def token_hash(keys: mx.array, ids: mx.array) -> mx.array:
    """32 well-mixed bits for each (key, token id): uint32 [B, V] or [B, K].

    Args:
        keys: uint32 [B, 2], one `key` per row.
        ids: uint32 token ids, [V] for all rows or [B, K] for each.
    """
    first, second = _word(_FIRST), _word(_SECOND)
    # Ids are mixed once for all rows, so that one round per (row, id) is enough.
    bits = ids if ids.ndim == 2 else ids[None]
    bits = (bits ^ (bits >> 16)) * first
    bits = (bits ^ (bits >> 15)) * second
    bits = (bits ^ (bits >> 16)) ^ keys[:, 0:1]
    bits = (bits ^ (bits >> 16)) * first
    bits = bits ^ keys[:, 1:2]
    bits = (bits ^ (bits >> 15)) * second
    return bits ^ (bits >> 16)


def gumbel(keys: mx.array, ids: mx.array) -> mx.array:
    """Standard Gumbel noise −log(−log u) for each (key, token id): float32 [B, V] or [B, K], always finite.

    u takes the 2**23 values (n + ½)·2**-23, the finest even grid that float32 holds on both sides of ½.
    So the noise lies in [−2.82, 16.64] and its distribution function is right to 2**-24. Its upper tail,
    which decides draws, is a staircase: a token 20 nats below the likeliest is never drawn (exactly: with
    a probability under 3e-9), and among n equally likely tokens the best two tie in about n·2**-24 of the
    draws, which then go to the higher score, at last to the lower id.

    Args:
        keys: uint32 [B, 2], one `key` per row.
        ids: uint32 token ids, [V] for all rows or [B, K] for each.
    """
    # The top 23 bits become the fraction of a float in [1, 2): no conversion that could round u to 0 or 1.
    fraction = (token_hash(keys, ids) >> 9) | _word(_ONE_AS_BITS)
    uniform = fraction.view(mx.float32) - (1.0 - 2.0**-24)
    return -mx.log(-mx.log(uniform))


def _mix64(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _word(value: int) -> mx.array:
    """A uint32 scalar: a bare Python int above 2**31 would promote the product to 64 bits."""
    return mx.array(value, dtype=mx.uint32)
