"""Rows sample by their own rules, as a plain float64 reference would, and report rows that are not finite."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.errors import ServeError
from mlxbcd.plan.request import Sampling
from mlxbcd.sampling.noise import gumbel, key
from mlxbcd.sampling.sampler import Draw, RowSampler, Samplers, sample

VOCAB = 2500
PROMPT = (1, 2, 2, 3)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"logit_bias": ((5, 4.0), (6, -100.0))},
    {"temperature": 1.0},
    {"temperature": 0.6, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.8, "top_k": 200, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 300, "min_p": 0.3},
    {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 1.5, "logit_bias": ((7, 2.5),)},
]


def random_logits(seed: int, rows: int, vocab: int = VOCAB) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


def draw_one(logits: npt.NDArray[np.float32], **settings: Any) -> int:
    sampler = RowSampler(Sampling(**settings), PROMPT, len(logits))
    return sample(mx.array(logits[None]), [sampler]).read()[0].token


def kept_tokens(scores: npt.NDArray[np.float64], sampling: Sampling) -> npt.NDArray[np.bool_]:
    """The filters on one row, one after the other, on sorted probabilities."""
    order = np.argsort(-scores)
    probability = np.exp(scores - scores.max())
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        mass = np.cumsum(probability[order]) / probability[order].sum()
        order = order[: int(np.searchsorted(mass, sampling.top_p)) + 1]
    kept = np.zeros(len(scores), dtype=bool)
    kept[order] = True
    return kept & (probability >= sampling.min_p * probability.max())


def reference(logits: npt.NDArray[np.float32], sampling: Sampling, history: list[int], index: int) -> tuple[int, float]:
    """The token of one row in float64, and by how much it beat the second."""
    scores = logits.astype(np.float64)
    counts = np.bincount(history, minlength=len(scores))
    seen = counts > 0
    repeated = np.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    scores = np.where(seen, repeated, scores)
    scores -= sampling.presence_penalty * seen + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if not sampling.greedy:
        scores /= sampling.temperature
        keys = mx.array([key(sampling.seed, index)], dtype=mx.uint32)
        noise = np.array(gumbel(keys, mx.arange(len(scores), dtype=mx.uint32)), dtype=np.float64)[0]
        scores = np.where(kept_tokens(scores, sampling), scores + noise, -np.inf)
    best = np.argsort(-scores)
    return int(best[0]), float(scores[best[0]] - scores[best[1]])


def test_a_mixed_batch_samples_as_the_float64_reference_does() -> None:
    samplings = [Sampling(seed=row, **settings) for row, settings in enumerate(SETTINGS)]
    samplers = [RowSampler(sampling, PROMPT, VOCAB) for sampling in samplings]
    histories = [list(PROMPT) for _ in samplings]
    compared = 0
    for index in range(12):
        logits = random_logits(index, len(samplings))
        for row, drawn in enumerate(sample(mx.array(logits), samplers).read()):
            expected, margin = reference(logits[row], samplings[row], histories[row], index)
            if margin > 1e-4:
                compared += 1
                assert drawn.token == expected, (row, index)
            histories[row].append(drawn.token)
    assert compared >= 130


def test_greedy_is_argmax() -> None:
    logits = random_logits(0, 6)
    samplers = [RowSampler(Sampling(), PROMPT, VOCAB) for _ in range(6)]
    draw = sample(mx.array(logits), samplers)
    assert draw.tokens.dtype == mx.uint32
    assert draw.tokens.tolist() == np.argmax(logits, axis=-1).tolist()


def test_the_lower_id_wins_a_greedy_tie() -> None:
    assert draw_one(np.array([0, 3, 1, 3], dtype=np.float32)) == 1


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_logits_sample_like_their_float32_values(dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits(1, len(SETTINGS))).astype(dtype)

    def tokens(of: mx.array) -> list[int]:
        samplers = [RowSampler(Sampling(seed=3, **settings), PROMPT, VOCAB) for settings in SETTINGS]
        return [drawn.token for drawn in sample(of, samplers).read()]

    assert tokens(logits) == tokens(logits.astype(mx.float32))


def test_half_precision_logits_far_below_the_largest_are_not_rounded() -> None:
    logits = mx.array(random_logits(1, 16) / 6)
    logits[:, 0] = 8.0
    logits = logits.astype(mx.bfloat16)

    def tokens(of: mx.array) -> list[list[int]]:
        samplers = [RowSampler(Sampling(temperature=1.0, seed=seed), PROMPT, VOCAB) for seed in range(16)]
        return [[drawn.token for drawn in sample(of, samplers).read()] for _ in range(60)]

    assert tokens(logits) == tokens(logits.astype(mx.float32))


def test_top_k_of_one_is_greedy() -> None:
    for seed in range(20):
        logits = random_logits(seed, 1)[0]
        assert draw_one(logits, temperature=1.5, top_k=1, seed=seed) == int(np.argmax(logits))


@pytest.mark.parametrize("temperature", [1e-5, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy(temperature: float, filters: dict[str, Any]) -> None:
    logits = random_logits(2, 1)[0]
    for seed in range(10):
        assert draw_one(logits, temperature=temperature, seed=seed, **filters) == int(np.argmax(logits))


def test_filters_that_span_the_vocabulary_are_off() -> None:
    logits = random_logits(3, 1)[0]
    plain = [draw_one(logits, temperature=2.0, seed=seed) for seed in range(20)]
    assert [draw_one(logits, temperature=2.0, top_k=VOCAB, seed=seed) for seed in range(20)] == plain
    assert [draw_one(logits, temperature=2.0, top_k=10**6, seed=seed) for seed in range(20)] == plain
    assert len(set(plain)) > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_bans_and_forces(temperature: float) -> None:
    logits = random_logits(4, 1)[0]
    best, worst = int(np.argmax(logits)), int(np.argmin(logits))
    for seed in range(10):
        assert draw_one(logits, temperature=temperature, seed=seed, logit_bias=((worst, 100.0),)) == worst
        banned = tuple((token, -100.0) for token in range(VOCAB) if token != best and token % 2)
        drawn = draw_one(logits, temperature=temperature, seed=seed, logit_bias=banned)
        assert drawn == best or drawn % 2 == 0


def test_draws_follow_temperature_and_nucleus() -> None:
    logits = np.array([2.0, 1.2, 1.0, 0.1, -0.5, -0.6, -3.0, -9.0], dtype=np.float32)
    samplers = [RowSampler(Sampling(temperature=0.7, top_p=0.95, seed=s), (), 8) for s in range(16)]
    batch = mx.array(np.tile(logits, (16, 1)))
    counts = np.zeros(8)
    for _ in range(250):
        counts += np.bincount(np.array(sample(batch, samplers).tokens), minlength=8)
    scores = logits.astype(np.float64) / 0.7
    kept = kept_tokens(scores, Sampling(temperature=0.7, top_p=0.95))
    expected = np.where(kept, np.exp(scores), 0)
    expected *= 4000 / expected.sum()
    assert counts[~kept].sum() == 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_draw_i_depends_on_the_seed_and_i_alone() -> None:
    logits = mx.array(random_logits(5, 1))
    sampling = Sampling(temperature=1.5, seed=77)
    running = RowSampler(sampling, PROMPT, VOCAB)
    tokens = [sample(logits, [running]).read()[0].token for _ in range(10)]
    resumed = RowSampler(sampling, [*PROMPT, *tokens[:6]], VOCAB, index=6)
    assert [sample(logits, [resumed]).read()[0].token for _ in range(4)] == tokens[6:]
    assert len(set(tokens)) > 5


@pytest.mark.parametrize("settings", [{}, {"presence_penalty": 2.0, "frequency_penalty": 1.0}])
def test_a_rewound_row_draws_again_what_it_drew(settings: dict[str, Any]) -> None:
    logits = mx.array(random_logits(6, 1))
    sampler = RowSampler(Sampling(temperature=1.5, seed=1, **settings), PROMPT, VOCAB)
    tokens = [sample(logits, [sampler]).read()[0].token for _ in range(6)]
    sampler.rewind(2)
    assert sampler.index == 2
    assert [sample(logits, [sampler]).read()[0].token for _ in range(4)] == tokens[2:]


def test_a_row_does_not_rewind_ahead_or_past_what_its_history_can_undo() -> None:
    resumed = RowSampler(Sampling(presence_penalty=1.0), PROMPT, VOCAB, index=3)
    with pytest.raises(ValueError, match="ahead"):
        resumed.rewind(4)
    with pytest.raises(ValueError, match="can take back 0 tokens, not 1"):
        resumed.rewind(2)
    assert resumed.index == 3


def test_penalties_see_tokens_that_were_sampled_but_not_yet_read() -> None:
    logits = mx.array([[3.0, 2.5, 2.0, 1.5]])
    sampler = RowSampler(Sampling(frequency_penalty=2.0), (), 4)
    draws = [sample(logits, [sampler]) for _ in range(5)]
    assert [draw.read()[0].token for draw in draws] == [0, 1, 2, 3, 0]


def test_asking_for_logprobs_changes_no_token_and_reports_the_raw_model() -> None:
    logits = random_logits(7, len(SETTINGS))

    def read(**report: Any) -> Draw:
        samplers = [RowSampler(Sampling(seed=9, **settings, **report), PROMPT, VOCAB) for settings in SETTINGS]
        return sample(mx.array(logits), samplers)

    silent, reporting = read().read(), read(logprobs=True, top_logprobs=3).read()
    raw = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=-1, keepdims=True))
    for row, (before, after) in enumerate(zip(silent, reporting, strict=True)):
        assert before.token == after.token
        assert before.logprob is None
        assert before.top == ()
        assert after.logprob == pytest.approx(raw[row, after.token], abs=1e-5)
        assert [token for token, _ in after.top] == np.argsort(-raw[row])[:3].tolist()


def test_only_the_rows_that_asked_report() -> None:
    samplings = [Sampling(), Sampling(logprobs=True), Sampling(top_logprobs=2)]
    samplers = [RowSampler(sampling, PROMPT, VOCAB) for sampling in samplings]
    drawn = sample(mx.array(random_logits(8, 3)), samplers).read()
    assert [(each.logprob is not None, len(each.top)) for each in drawn] == [
        (False, 0),
        (True, 0),
        (True, 2),
    ]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1234, VOCAB - 1, slice(None)])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(
    settings: dict[str, Any], poison: float, where: int | slice
) -> None:
    logits = random_logits(9, 3)
    healthy = [draw_one(logits[row], **settings) for row in range(3)]
    logits[1, where] = poison
    samplers = [RowSampler(Sampling(**settings), PROMPT, VOCAB) for _ in range(3)]
    drawn = sample(mx.array(logits), samplers).read()
    assert [each.finite for each in drawn] == [True, False, True]
    assert [drawn[0].token, drawn[2].token] == [healthy[0], healthy[2]]
    assert 0 <= drawn[1].token < VOCAB


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_row_with_no_possible_token_is_not_finite(settings: dict[str, Any]) -> None:
    sampler = RowSampler(Sampling(**settings), PROMPT, VOCAB)
    assert not sample(mx.full((1, VOCAB), -math.inf), [sampler]).read()[0].finite


def test_sampling_evaluates_nothing_large_and_lists_what_reading_waits_for() -> None:
    samplers = [
        RowSampler(Sampling(temperature=1.0, logprobs=True, top_logprobs=4), PROMPT, VOCAB),
        RowSampler(Sampling(presence_penalty=1.0), PROMPT, VOCAB),
    ]
    draw = sample(mx.array(random_logits(10, 2)), samplers)
    assert max(array.size for array in draw.arrays) <= 20
    mx.eval(*draw.arrays)
    assert [each.finite for each in draw.read()] == [True, True]


def test_logits_that_do_not_fit_are_refused_before_any_row_advances() -> None:
    samplers = [RowSampler(Sampling(), PROMPT, VOCAB) for _ in range(2)]
    for shape in ((3, VOCAB), (2, VOCAB + 1), (2, 1, VOCAB)):
        with pytest.raises(ValueError, match="do not fit"):
            sample(mx.zeros(shape), samplers)
    with pytest.raises(ValueError, match="no row"):
        sample(mx.zeros((0, VOCAB)), [])
    assert [sampler.index for sampler in samplers] == [0, 0]


def test_requests_this_model_cannot_serve_are_refused_with_what_to_do() -> None:
    with pytest.raises(ServeError, match="ids run from 0 to 2499"):
        RowSampler(Sampling(logit_bias=((VOCAB, 1.0),)), PROMPT, VOCAB)
    with pytest.raises(ServeError, match="top_logprobs is 21; ask for 20 at most"):
        RowSampler(Sampling(logprobs=True, top_logprobs=21), PROMPT, VOCAB)


def test_a_sampler_shows_its_state() -> None:
    sampler = RowSampler(Sampling(temperature=1.0, top_k=5, presence_penalty=1.0), PROMPT, VOCAB, index=4)
    assert repr(sampler) == "RowSampler(top_k penalised, next draw 4)"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
def test_rows_of_one_kind_are_one_call_whose_parameters_are_built_once(settings: dict[str, Any]) -> None:
    samplers = Samplers([RowSampler(Sampling(seed=row, **settings), PROMPT, VOCAB) for row in range(8)])
    (call,) = samplers.form.calls
    assert call.rows == 8
    (first,) = samplers.inputs()
    samplers.draw(mx.array(random_logits(0, 8)))
    (second,) = samplers.inputs()
    changed = {name for name in first if first[name] is not second[name]}
    assert changed == ({"keys"} if settings else set())


def test_samplers_that_stay_together_draw_what_they_would_apart() -> None:
    def rows() -> list[RowSampler]:
        return [RowSampler(Sampling(seed=row, **settings), PROMPT, VOCAB) for row, settings in enumerate(SETTINGS)]

    together, apart = Samplers(rows()), rows()
    for step in range(4):
        logits = mx.array(random_logits(step, len(SETTINGS)))
        drawn = [sample(logits[i : i + 1], [row]).read()[0] for i, row in enumerate(apart)]
        assert together.draw(logits).read() == drawn
