"""Owns log-probabilities: what the model itself gave the sampled tokens and their likeliest alternatives.

They are the log-softmax of the raw logits, before penalties, bias and temperature. Asking changes no sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx

MOST_ALTERNATIVES: Final = 20
"""The largest `top_logprobs`."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Lazy log-probabilities of the rows of one draw that asked for them.

    Attributes:
        rows: positions in the batch, n of them.
        widths: how many alternatives each of these rows asked for.
        chosen: float32 [n], natural log.
        ids: uint32 [n, K], the likeliest tokens in no particular order; None if no row wants alternatives.
        values: float32 [n, K], their log-probabilities.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    chosen: mx.array
    ids: mx.array | None = None
    values: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Everything `read` waits for."""
        return [array for array in (self.chosen, self.ids, self.values) if array is not None]

    def read(self) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
        """Per row: the sampled token's log-probability, and (token, log-probability) from the likeliest on.

        Ties are listed by id; tokens the model rules out (−inf) are left out. Evaluates.
        """
        chosen = cast("list[float]", self.chosen.tolist())
        ids: list[list[int]] = [[]] * len(self.rows)
        values: list[list[float]] = [[]] * len(self.rows)
        if self.ids is not None and self.values is not None:
            ids = cast("list[list[int]]", self.ids.tolist())
            values = cast("list[list[float]]", self.values.tolist())
        result = {}
        for i, row in enumerate(self.rows):
            ranked = sorted(zip(ids[i], values[i], strict=True), key=lambda pair: (-pair[1], pair[0]))
            top = tuple(pair for pair in ranked[: self.widths[i]] if pair[1] > -math.inf)
            result[row] = chosen[i], top
        return result


def logprobs(logits: mx.array, tokens: mx.array, rows: Sequence[int], widths: Sequence[int]) -> Logprobs:
    """Log-probabilities of `tokens` under `logits` for some rows of a batch.

    Args:
        logits: [B, V], raw.
        tokens: uint32 [B], sampled.
        rows: positions in the batch that asked, at least one.
        widths: how many alternatives each of them wants, up to `MOST_ALTERNATIVES`.
    """
    if len(rows) < logits.shape[0]:
        index = mx.array(list(rows), dtype=mx.uint32)
        logits, tokens = logits[index], tokens[index]
    logits = logits.astype(mx.float32)
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - normaliser)[:, 0]
    if not any(widths):
        return Logprobs(tuple(rows), tuple(widths), chosen)
    # Always the same number of candidates: ties at the edge fall alike whatever batch-mates ask for.
    candidates = min(MOST_ALTERNATIVES, logits.shape[-1])
    ids = mx.argpartition(logits, -candidates, axis=-1)[:, -candidates:]
    values = mx.take_along_axis(logits, ids, axis=-1) - normaliser
    return Logprobs(tuple(rows), tuple(widths), chosen, ids, values)
