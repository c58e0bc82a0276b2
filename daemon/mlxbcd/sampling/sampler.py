"""Owns sampling: from a batch of logits to one token per row by its own rules, on the device and unread.

For each row: penalties, bias, then argmax if it is greedy; else temperature, top_k, top_p, min_p, and
argmax of what is left plus the row's keyed noise. Rows of one kind share one vectorised call. Nothing
that batch-mates ask for enters a row's arithmetic, so it draws the same token alone or in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple, cast

import mlx.core as mx

from mlxbcd.errors import ServeError
from mlxbcd.plan.request import Sampling
from mlxbcd.sampling.filters import nucleus_bound, top_k_bound
from mlxbcd.sampling.logprobs import MOST_ALTERNATIVES, Logprobs, logprobs
from mlxbcd.sampling.noise import gumbel, key
from mlxbcd.sampling.processors import History, bias_vector, column, penalise

_COLDEST: Final = 1e-6
"""Lower temperatures act as this one: it is greedy to float32's precision, and dividing by less overflows."""


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


_UNPROCESSED_GREEDY: Final = Kind(Choice.GREEDY, penalised=False, biased=False)


class RowSampler:
    """One row's rules for drawing tokens, with what they need to remember.

    Attributes:
        sampling: the request's parameters.
        vocab_size: width of the logits it samples from.
        index: index of the next draw.
        history: the tokens seen so far, if a penalty needs them.
        bias: float32 [V] added to the logits, if the request asks for it.
        kind: which rows it shares a call with.
    """

    __slots__ = ("bias", "history", "index", "kind", "sampling", "vocab_size")

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int, index: int = 0) -> None:
        """Build on the device thread.

        Args:
            sampling: the request's parameters.
            prompt: token ids the row starts with, forced ones included.
            vocab_size: width of the logits.
            index: index of the first draw: the number of forced tokens.

        Raises:
            ServeError: bad_request, the bias or (where penalties need it) the prompt names a token outside
                the vocabulary, or more alternatives are asked for than are ever reported.
        """
        if sampling.top_logprobs > MOST_ALTERNATIVES:
            raise ServeError(
                "bad_request", f"top_logprobs is {sampling.top_logprobs}; ask for {MOST_ALTERNATIVES} at most"
            )
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.index = index
        self.history = History(prompt, vocab_size) if sampling.penalised else None
        self.bias = bias_vector(sampling.logit_bias, vocab_size) if sampling.logit_bias else None
        self.kind = Kind(_choice(sampling, vocab_size), self.history is not None, self.bias is not None)

    def __repr__(self) -> str:
        flags = [flag for flag in ("penalised", "biased") if getattr(self.kind, flag)]
        return f"RowSampler({' '.join([self.kind.choice.name.lower(), *flags])}, next draw {self.index})"

    @property
    def reports(self) -> bool:
        """The row wants log-probabilities."""
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    def advance(self, token: mx.array) -> None:
        """Draw `index` was `token`, integer [1], which need not be evaluated yet."""
        self.index += 1
        if self.history is not None:
            self.history.observe(token)

    def rewind(self, index: int) -> None:
        """Make `index` the next draw again, as if no later one had been made; penalties forget those tokens.

        Raises:
            ValueError: `index` lies ahead, or further back than a penalised row's history can undo.
        """
        if index > self.index:
            raise ValueError(f"{self!r} cannot rewind ahead, to {index}")
        if self.history is not None:
            self.history.forget(self.index - index)
        self.index = index


@dataclass(frozen=True, slots=True)
class Sample:
    """One drawn token, on the host.

    Attributes:
        token: its id.
        finite: False if the row's logits held NaN or +inf, or only −inf: the token is then meaningless.
        logprob: natural log of the model's own probability, if the row asked.
        top: (token, logprob) of the likeliest tokens, as many as the row asked for.
    """

    token: int
    finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for every row of a batch, lazily.

    Attributes:
        tokens: uint32 [B], always ids of the vocabulary, so the next forward may take them unread.
        finite: bool [B], see `Sample.finite`.
        logprobs: of the rows that asked; None if none did.
    """

    tokens: mx.array
    finite: mx.array
    logprobs: Logprobs | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """All that `read` waits for, a few bytes per row: submit these together, and nothing else."""
        return [self.tokens, self.finite, *(self.logprobs.arrays if self.logprobs else ())]

    def read(self) -> list[Sample]:
        """Evaluate and bring the samples to the host, one per row. On the device thread."""
        mx.eval(*self.arrays)
        reported = self.logprobs.read() if self.logprobs else {}
        tokens = cast("list[int]", self.tokens.tolist())
        finite = cast("list[bool]", self.finite.tolist())
        return [Sample(tokens[row], finite[row], *reported.get(row, ())) for row in range(len(tokens))]


def sample(logits: mx.array, samplers: Sequence[RowSampler]) -> Draw:
    """Draw one token per row and advance every sampler by one. Evaluates nothing.

    Args:
        logits: [B, V], any float dtype.
        samplers: one per row.

    Raises:
        ValueError: the logits do not fit the samplers; none has advanced.
    """
    if not samplers:
        raise ValueError("there is no row to sample")
    for row, sampler in enumerate(samplers):
        if logits.shape != (len(samplers), sampler.vocab_size):
            raise ValueError(
                f"logits of shape {logits.shape} do not fit row {row} of {len(samplers)}, "
                f"whose vocabulary has {sampler.vocab_size} tokens"
            )
    groups: dict[Kind, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler.kind, []).append(row)
    parts = [_sample_group(logits, kind, rows, [samplers[row] for row in rows]) for kind, rows in groups.items()]
    tokens, finite = parts[0] if len(parts) == 1 else _reassemble(list(groups.values()), parts)
    reporting = [row for row, sampler in enumerate(samplers) if sampler.reports]
    widths = [samplers[row].sampling.top_logprobs for row in reporting]
    reported = logprobs(logits, tokens, reporting, widths) if reporting else None
    for row, sampler in enumerate(samplers):
        sampler.advance(tokens[row : row + 1])
    return Draw(tokens, finite, reported)


def _sample_group(
    logits: mx.array, kind: Kind, rows: list[int], samplers: list[RowSampler]
) -> tuple[mx.array, mx.array]:
    """Tokens and finiteness of the rows of one kind."""
    if len(rows) < logits.shape[0]:
        logits = logits[mx.array(rows, dtype=mx.uint32)]
    if kind != _UNPROCESSED_GREEDY:
        logits = logits.astype(mx.float32)
    if kind.penalised:
        histories = [sampler.history for sampler in samplers if sampler.history is not None]
        logits = penalise(logits, histories, [sampler.sampling for sampler in samplers])
    if kind.biased:
        logits = logits + mx.stack([sampler.bias for sampler in samplers if sampler.bias is not None])
    # argmax passes over a NaN on some devices; max passes it on, on all, and random rows need it anyway.
    peak = mx.max(logits, axis=-1, keepdims=True)
    if kind.choice is Choice.GREEDY:
        tokens = mx.argmax(logits, axis=-1)
    else:
        tokens = _draw(logits - peak, kind.choice, samplers)
    return tokens, mx.isfinite(peak)[:, 0]


def _draw(relative: mx.array, choice: Choice, samplers: list[RowSampler]) -> mx.array:
    """Random tokens, uint32 [G], from logits relative to each row's largest, float32 [G, V]."""
    samplings = [sampler.sampling for sampler in samplers]
    scores = relative / column([max(sampling.temperature, _COLDEST) for sampling in samplings])
    keys = [key(sampler.sampling.seed, sampler.index) for sampler in samplers]
    ids = mx.arange(scores.shape[-1], dtype=mx.uint32)
    noisy = scores + gumbel(mx.array(keys, dtype=mx.uint32), ids)
    kept = _kept(scores, choice, samplings)
    return mx.argmax(noisy if kept is None else mx.where(kept, noisy, -math.inf), axis=-1)


def _kept(scores: mx.array, choice: Choice, samplings: list[Sampling]) -> mx.array | None:
    """Which tokens pass the filters, bool [G, V]; None if all do."""
    top_p = column([sampling.top_p for sampling in samplings])
    if choice is Choice.NUCLEUS:
        weights = mx.exp(scores)
        min_p = column([sampling.min_p for sampling in samplings])
        return weights >= mx.maximum(nucleus_bound(weights, top_p), min_p)
    floor = column([math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings])
    if choice is Choice.TOP_K:
        widths = [sampling.top_k for sampling in samplings]
        top_k = mx.array(widths, dtype=mx.int32)[:, None]
        return scores >= mx.maximum(top_k_bound(scores, top_k, top_p, max(widths)), floor)
    return scores >= floor if any(sampling.min_p for sampling in samplings) else None


def _choice(sampling: Sampling, vocab_size: int) -> Choice:
    if sampling.greedy:
        return Choice.GREEDY
    if 0 < sampling.top_k < vocab_size:
        return Choice.TOP_K
    return Choice.NUCLEUS if sampling.top_p < 1.0 else Choice.PLAIN


def _reassemble(groups: list[list[int]], parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Put the groups' results back into the batch's order."""
    rows = [row for group in groups for row in group]
    order = mx.array(sorted(range(len(rows)), key=rows.__getitem__), dtype=mx.uint32)
    tokens = mx.concatenate([part[0] for part in parts])
    finite = mx.concatenate([part[1] for part in parts])
    return tokens[order], finite[order]
