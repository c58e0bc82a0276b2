"""Penalties and bias follow their published formulas over prompt and output, for the rows that asked."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlxbcd.errors import ServeError
from mlxbcd.plan.request import Sampling
from mlxbcd.sampling.processors import History, bias_vector, column, penalise

VOCAB = 50


def observed(history: History, *tokens: int) -> History:
    for token in tokens:
        history.observe(mx.array([token], dtype=mx.uint32))
    return history


def penalties(histories: Sequence[History], samplings: Sequence[Sampling]) -> list[mx.array]:
    """The arguments of `penalise` after the logits."""
    return [
        mx.stack([history.counts for history in histories]),
        column([sampling.repetition_penalty for sampling in samplings]),
        column([sampling.presence_penalty for sampling in samplings]),
        column([sampling.frequency_penalty for sampling in samplings]),
    ]


def test_a_history_counts_the_prompt_and_every_sampled_token() -> None:
    history = observed(History((3, 3, 7), VOCAB), 3, 9)
    expected = np.bincount([3, 3, 7, 3, 9], minlength=VOCAB)
    assert history.counts.tolist() == expected.tolist()
    assert repr(history) == "History(5 tokens over a vocabulary of 50)"


def test_an_empty_history_counts_nothing() -> None:
    assert History((), VOCAB).counts.sum().item() == 0


def test_a_history_forgets_what_was_dropped() -> None:
    history = observed(History((1, 2), VOCAB), 5, 6, 6)
    history.forget(2)
    assert history.counts.tolist() == np.bincount([1, 2, 5], minlength=VOCAB).tolist()


def test_a_history_cannot_forget_its_prompt() -> None:
    history = observed(History((1, 2), VOCAB), 5)
    with pytest.raises(ValueError, match="can take back 1 tokens, not 2"):
        history.forget(2)


def test_penalties_equal_their_formulas() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (4, VOCAB)).astype(np.float32)
    prompts = [tuple(rng.integers(0, VOCAB, 30).tolist()) for _ in range(4)]
    samplings = [
        Sampling(repetition_penalty=1.3),
        Sampling(presence_penalty=0.7, frequency_penalty=-0.2),
        Sampling(repetition_penalty=0.8, frequency_penalty=0.5),
        Sampling(repetition_penalty=1.1, presence_penalty=-1.0, frequency_penalty=0.1),
    ]
    histories = [observed(History(prompt, VOCAB), 4, 4) for prompt in prompts]
    result = np.array(penalise(mx.array(logits), *penalties(histories, samplings)))
    for row, sampling in enumerate(samplings):
        counts = np.bincount([*prompts[row], 4, 4], minlength=VOCAB)
        for token, count in enumerate(counts):
            expected = float(logits[row, token])
            if count:
                factor = sampling.repetition_penalty
                expected = expected / factor if expected > 0 else expected * factor
                expected -= sampling.presence_penalty + sampling.frequency_penalty * count
            assert result[row, token] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_unseen_tokens_keep_their_logits_bit_for_bit() -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(1))
    everything = Sampling(repetition_penalty=1.7, presence_penalty=1.3, frequency_penalty=0.9)
    result = penalise(logits, *penalties([History((0, 1), VOCAB)], [everything]))
    assert mx.array_equal(result[:, 2:], logits[:, 2:])
    assert not mx.array_equal(result[:, :2], logits[:, :2])


def test_a_bias_stands_at_its_tokens_alone() -> None:
    bias = bias_vector(((2, -100.0), (49, 1.5)), VOCAB)
    assert {i: value for i, value in enumerate(bias.tolist()) if value} == {2: -100.0, 49: 1.5}


@pytest.mark.parametrize("wrong", [VOCAB, VOCAB + 1000, -1])
def test_a_token_outside_the_vocabulary_is_refused_by_name(wrong: int) -> None:
    with pytest.raises(ServeError, match=f"logit_bias names token {wrong}.*0 to 49") as refusal:
        bias_vector(((1, 1.0), (wrong, 1.0)), VOCAB)
    assert refusal.value.code == "bad_request"
    with pytest.raises(ServeError, match=f"the prompt names token {wrong}"):
        History((1, wrong), VOCAB)
