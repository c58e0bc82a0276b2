"""Noise depends on (seed, index, candidate, token id) alone, keeps its golden values, and is Gumbel noise."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.sampling.noise import gumbel, key, token_hash

GOLDEN = json.loads(Path(__file__).with_name("sampling_noise_golden.json").read_text())


def words(keys: list[tuple[int, int]]) -> mx.array:
    return mx.array(keys, dtype=mx.uint32)


def token_ids(n: int) -> mx.array:
    return mx.arange(n, dtype=mx.uint32)


def excess(observed: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    """Chi-square in standard deviations above its mean."""
    freedom = len(observed) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("entry", GOLDEN["keys"], ids=lambda entry: f"{entry['seed']}-{entry['index']}")
def test_keys_are_the_golden_ones(entry: dict[str, object]) -> None:
    drawn = key(*(int(str(entry[name])) for name in ("seed", "index", "candidate")))
    assert list(drawn) == entry["key"]


def test_hashes_are_the_golden_ones() -> None:
    keys = words([tuple(entry["key"]) for entry in GOLDEN["noise"]])
    hashes = token_hash(keys, mx.array(GOLDEN["ids"], dtype=mx.uint32))
    assert hashes.dtype == mx.uint32
    assert hashes.tolist() == [entry["hash"] for entry in GOLDEN["noise"]]


def test_noise_is_the_golden_one() -> None:
    keys = words([tuple(entry["key"]) for entry in GOLDEN["noise"]])
    noise = gumbel(keys, mx.array(GOLDEN["ids"], dtype=mx.uint32))
    assert noise.dtype == mx.float32
    np.testing.assert_allclose(np.array(noise), [entry["gumbel"] for entry in GOLDEN["noise"]], atol=2e-6)


def test_neighbouring_keys_are_all_distinct() -> None:
    seeds = [0, 1, 2, 3, 2**32, 2**32 + 1, 2**53 - 2, 2**53 - 1]
    arguments = list(itertools.product(seeds, range(200), range(4)))
    assert len({key(*each) for each in arguments}) == len(arguments)


def test_a_row_alone_has_the_noise_it_has_in_a_batch() -> None:
    keys = words([key(seed, 5) for seed in range(7)])
    together = gumbel(keys, token_ids(1003))
    for row in range(7):
        assert mx.array_equal(gumbel(keys[row : row + 1], token_ids(1003)), together[row : row + 1])


def test_a_larger_vocabulary_leaves_the_noise_of_its_tokens_alone() -> None:
    keys = words([key(1, 2), key(3, 4)])
    assert mx.array_equal(gumbel(keys, token_ids(1000)), gumbel(keys, token_ids(1061))[:, :1000])


def test_a_subset_of_tokens_has_their_noise_in_the_vocabulary() -> None:
    keys = words([key(1, 2), key(3, 4)])
    subset = mx.array([[7, 999, 0, 3, 500], [1, 1, 998, 64, 65]], dtype=mx.uint32)
    full = gumbel(keys, token_ids(1000))
    assert mx.array_equal(gumbel(keys, subset), mx.take_along_axis(full, subset, axis=-1))


def test_noise_is_finite_and_stays_in_its_stated_range() -> None:
    noise = np.array(gumbel(words([key(9, index) for index in range(64)]), token_ids(49152)))
    assert np.isfinite(noise).all()
    assert noise.min() >= -2.82
    assert noise.max() <= 16.64
    assert noise.max() > 12.0


@pytest.mark.parametrize("over", ["index", "seed", "candidate"])
def test_draws_follow_the_softmax(over: str) -> None:
    logits = np.random.default_rng(11).normal(0, 1.5, 40)
    expected = np.exp(logits - logits.max())
    expected *= 20_000 / expected.sum()
    arguments = {
        "index": lambda i: (3, i, 0),
        "seed": lambda i: (i, 3, 0),
        "candidate": lambda i: (3, 5, i),
    }[over]
    noise = gumbel(words([key(*arguments(i)) for i in range(20_000)]), token_ids(40))
    drawn = np.array(mx.argmax(mx.array(logits.astype(np.float32)) + noise, axis=-1))
    assert abs(excess(np.bincount(drawn, minlength=40), expected)) < 4


@pytest.mark.parametrize("shift", [24, 9], ids=["highest bits", "lowest bits used"])
def test_hashes_are_uniform(shift: int) -> None:
    hashes = np.array(token_hash(words([key(5, index) for index in range(8)]), token_ids(32768)))
    bins = np.bincount((hashes >> shift).ravel() & 0xFF, minlength=256)
    assert abs(excess(bins, np.full(256, hashes.size / 256))) < 4


@pytest.mark.parametrize("neighbour", ["token", "index", "seed"])
def test_neighbours_do_not_correlate(neighbour: str) -> None:
    n = 512
    keys = {
        "token": [key(7, index) for index in range(n)],
        "index": [key(7, index) for index in range(n)],
        "seed": [key(seed, 7) for seed in range(n)],
    }[neighbour]
    uniform = np.array(token_hash(words(keys), token_ids(n))).astype(np.float64) / 2**32 - 0.5
    if neighbour == "token":
        uniform = uniform.T
    correlation = float((uniform[:-1] * uniform[1:]).mean() * 12)
    assert abs(correlation) < 4 / math.sqrt(n * n)
