"""Owns the samplers: each row's rules for drawing tokens, and one draw for all rows of a batch, unread.

For each row: penalties, bias, what its constraint allows, then argmax if it is greedy; else temperature, top_k, top_p,
min_p, and argmax of what is left plus the row's keyed noise. Rows of one kind share one vectorised call. Nothing
that batch-mates ask for enters a row's arithmetic, so it draws the same token alone or in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxbcd.errors import ServeError
from mlxbcd.plan.request import Constraint, Sampling
from mlxbcd.sampling.form import Call, Choice, Form, Inputs, Kind
from mlxbcd.sampling.logprobs import MOST_ALTERNATIVES, Logprobs
from mlxbcd.sampling.noise import key_at, stem
from mlxbcd.sampling.processors import History, bias_vector, column

_COLDEST: Final = 1e-6
"""Lower temperatures act as this one: it is greedy to float32's precision, and dividing by less overflows."""


class RowSampler:
    """One row's rules for drawing tokens, with what they need to remember.

    Attributes:
        sampling: the request's parameters.
        vocab_size: width of the logits it samples from.
        index: index of the next draw.
        history: the tokens seen so far, if a penalty needs them.
        bias: float32 [V] added to the logits, if the request asks for it.
        constraint: what rules out tokens, if anything does. Before a draw it has accepted every token drawn so far, but
            for one if it `foresees` that.
        kind: which rows it shares a call with.
    """

    __slots__ = ("_stem", "bias", "constraint", "history", "index", "kind", "sampling", "vocab_size")

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocab_size: int,
        index: int = 0,
        constraint: Constraint | None = None,
        candidate: int = 0,
    ) -> None:
        """Build on the device thread.

        Args:
            sampling: the request's parameters.
            prompt: token ids the row starts with, forced ones included.
            vocab_size: width of the logits.
            index: index of the first draw: the number of forced tokens.
            constraint: the row's own.
            candidate: which of the request's outputs this is; each has noise of its own.

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
        self.constraint = constraint
        self.kind = Kind(
            _choice(sampling, vocab_size),
            penalised=self.history is not None,
            biased=self.bias is not None,
            constrained=constraint is not None,
        )
        self._stem = stem(sampling.seed, candidate)

    def __repr__(self) -> str:
        flags = [flag for flag in ("penalised", "biased", "constrained") if getattr(self.kind, flag)]
        return f"RowSampler({' '.join([self.kind.choice.name.lower(), *flags])}, next draw {self.index})"

    @property
    def reports(self) -> bool:
        """The row wants log-probabilities."""
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    @property
    def key(self) -> tuple[int, int]:
        """Keys the next draw's noise."""
        return key_at(self._stem, self.index)

    def advance(self, token: mx.array) -> None:
        """Draw `index` was `token`, integer [1], which need not be evaluated yet."""
        self.index += 1
        if self.history is not None:
            self.history.observe(token)

    def supposing(self, proposals: Sequence[int]) -> list[RowSampler]:
        """Samplers of the next draw and of those behind it, if each of `proposals` were drawn before the next one.

        One more than proposals, or fewer: they end where the row's constraint rules a proposal out, or would be
        complete with it. This sampler stays as it is, and so does what it refers to.
        """
        twin = copy(self)
        if twin.history is not None:
            twin.history = twin.history.supposing(())
        follower = self.constraint.copy() if self.constraint is not None else None
        if follower is not None:
            twin.constraint = _Fixed(follower.mask())
        samplers = [twin]
        for token in proposals:
            if follower is not None:
                if not _allows(follower.mask(), token):
                    break
                follower.accept(token)
                if follower.complete or follower.fault:
                    break
            twin = copy(twin)
            twin.index += 1
            if twin.history is not None:
                twin.history = twin.history.supposing([token])
            if follower is not None:
                twin.constraint = _Fixed(follower.mask())
            samplers.append(twin)
        return samplers

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


class Samplers:
    """The samplers of a batch's rows, for as long as these rows stay together: what their draws have in common is built
    once. On the device thread.

    Attributes:
        rows: one per row of the batch.
        ids: the tokens that are scored, if not all are.
        form: decides the graph of a draw.
    """

    __slots__ = ("_constraints", "_groups", "_same", "form", "ids", "rows")

    def __init__(self, rows: Sequence[RowSampler], ids: mx.array | None = None) -> None:
        """Bring rows together.

        Args:
            ids: uint32 [K], different tokens: what the columns of the logits stand for. Then draws are those of logits
                in which all other tokens are impossible, and report no log-probabilities.

        Raises:
            ValueError: there is no row.
        """
        if not rows:
            raise ValueError("there is no row to sample")
        self.rows = tuple(rows)
        self.ids = ids
        width = rows[0].vocab_size if ids is None else ids.shape[0]
        self._constraints = [row.constraint for row in rows if row.constraint is not None]
        groups: dict[Kind, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(row.kind, []).append(i)
        self._groups = [[self.rows[i] for i in members] for members in groups.values()]
        calls = [_call(kind, members, width) for kind, members in zip(groups, self._groups, strict=True)]
        reporting = tuple(i for i, row in enumerate(rows) if row.reports and ids is None)
        widths = tuple(rows[i].sampling.top_logprobs for i in reporting)
        self.form = Form(tuple(calls), reporting, widths)
        self._same = [_parameters(call, members) for call, members in zip(calls, self._groups, strict=True)]
        if len(calls) > 1:
            order = [i for members in groups.values() for i in members]
            self._same[0]["order"] = mx.array(sorted(range(len(rows)), key=order.__getitem__), dtype=mx.uint32)
            for same, members in zip(self._same, groups.values(), strict=True):
                same["rows"] = mx.array(members, dtype=mx.uint32)

    def __repr__(self) -> str:
        return f"Samplers({list(self.rows)})"

    @property
    def wait(self) -> bool:
        """What some row may draw after the next token depends on that token: read it before the draw."""
        return not all(constraint.foresees for constraint in self._constraints)

    def inputs(self) -> list[Inputs]:
        """The arrays of the next draw, as `Form.choose` takes them."""
        inputs: list[Inputs] = []
        for call, members, same in zip(self.form.calls, self._groups, self._same, strict=True):
            now = dict(same)
            if call.kind.choice is not Choice.GREEDY:
                now["keys"] = mx.array([row.key for row in members], dtype=mx.uint32)
            if call.kind.penalised:
                now["counts"] = mx.stack([row.history.counts for row in members if row.history is not None])
            if call.kind.constrained:
                now["allowed"] = _allowed(members)
            inputs.append(now)
        return inputs

    def advance(self, chosen: Sequence[mx.array]) -> Draw:
        """Take note of a draw, what `Form.choose` gave: every sampler is one further. Evaluates nothing."""
        tokens, finite, *reported = chosen
        for i, row in enumerate(self.rows):
            if row.history is None:
                row.index += 1
            else:
                row.advance(tokens[i : i + 1])
        return Draw(tokens, finite, self.form.logprobs(reported))

    def named(self, columns: mx.array) -> mx.array:
        """The tokens that columns of the logits stand for: uint32, of the same shape."""
        return columns.astype(mx.uint32) if self.ids is None else self.ids[columns]

    def draw(self, logits: mx.array) -> Draw:
        """Draw one token per row and advance every sampler by one. Evaluates nothing.

        Args:
            logits: [B, V], any float dtype; [B, K] where only `ids` are scored.

        Raises:
            ValueError: the logits do not fit the samplers; none has advanced.
        """
        for i, row in enumerate(self.rows):
            width = row.vocab_size if self.ids is None else self.ids.shape[0]
            if logits.shape != (len(self.rows), width):
                raise ValueError(
                    f"logits of shape {logits.shape} do not fit row {i} of {len(self.rows)}, "
                    f"of whose vocabulary {width} tokens are scored"
                )
        return self.advance(self.form.choose(logits, self.inputs(), self.ids))


def sample(logits: mx.array, samplers: Sequence[RowSampler]) -> Draw:
    """One draw of rows that need not stay together: see `Samplers.draw`.

    Raises:
        ValueError: the logits do not fit the samplers, or there are none; none has advanced.
    """
    return Samplers(samplers).draw(logits)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The constraint of a single draw."""

    words: NDArray[np.uint32] | None
    fault: str = ""
    complete: bool = False
    foresees: bool = False

    def mask(self) -> NDArray[np.uint32] | None:
        return self.words

    def accept(self, token: int) -> None:
        raise TypeError("this stands for one draw only")

    def retract(self, count: int) -> None:
        raise TypeError("this stands for one draw only")

    def forced(self) -> list[int]:
        return []

    def copy(self) -> _Fixed:
        return self


def _allows(words: NDArray[np.uint32] | None, token: int) -> bool:
    return words is None or bool(words[token // 32] >> (token % 32) & 1)


def _call(kind: Kind, rows: Sequence[RowSampler], width: int) -> Call:
    widest = min(max(row.sampling.top_k for row in rows), width) if kind.choice is Choice.TOP_K else 0
    return Call(kind, len(rows), widest, kind.choice is Choice.PLAIN and any(row.sampling.min_p for row in rows))


def _parameters(call: Call, rows: Sequence[RowSampler]) -> dict[str, mx.array]:
    """The inputs of a call that its rows never change."""
    samplings = [row.sampling for row in rows]
    same: dict[str, mx.array] = {}
    if call.kind.penalised:
        same["repetition"] = column([sampling.repetition_penalty for sampling in samplings])
        same["presence"] = column([sampling.presence_penalty for sampling in samplings])
        same["frequency"] = column([sampling.frequency_penalty for sampling in samplings])
    if call.kind.biased:
        same["bias"] = mx.stack([row.bias for row in rows if row.bias is not None])
    if call.kind.choice is Choice.GREEDY:
        return same
    same["temperature"] = column([max(sampling.temperature, _COLDEST) for sampling in samplings])
    if call.kind.choice is not Choice.PLAIN:
        same["top_p"] = column([sampling.top_p for sampling in samplings])
    if call.kind.choice is Choice.NUCLEUS:
        same["min_p"] = column([sampling.min_p for sampling in samplings])
    elif call.kind.choice is Choice.TOP_K or call.floored:
        floors = [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings]
        same["floor"] = column(floors)
    if call.kind.choice is Choice.TOP_K:
        ranks = [min(sampling.top_k, call.widest) for sampling in samplings]
        same["top_k"] = mx.array(ranks, dtype=mx.int32)[:, None]
    return same


def _allowed(rows: Sequence[RowSampler]) -> mx.array:
    """What each row may draw: uint32 [G, ceil(V / 32)]."""
    words = np.full((len(rows), -(-rows[0].vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)
    for i, row in enumerate(rows):
        if row.constraint is not None and (mask := row.constraint.mask()) is not None:
            words[i] = mask
    return mx.array(words)


def _choice(sampling: Sampling, vocab_size: int) -> Choice:
    if sampling.greedy:
        return Choice.GREEDY
    if 0 < sampling.top_k < vocab_size:
        return Choice.TOP_K
    return Choice.NUCLEUS if sampling.top_p < 1.0 else Choice.PLAIN
