"""Owns the arithmetic of one draw for many rows, as a function of arrays alone: rows of one kind share one call.

What a batch's rows ask for splits into a `Form`, which decides the graph and is hashable, and arrays, which don't. So a
form can be traced once and called with the parameters, keys and counts of any rows that have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import mlx.core as mx

from mlxbcd.sampling.filters import nucleus_bound, top_k_bound
from mlxbcd.sampling.logprobs import Logprobs, logprobs
from mlxbcd.sampling.noise import gumbel
from mlxbcd.sampling.processors import penalise

Inputs: TypeAlias = Mapping[str, mx.array]
"""The arrays of one call, by name: see `Call.tokens`."""


class Choice(Enum):
    """How a row picks from its processed logits."""

    GREEDY = auto()
    PLAIN = auto()
    """Random; no filter but min_p."""
    TOP_K = auto()
    """Random; top_k and perhaps the other filters."""
    NUCLEUS = auto()
    """Random; top_p over the whole vocabulary and perhaps min_p."""


class Kind(NamedTuple):
    """Rows of one kind are sampled in one call."""

    choice: Choice
    penalised: bool
    biased: bool
    constrained: bool = False
    """Something may rule out tokens."""


@dataclass(frozen=True, slots=True)
class Call:
    """Rows that are sampled together.

    Attributes:
        rows: how many.
        widest: the largest top_k among them; 0 where the kind has none.
        floored: some row has a min_p.
    """

    kind: Kind
    rows: int
    widest: int = 0
    floored: bool = False

    def tokens(self, logits: mx.array, inputs: Inputs, ids: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Columns of the tokens drawn, uint32 [G], and whether each row's logits were finite, bool [G].

        Args:
            logits: [G, V] of these rows, any float dtype; [G, K] where only some tokens are scored.
            inputs: float32 [G, 1] unless said otherwise. Penalised rows: counts [G, V], repetition, presence,
                frequency. Biased ones: bias [G, V]. Constrained ones: allowed uint32 [G, ceil(V / 32)], a bit for each
                token. Random ones: keys uint32 [G, 2], temperature, and for their
                filters top_p, min_p (nucleus), top_k int32, top_p, floor (top_k), or floor (plain and floored).
            ids: uint32 [K], the tokens that are scored; None if all are. Each keeps its own noise, counts and bias.
        """
        kind = self.kind

        def scored(array: mx.array) -> mx.array:
            return array if ids is None else array[:, ids]

        if kind.choice is not Choice.GREEDY or kind.penalised or kind.biased:
            logits = logits.astype(mx.float32)
        if kind.penalised:
            strengths = (inputs[name] for name in ("repetition", "presence", "frequency"))
            logits = penalise(logits, scored(inputs["counts"]), *strengths)
        if kind.biased:
            logits = logits + scored(inputs["bias"])
        if kind.constrained:
            width = logits.shape[-1] if ids is None else None
            logits = mx.where(scored(_spread(inputs["allowed"], width)), logits, -math.inf)
        # argmax passes over a NaN on some devices; max passes it on, on all, and random rows need it anyway.
        peak = mx.max(logits, axis=-1, keepdims=True)
        if kind.choice is Choice.GREEDY:
            tokens = mx.argmax(logits, axis=-1)
        else:
            tokens = self._random(logits - peak, inputs, ids)
        return tokens, mx.isfinite(peak)[:, 0]

    def _random(self, relative: mx.array, inputs: Inputs, ids: mx.array | None) -> mx.array:
        """Random tokens, from logits relative to each row's largest."""
        scores = relative / inputs["temperature"]
        noisy = scores + gumbel(inputs["keys"], mx.arange(scores.shape[-1], dtype=mx.uint32) if ids is None else ids)
        kept = self._kept(scores, inputs)
        return mx.argmax(noisy if kept is None else mx.where(kept, noisy, -math.inf), axis=-1)

    def _kept(self, scores: mx.array, inputs: Inputs) -> mx.array | None:
        """Which tokens pass the filters, bool [G, V]; None if all do."""
        if self.kind.choice is Choice.NUCLEUS:
            weights = mx.exp(scores)
            return weights >= mx.maximum(nucleus_bound(weights, inputs["top_p"]), inputs["min_p"])
        if self.kind.choice is Choice.TOP_K:
            bound = top_k_bound(scores, inputs["top_k"], inputs["top_p"], self.widest)
            return scores >= mx.maximum(bound, inputs["floor"])
        return scores >= inputs["floor"] if self.floored else None


@dataclass(frozen=True, slots=True)
class Form:
    """All that decides the graph of a draw.

    Attributes:
        calls: one per kind.
        reporting: positions in the batch of the rows that want log-probabilities.
        widths: how many alternatives each of them wants.
    """

    calls: tuple[Call, ...]
    reporting: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()

    def choose(self, logits: mx.array, inputs: Sequence[Inputs], ids: mx.array | None = None) -> list[mx.array]:
        """Draw one token per row: tokens uint32 [B], finite bool [B], then the arrays of the log-probabilities.

        Args:
            logits: [B, V], any float dtype; [B, K] with `ids`.
            inputs: those of each call; where there are several, also "rows" uint32 [G], the positions of its rows, and
                in the first "order" uint32 [B], where each of the batch's rows is when the calls are put in a row.
            ids: uint32 [K], the tokens that are scored; None if all are. A form that reports nothing.
        """
        parts = [
            call.tokens(logits[arrays["rows"]] if len(self.calls) > 1 else logits, arrays, ids)
            for call, arrays in zip(self.calls, inputs, strict=True)
        ]
        tokens, finite = parts[0]
        if len(parts) > 1:
            order = inputs[0]["order"]
            tokens, finite = (mx.concatenate(list(part))[order] for part in zip(*parts, strict=True))
        if ids is not None:
            tokens = ids[tokens]
        reported = logprobs(logits, tokens, self.reporting, self.widths).arrays if self.reporting else []
        return [tokens, finite, *reported]

    def logprobs(self, reported: Sequence[mx.array]) -> Logprobs | None:
        """The log-probabilities among what `choose` gave, which is all but its first two arrays."""
        return Logprobs(self.reporting, self.widths, *reported) if reported else None


def _spread(words: mx.array, width: int | None) -> mx.array:
    """Bool [G, width] from a bit for each, uint32 [G, ceil(width / 32)], low bits first; all bits without a width."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.astype(mx.bool_).reshape(words.shape[0], -1)[:, :width]
