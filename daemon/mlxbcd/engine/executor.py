"""Owns the device side of one model's engine: it carries out iterations, and only plain values leave it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from mlxbcd.engine.faults import classify
from mlxbcd.engine.reuse import Reuse
from mlxbcd.engine.runner import Leaving, PieceCost, Report
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.errors import ServeError, outline
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.events import Emit, Event, Failed, Prefilled, owner, row_key
from mlxbcd.methods.speculative import WIDEST, SpeculativeGroup
from mlxbcd.methods.step import StepBuilder
from mlxbcd.model.forward import Forward, Group
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Draw, RowSampler, sample
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key, capacity_for
from mlxbcd.state.rows import Joiner, Rows

log = logging.getLogger(__name__)

_CLEAR_EVERY_STEPS: Final = 256


@dataclass(slots=True)
class Preparing:
    """A request that isn't in the decode group yet, with a state of its own.

    Attributes:
        rows: one for each candidate; they share the prompt's state until they join.
        tokens: prompt and forced tokens.
        position: how many of them are processed. With all of them the first sample is out, and the row joins before
            the next decode step.
        planned: the position is a planned end.
        settled: the last planned end.
    """

    key: Key
    rows: list[Row]
    tokens: tuple[int, ...]
    state: Rows | AloneRow
    position: int = 0
    planned: bool = True
    settled: int = 0

    @property
    def request(self) -> Request:
        return self.rows[0].request

    def __repr__(self) -> str:
        return f"Preparing({self.key}: {self.position}/{len(self.tokens)})"


@dataclass(slots=True)
class Executor:
    """Runs iterations of one loaded model. Every method is for the device thread.

    Attributes:
        vocab_size: width of the model's logits.
        steps: builds decode steps; eagerly if there is nothing.
        reuse: what rows take from the prefix cache and leave in it.
        verify: what windows of proposals cost; None decodes without any.
    """

    forward: Forward
    composition: Composition
    vocab_size: int
    ahead: Ahead
    steps: StepBuilder | None = None
    reuse: Reuse = field(default_factory=Reuse)
    verify: VerifyCosts | None = None
    _group: DecodeGroup = field(init=False)
    _preparing: dict[Key, Preparing] = field(default_factory=dict, init=False)
    _ready: dict[Key, Preparing] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _token_bytes: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.verify is not None:
            state = Rows(self.composition, widest=WIDEST)
            how = (self.forward, state, self.ahead, self.steps, self._settled)
            self._group = SpeculativeGroup(*how, costs=self.verify)
        else:
            # Decode steps are one token wide, so a sliding window needs no room beyond itself.
            rows = Rows(self.composition, widest=1) if self.composition.batches else None
            self._group = DecodeGroup(self.forward, rows, self.ahead, self.steps, self._settled)

    def __repr__(self) -> str:
        return f"Executor({self._group}, {list(self._preparing.values())}, ready {list(self._ready)})"

    def iterate(
        self,
        iteration: Iteration,
        start: Sequence[tuple[Key, Request]],
        leave: Sequence[Leaving],
        emit: Emit,
    ) -> Report:
        """See `Runner.iterate`."""
        self._token_bytes = 0.0
        if leave:
            self._let_leave(leave, emit)
        for key, request in start:
            self._start(key, request, emit)
        if self._ready:
            self._let_join(emit)
        if iteration.decode:
            self._decode(emit)
        piece = None
        if iteration.piece is not None and iteration.piece.key in self._preparing:
            piece = self._prefill(iteration.piece, emit)
        rows = (*self._preparing.values(), *self._ready.values())
        return Report(
            steps=tuple(self._group.timings()),
            piece=piece,
            running=(*self._group.keys, *(row.key for preparing in self._ready.values() for row in preparing.rows)),
            kv_bytes=self._group.nbytes + sum(preparing.state.nbytes for preparing in rows),
            token_bytes=self._token_bytes,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def close(self) -> None:
        """See `Runner.close`."""
        self._guard(lambda: self._group.keep(_nobody, _resumable, self._settled), _nobody)
        self._group.close()
        self._preparing.clear()
        self._ready.clear()
        mx.clear_cache()

    def _start(self, key: Key, request: Request, emit: Emit) -> None:
        tokens = (*request.prompt, *request.forced)
        drawn = len(request.forced)
        try:
            rows = []
            for candidate in range(request.candidates):
                constraint = request.constraint() if request.constraint is not None else None
                sampler = RowSampler(request.sampling, tokens, self.vocab_size, drawn, constraint, candidate)
                rows.append(Row(row_key(key, candidate), request, sampler, drawn=drawn))
            state: Rows | AloneRow
            if self.composition.batches:
                state = Rows(self.composition)
                position = self.reuse.begin(key, request, tokens, state)
            else:
                state = AloneRow(self.composition, key)
                position = 0
        except Exception as error:
            self._fail([key], error, emit)
        else:
            self._preparing[key] = Preparing(key, rows, tokens, state, position, settled=position)
            emit([Prefilled(key, position)])

    def _let_leave(self, leave: Sequence[Leaving], emit: Emit) -> None:
        for leaving in leave:
            request, candidate = owner(leaving.key)
            if leaving.superseded and (given_up := self._preparing.get(request)) is not None:
                self._keep(given_up, given_up.settled)
            for preparing in (self._preparing.get(request), self._ready.get(request)):
                if preparing is not None:
                    preparing.rows = [row for row in preparing.rows if owner(row.key)[1] != candidate]
                    if not preparing.rows:
                        self._preparing.pop(request, None)
                        self._ready.pop(request, None)
        keys = [leaving.key for leaving in leave]
        stopped = {leaving.key: leaving.stopped for leaving in leave if leaving.stopped is not None}
        self._guard(lambda: self._group.leave(keys, emit, stopped), emit)

    def _let_join(self, emit: Emit) -> None:
        """Move the rows whose prompt is processed into the decode group; one that can't join fails alone."""
        self._guard(lambda: self._group.settle(emit), emit)
        for key, preparing in self._ready.items():
            for row in preparing.rows:
                try:
                    if isinstance(preparing.state, AloneRow):
                        self._group.adopt(row, preparing.state)
                    else:
                        length = preparing.state.lengths[key]
                        self._group.join(row, Joiner(row.key, preparing.state.read(key), length + 1))
                except Exception as error:
                    self._fail([row.key], error, emit)
        self._ready.clear()

    def _decode(self, emit: Emit) -> None:
        self._guard(lambda: self._group.step(emit), emit)
        self._steps += 1
        if self._steps % _CLEAR_EVERY_STEPS == 0:
            self._guard(lambda: self._group.keep(emit, _resumable, self._settled), emit)
            mx.clear_cache()

    def _settled(self, row: Row, state: Rows) -> None:
        """A row has ended, or may have to be continued elsewhere."""
        self.reuse.settled(row.key, row.request, row.sequence, state)

    def _keep(self, preparing: Preparing, length: int) -> None:
        if isinstance(preparing.state, Rows):
            self.reuse.keep(preparing.key, preparing.request, preparing.tokens, length, preparing.state)

    def _prefill(self, piece: Piece, emit: Emit) -> PieceCost | None:
        preparing = self._preparing[piece.key]
        context = preparing.position
        if piece.begin not in (None, context):
            # It was restored further than anybody knew, or not as far: the next piece is another one.
            return None
        try:
            draw, written = self._advance(preparing, piece)
            self._guard(self._group.wait, emit)
            began = time.perf_counter()
            samples = draw.read() if draw is not None else []
            mx.eval(written)
            seconds = time.perf_counter() - began
        except Exception as error:
            del self._preparing[piece.key]
            self._fail([piece.key], error, emit)
            return None
        if piece.ends:
            # Decode has no use for activations of that size, and whatever was submitted has been computed by now.
            mx.clear_cache()
            preparing.settled = preparing.position
            if preparing.position in preparing.request.boundaries:
                self._keep(preparing, preparing.position)
        events: list[Event] = [Prefilled(piece.key, preparing.position)]
        if samples:
            request = preparing.request
            del self._preparing[piece.key]
            self._token_bytes = preparing.state.nbytes / capacity_for(len(preparing.tokens))
            events += [row.take(drawn) for row, drawn in zip(preparing.rows, samples, strict=True)]
            preparing.rows = [row for row in preparing.rows if not row.ended]
            if preparing.rows:
                self._ready[piece.key] = preparing
        emit(events)
        if samples and isinstance(preparing.state, Rows):
            self.reuse.prompt_done(piece.key, request, preparing.tokens, preparing.state)
        return PieceCost(piece.width, context, seconds)

    def _advance(self, preparing: Preparing, piece: Piece) -> tuple[Draw | None, list[mx.array]]:
        """Build the graph of a piece: the first sample if it ends the prompt, and the state it writes."""
        begin, end = preparing.position, preparing.position + piece.width
        turn = preparing.state.begin(piece.width, planned=preparing.planned)
        ids = mx.array([preparing.tokens[begin:end]], dtype=mx.int32)
        (hidden,) = self.forward.run([Group(ids, turn.caches)])
        draw = None
        if end == len(preparing.tokens):
            logits = self.forward.head(hidden[:, -1:])[:, -1]
            rows = preparing.rows
            if len(rows) > 1:
                logits = mx.repeat(logits, len(rows), axis=0)
            draw = sample(logits, [row.sampler for row in rows])
        written = turn.arrays()
        turn.resolve()
        preparing.position, preparing.planned = end, piece.ends
        return draw, written

    def _guard(self, work: Callable[[], None], emit: Emit) -> None:
        """Do a piece of the decode group's work; if it raises, the group's rows fail and its state is let go."""
        try:
            work()
        except Exception as error:
            self._fail(self._group.discard(), error, emit)

    def _fail(self, keys: Sequence[Key], error: Exception, emit: Emit) -> None:
        failure = classify(error)
        if failure is error:
            # An exception that was raised holds the frames it passed, and their arrays: what leaves is a fresh one.
            failure = ServeError(failure.code, failure.message, **failure.data)
        else:
            log.error("the forward of rows %s failed: %s", list(keys), outline(error))
        emit([Failed(key, failure) for key in keys])


def _nobody(events: Sequence[Event]) -> None:
    """Nobody is told."""


def _resumable(row: Row) -> bool:
    """Whether a row's state is kept while it is generated, and has changed since."""
    return row.request.caching.checkpoints and row.drawn > row.kept
