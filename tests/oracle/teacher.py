"""Owns the reference: mlx-lm's own classes, caches and loop on the daemon's float32 weights, and sampling in float64.

Nothing of the daemon's rows, engine or samplers runs here. Of its sampling only the keyed noise is used, which golden
values define.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxbcd.model import zoo
from mlxbcd.model.load import load
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.sampling.noise import gumbel, key

zoo.bind()

from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

Floats: TypeAlias = npt.NDArray[np.float64]

_CHUNK: Final = 256


class Teacher:
    """mlx-lm with one model, on the calling thread.

    Args:
        directory: the model's; its weights become what the daemon makes of them.
    """

    def __init__(self, directory: Path) -> None:
        self.model: Any = load(directory).model
        self._drawn: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        """The first `length` tokens that mlx-lm generates, whatever they are: an end token ends nothing."""
        known = self._drawn.get(tuple(prompt), [])
        if len(known) < length:
            steps = generate_step(mx.array(list(prompt)), self.model, max_tokens=length, prefill_step_size=_CHUNK)
            known = self._drawn[tuple(prompt)] = [int(token) for token, _ in steps]
        return known[:length]

    def scores(self, request: Request, tokens: Sequence[int]) -> Floats:
        """What each next token would score, after processors and noise, along `tokens`: [n, V].

        Row i has the request's prompt and the first i tokens behind it. What a filter rules out scores −inf.
        """
        cache = make_prompt_cache(self.model)
        *begin, last = request.prompt
        for at in range(0, len(begin), _CHUNK):
            self.model(mx.array([begin[at : at + _CHUNK]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        logits = np.array(self.model(mx.array([[last, *tokens[:-1]]]), cache=cache)[0], dtype=np.float64)
        text = (*request.prompt, *tokens)
        length = len(request.prompt)
        return np.array([score(row, request.sampling, text[: length + n], n) for n, row in enumerate(logits)])


def score(logits: Floats, sampling: Sampling, history: Sequence[int], draw: int) -> Floats:
    """What draw number `draw` is the argmax of: logits [V] after penalties, bias, temperature, filters and noise."""
    counts = np.bincount(history, minlength=len(logits))
    seen = counts > 0
    repeated = np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    scores: Floats = (
        np.where(seen, repeated, logits) - sampling.presence_penalty * seen - sampling.frequency_penalty * counts
    )
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    if sampling.greedy:
        return scores
    scores /= sampling.temperature
    keys = mx.array([key(sampling.seed, draw)], dtype=mx.uint32)
    noise = np.array(gumbel(keys, mx.arange(len(scores), dtype=mx.uint32)), dtype=np.float64)[0]
    return np.where(_kept(scores, sampling), scores + noise, -np.inf)


def _kept(scores: Floats, sampling: Sampling) -> npt.NDArray[np.bool_]:
    """The tokens that top_k, then top_p, then min_p leave; bool [V]."""
    ranked = np.argsort(-scores)[: sampling.top_k or None]
    weights = np.exp(scores - scores.max())
    mass = np.cumsum(weights[ranked]) / weights[ranked].sum()
    if sampling.top_p < 1:
        ranked = ranked[: np.searchsorted(mass, sampling.top_p) + 1]
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[ranked] = weights[ranked] >= sampling.min_p
    return kept
