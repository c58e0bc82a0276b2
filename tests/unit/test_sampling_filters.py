"""Filter bounds equal a plain float64 computation, tie rules and off switches included."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.sampling.filters import nucleus_bound, top_k_bound

Floats = npt.NDArray[np.float32]


def scores_of(seed: int, vocab: int, scale: float, rows: int = 3) -> Floats:
    logits = np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)
    return np.subtract(logits, logits.max(axis=-1, keepdims=True))


def smallest_set(weights: Floats, top_p: float) -> int:
    """How many of the likeliest tokens reach top_p, from float64 weights sorted downwards."""
    mass = np.cumsum(weights.astype(np.float64))
    return int(np.searchsorted(mass, top_p * mass[-1])) + 1


def column(values: Sequence[float], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(list(values), dtype=dtype)[:, None]


@pytest.mark.parametrize("halve", [True, False])
@pytest.mark.parametrize("vocab", [5, 1000, 1025, 4097, 12289])
@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(vocab: int, scale: float, halve: bool) -> None:
    weights = np.exp(scores_of(vocab, vocab, scale))
    top_p = [0.1, 0.5, 0.95]
    bound = np.array(nucleus_bound(mx.array(weights), column(top_p), halve=halve))
    for row, share in enumerate(top_p):
        ranked = -np.sort(-weights[row])
        assert bound[row, 0] == ranked[smallest_set(ranked, share) - 1]


def test_halving_finds_the_bound_that_sorting_finds() -> None:
    weights = mx.exp(mx.array(scores_of(1, 9001, 1.0, rows=64)))
    top_p = column(np.random.default_rng(2).uniform(0.001, 0.9999, 64).tolist())
    assert mx.array_equal(nucleus_bound(weights, top_p, halve=True), nucleus_bound(weights, top_p, halve=False))


def test_the_nucleus_does_not_depend_on_padding_or_order() -> None:
    weights = mx.exp(mx.array(scores_of(3, 3000, 1.0, rows=8)))
    top_p = column(np.random.default_rng(4).uniform(0.1, 0.99, 8).tolist())
    bound = nucleus_bound(weights, top_p)
    padded = mx.concatenate([weights, mx.zeros((8, 617))], axis=-1)
    shuffled = weights[:, mx.array(np.random.default_rng(5).permutation(3000).astype(np.uint32))]
    assert mx.array_equal(nucleus_bound(padded, top_p), bound)
    assert mx.array_equal(nucleus_bound(shuffled, top_p), bound)


@pytest.mark.parametrize("halve", [True, False])
def test_tokens_tied_with_the_last_of_the_nucleus_are_kept(halve: bool) -> None:
    weights = mx.concatenate([mx.array([[1.0]]), mx.full((1, 2999), 0.001)], axis=-1)
    bound = nucleus_bound(weights, column([0.5]), halve=halve)
    assert int((weights >= bound).sum()) == 3000


def test_a_tiny_top_p_keeps_the_likeliest_token() -> None:
    assert nucleus_bound(mx.array([[0.2, 1.0, 0.9]]), column([1e-9])).item() == 1.0


def test_a_set_that_reaches_top_p_exactly_is_enough() -> None:
    assert nucleus_bound(mx.array([[0.25, 1.0, 0.25, 0.5]]), column([0.75])).item() == 0.5


def test_top_k_alone_keeps_tokens_too_unlikely_to_weigh() -> None:
    scores = mx.array([[-50.0, 0.0, -60.0, -70.0]])
    assert top_k_bound(scores, column([3], mx.int32), column([1.0]), 3).item() == -60.0


@pytest.mark.parametrize("top_k", [1, 2, 17, 64, 499])
def test_top_k_is_bounded_by_the_kth_largest_score(top_k: int) -> None:
    scores = scores_of(top_k, 500, 2.0)
    bound = top_k_bound(mx.array(scores), column([top_k] * 3, mx.int32), column([1.0] * 3), top_k)
    assert np.array(bound)[:, 0].tolist() == np.sort(scores, axis=-1)[:, -top_k].tolist()


def test_top_p_after_top_k_is_a_share_of_what_top_k_kept() -> None:
    scores = scores_of(6, 700, 1.0)
    top_k, top_p = [5, 40, 300], [0.6, 0.9, 0.3]
    bound = np.array(top_k_bound(mx.array(scores), column(top_k, mx.int32), column(top_p), 300))
    for row in range(3):
        ranked = -np.sort(-scores[row])[: top_k[row]]
        assert bound[row, 0] == ranked[smallest_set(np.exp(ranked), top_p[row]) - 1]


def test_a_rows_bound_does_not_depend_on_the_widest_top_k() -> None:
    scores = mx.array(scores_of(7, 700, 1.0))
    top_k, top_p = column([9, 20, 30], mx.int32), column([0.8, 1.0, 0.5])
    assert mx.array_equal(top_k_bound(scores, top_k, top_p, 30), top_k_bound(scores, top_k, top_p, 600))
