"""What can be said of the CUDA seams without such a device: the shapes they make, and that they change no product."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.model import cuda, cuda_linear


class Tied(nn.Module):
    """An embedding and a layer, quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.layer = nn.Linear(64, 32)
        nn.quantize(self, group_size=32, bits=8)


@pytest.mark.parametrize("leading", [(), (1,), (1, 1), (2, 1), (7, 1), (8, 1), (3, 5), (1, 40)])
def test_bound_layers_give_what_plain_ones_give(leading: tuple[int, ...]) -> None:
    plain, bound = Tied(), Tied()
    bound.update(plain.parameters())
    cuda.bind(bound)
    cuda.bind(bound)
    x = mx.random.normal((*leading, 64), key=mx.random.key(1))
    assert isinstance(bound.layer, nn.QuantizedLinear)
    assert isinstance(bound.layer, cuda.FlatLinear)
    for ours, theirs in [(bound.layer(x), plain.layer(x)), (bound.embed.as_linear(x), plain.embed.as_linear(x))]:
        assert ours.shape == theirs.shape
        assert mx.allclose(ours, theirs, atol=1e-5)


@given(st.lists(st.integers(1, 40), min_size=0, max_size=3))
def test_a_product_sees_one_matrix_of_one_or_at_least_eight_rows(leading: list[int]) -> None:
    x = mx.zeros((*leading, 16))
    flat, rows = cuda.flattened(x)
    assert flat.ndim == 2
    assert flat.shape[0] == rows or (1 < rows < 8 == flat.shape[0])
    assert cuda.restored(flat[:, :5], x, rows).shape == (*leading, 5)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 32), st.integers(1, 100_000))
def test_blocks_share_out_heads_and_positions(rows: int, kv_heads: int, repeats: int, reach: int) -> None:
    together, splits, warps, ahead = cuda.arrangement(rows, kv_heads * repeats, repeats, reach)
    assert repeats % together == 0
    assert 1 <= splits <= max(1, reach // 1024)
    assert warps in (8, 16)
    assert ahead >= 1
    # As many blocks as occupy the device where there can be, and not far more because of positions.
    blocks = rows * kv_heads * repeats // together
    assert blocks >= 128 or together == 1
    assert splits == 1 or blocks * splits <= 256


@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=2),
    st.sampled_from([16, 32, 64, 80]),
    st.sampled_from([mx.bfloat16, mx.float16, mx.float32]),
)
def test_the_product_of_a_few_rows_is_for_two_to_eight_of_whole_reads_in_half_precision(
    leading: list[int], depth: int, dtype: mx.Dtype
) -> None:
    x, weight = mx.zeros((*leading, depth), dtype), mx.zeros((3, depth), dtype)
    wanted = 2 <= math.prod(leading) <= 8 and depth in (32, 64) and dtype != mx.float32
    assert cuda_linear.fits(x, weight) == wanted
    assert not cuda_linear.fits(x, weight.astype(mx.float32))


@pytest.mark.parametrize("bias", [False, True])
def test_what_the_product_is_not_for_is_computed_as_ever(bias: bool) -> None:
    layer, embedding = nn.Linear(64, 24, bias=bias), nn.Embedding(24, 64)
    x = mx.random.normal((3, 64), key=mx.random.key(2))
    wanted = layer(x), embedding.as_linear(x)
    layer.__class__, embedding.__class__ = cuda_linear.LeanLinear, cuda_linear.LeanEmbedding
    assert mx.array_equal(layer(x), wanted[0])
    assert mx.array_equal(embedding.as_linear(x), wanted[1])


def test_where_nothing_computes_with_cuda_attention_is_left_to_the_back_end() -> None:
    q = mx.zeros((2, 4, 1, 64))
    kv = mx.zeros((2, 2, 8, 64))
    assert cuda.attention(q, kv, kv, 1.0, mx.ones((2, 1, 1, 8), dtype=mx.bool_), None) is None
