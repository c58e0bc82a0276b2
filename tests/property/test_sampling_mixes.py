"""Whatever its batch-mates ask for, a row draws what it draws alone, bit for bit."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.plan.request import Sampling
from mlxbcd.sampling.sampler import RowSampler, Sample, sample

VOCAB = 1201
STEPS = 3

biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-4, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.99]),
    top_k=st.sampled_from([0, 0, 1, 20, 500, VOCAB]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.3]),
    logit_bias=st.one_of(st.just(()), biases.map(lambda bias: tuple(sorted(bias.items())))),
    seed=st.integers(0, 2**53 - 1),
    logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 0, 1, 20]),
)


def random_logits(seed: int, rows: int, *, coarse: bool) -> mx.array:
    """Logits [rows, VOCAB]; coarse ones hold many ties, as a half-precision head gives."""
    logits = mx.array(np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32))
    return logits.astype(mx.bfloat16) if coarse else logits


def run(logits: list[mx.array], samplings: list[Sampling], vocab: int = VOCAB) -> list[list[Sample]]:
    samplers = [RowSampler(sampling, (row, row, 7), vocab, index=row) for row, sampling in enumerate(samplings)]
    return [sample(step, samplers).read() for step in logits]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(rows=st.lists(samplings, min_size=1, max_size=16), seed=st.integers(0, 2**32 - 1), coarse=st.booleans())
def test_a_row_draws_in_any_batch_what_it_draws_alone(rows: list[Sampling], seed: int, coarse: bool) -> None:
    logits = [random_logits(seed + step, len(rows), coarse=coarse) for step in range(STEPS)]
    together = run(logits, rows)
    for row, sampling in enumerate(rows):
        alone = RowSampler(sampling, (row, row, 7), VOCAB, index=row)
        for step in range(STEPS):
            assert sample(logits[step][row : row + 1], [alone]).read() == [together[step][row]]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    rows=st.lists(samplings, min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    padding=st.integers(1, 300),
)
def test_padding_the_vocabulary_changes_no_token(rows: list[Sampling], seed: int, padding: int) -> None:
    logits = [random_logits(seed + step, len(rows), coarse=False) for step in range(STEPS)]
    blank = mx.full((len(rows), padding), -math.inf)
    padded = [mx.concatenate([step, blank], axis=-1) for step in logits]
    plain = [[each.token for each in step] for step in run(logits, rows)]
    assert [[each.token for each in step] for step in run(padded, rows, VOCAB + padding)] == plain


@settings(deadline=None, derandomize=True, max_examples=50)
@given(rows=st.lists(samplings, min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_the_batch_does_not_matter(rows: list[Sampling], seed: int) -> None:
    logits = random_logits(seed, len(rows), coarse=True)
    samplers = [RowSampler(sampling, (1,), VOCAB) for sampling in rows]
    mirrored = [RowSampler(sampling, (1,), VOCAB) for sampling in reversed(rows)]
    backwards = sample(logits[::-1], mirrored).read()
    assert sample(logits, samplers).read() == backwards[::-1]
