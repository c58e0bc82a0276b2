"""Log-probabilities are the raw log-softmax, and alternatives are the likeliest tokens in order."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxbcd.sampling.logprobs import logprobs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_they_equal_a_float64_log_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (5, 333)).astype(np.float32)
    tokens = mx.array([4, 8, 15, 16, 23], dtype=mx.uint32)
    expected = log_softmax(logits)
    read = logprobs(mx.array(logits), tokens, [1, 3, 4], [0, 5, 20]).read()
    assert sorted(read) == [1, 3, 4]
    for row, width in ((1, 0), (3, 5), (4, 20)):
        chosen, top = read[row]
        assert chosen == pytest.approx(expected[row, tokens[row].item()], abs=1e-5)
        assert [token for token, _ in top] == np.argsort(-expected[row])[:width].tolist()
        assert [value for _, value in top] == pytest.approx(np.sort(expected[row])[::-1][:width], abs=1e-5)


def test_the_chosen_token_and_its_entry_among_the_top_agree_exactly() -> None:
    logits = mx.random.normal((1, 300), key=mx.random.key(0))
    best = mx.argmax(logits, axis=-1)
    chosen, top = logprobs(logits, best, [0], [1]).read()[0]
    assert top == ((best.item(), chosen),)


def test_ties_are_listed_by_id() -> None:
    logits = mx.array([[0.0, 2.0, 1.0, 2.0, 2.0]])
    _, top = logprobs(logits, mx.array([1], dtype=mx.uint32), [0], [4]).read()[0]
    assert [token for token, _ in top] == [1, 3, 4, 2]


def test_impossible_tokens_are_left_out() -> None:
    logits = mx.array([[0.0, -math.inf, 0.0, -math.inf]])
    _, top = logprobs(logits, mx.array([0], dtype=mx.uint32), [0], [4]).read()[0]
    assert top == ((0, pytest.approx(math.log(0.5))), (2, pytest.approx(math.log(0.5))))


def test_no_alternatives_are_computed_if_none_are_wanted() -> None:
    reported = logprobs(mx.zeros((2, 10)), mx.array([0, 1], dtype=mx.uint32), [0, 1], [0, 0])
    assert len(reported.arrays) == 1
    assert reported.read() == {
        0: (pytest.approx(-math.log(10)), ()),
        1: (pytest.approx(-math.log(10)), ()),
    }
