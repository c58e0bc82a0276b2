"""The CPU's own operations: they give what the zoo's give, and only inside a forward of a bound model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxbcd.model import cpu


def attended(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
    with cpu.computing():
        out = cpu.attention(queries, keys, values, 0.125, mask, None)
    assert out is not None
    return out


def closeness(ours: mx.array, zoo: mx.array) -> float:
    return float((mx.abs(ours - zoo).max() / mx.abs(zoo).max()).item())


@pytest.mark.parametrize(("rows", "width", "reach"), [(1, 1, 2000), (8, 1, 300), (1, 64, 64), (2, 33, 500)])
@pytest.mark.parametrize("masked", ["none", "causal", "array"])
def test_wide_attention_is_the_backends(rows: int, width: int, reach: int, masked: str) -> None:
    mx.random.seed(1)
    queries = mx.random.normal((rows, 6, width, 64))
    keys, values = mx.random.normal((rows, 2, reach, 64)), mx.random.normal((rows, 2, reach, 64))
    seen = mx.arange(reach)[None] <= mx.arange(reach - width, reach)[:, None] - 3 * mx.arange(rows)[:, None, None, None]
    mask = {"none": None, "causal": "causal", "array": mx.maximum(seen, mx.arange(reach) == 0)}[masked]
    zoo = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125, mask=mask)
    assert closeness(attended(queries, keys, values, mask), zoo) < 1e-5


def test_small_attention_and_sinks_are_left_to_the_backend() -> None:
    small = mx.zeros((1, 2, 1, 8))
    wide = mx.zeros((1, 2, 64, 64))
    with cpu.computing():
        assert cpu.attention(small, small, small, 1.0, None, None) is None
        assert cpu.attention(wide, wide, wide, 1.0, None, mx.zeros((2,))) is None
        long = mx.zeros((1, 2, 140_000, 8))
        assert cpu.attention(small, long, long, 1.0, None, None) is None
    assert cpu.attention(wide, mx.zeros((1, 2, 900, 64)), mx.zeros((1, 2, 900, 64)), 1.0, None, None) is None


@pytest.mark.parametrize("offset", [0, 5, mx.array([3, 0, 900], dtype=mx.int32), mx.array(7, dtype=mx.int32)])
@pytest.mark.parametrize("width", [1, 40])
def test_shared_rotary_tables_rotate_as_the_backend_does(offset: int | mx.array, width: int) -> None:
    mx.random.seed(2)
    x = mx.random.normal((3, 4, width, 32))
    plain = nn.RoPE(32, base=5e4, scale=0.5)
    shared = nn.RoPE(32, base=5e4, scale=0.5)
    cpu.bind(shared)
    with cpu.computing():
        first, second = shared(x, offset=offset), shared(2 * x, offset=offset)
    zoo = plain(x, offset=offset)
    assert closeness(first, zoo) < 1e-6
    assert closeness(second, 2 * zoo) < 1e-6


def test_a_forward_leaves_no_table_behind() -> None:
    rope = nn.RoPE(16)
    cpu.bind(rope)
    with cpu.computing():
        rope(mx.zeros((1, 1, 1, 16)), offset=3)
        assert cpu._known
    assert not cpu._known


def test_outside_a_forward_a_bound_model_computes_as_the_zoo_does() -> None:
    x = mx.random.normal((1, 2, 3, 16))
    rope, plain = nn.RoPE(16), nn.RoPE(16)
    cpu.bind(rope)
    assert mx.array_equal(rope(x, offset=4), plain(x, offset=4))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_swiglu_by_powers_is_the_zoos(scale: float) -> None:
    from mlx_lm.models.activations import swiglu

    mx.random.seed(3)
    gate, x = mx.random.normal((4, 64)) * scale, mx.random.normal((4, 64))
    cpu.bind(nn.Linear(2, 2))
    with cpu.computing():
        ours = cpu._swiglu(gate, x)
    assert closeness(ours, swiglu(gate, x)) < 1e-5
