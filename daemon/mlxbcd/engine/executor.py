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
from mlxbcd.engine.runner import Leaving, MixedCost, PieceCost, Report
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.errors import ServeError, outline
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.events import Emit, Event, Failed, Prefilled, owner, row_key
from mlxbcd.methods.packed import PackedStep
from mlxbcd.methods.speculative import WIDEST, SpeculativeGroup
from mlxbcd.methods.step import RoundBuilder, StepBuilder
from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.packed import Packer
from mlxbcd.model.taps import Tapped
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Draw, RowSampler, Sample, sample
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import MOST_DRAFTED, Depth, lasting_priors
from mlxbcd.spec.drafter import READ_OF_PROMPT, Companion, Drafter
from mlxbcd.state.alone import AloneRow, AloneTurn
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key, capacity_for
from mlxbcd.state.rows import Joiner, Rows, Turn

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
        hidden: hidden states of its last tokens, [1, n, D], for a drafter that reads them; see `Tapped.read`.
        settled: the last planned end.
    """

    key: Key
    rows: list[Row]
    tokens: tuple[int, ...]
    state: Rows | AloneRow
    position: int = 0
    planned: bool = True
    hidden: mx.array | None = None
    settled: int = 0

    @property
    def request(self) -> Request:
        return self.rows[0].request

    def __repr__(self) -> str:
        return f"Preparing({self.key}: {self.position}/{len(self.tokens)})"


@dataclass(slots=True)
class Offered:
    """The forward that a piece makes, before it runs."""

    preparing: Preparing
    piece: Piece
    turn: Turn | AloneTurn
    group: Group


@dataclass(frozen=True, slots=True)
class _Advance:
    """A piece whose graph is built.

    Attributes:
        draw: the first sample of each candidate, if the piece ends the prompt.
        written: the arrays of state that it writes.
    """

    preparing: Preparing
    piece: Piece
    draw: Draw | None
    written: list[mx.array]


@dataclass(slots=True)
class Executor:
    """Runs iterations of one loaded model. Every method is for the device thread.

    Attributes:
        vocab_size: width of the model's logits.
        steps: builds decode steps; eagerly if there is nothing.
        rounds: builds the forwards of rounds; eagerly if there is nothing.
        reuse: what rows take from the prefix cache and leave in it.
        verify: what windows of proposals cost; None decodes without any.
        drafter: proposes besides prompt lookup; needs `verify`. `Untappable` is raised if it reads what the model
            doesn't show.
        packer: runs a decode step and a piece as one forward; None where that can't be done.
    """

    forward: Forward
    composition: Composition
    vocab_size: int
    ahead: Ahead
    steps: StepBuilder | None = None
    rounds: RoundBuilder | None = None
    reuse: Reuse = field(default_factory=Reuse)
    verify: VerifyCosts | None = None
    drafter: Drafter | None = None
    packer: Packer | None = None
    _group: DecodeGroup = field(init=False)
    _preparing: dict[Key, Preparing] = field(default_factory=dict, init=False)
    _ready: dict[Key, Preparing] = field(default_factory=dict, init=False)
    _steps: int = field(default=0, init=False)
    _token_bytes: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.verify is not None:
            state = Rows(self.composition, widest=WIDEST)
            how = (self.forward, state, self.ahead, self.steps, self._left)
            depth = None
            if self.drafter is not None:
                depth = Depth(MOST_DRAFTED, self.verify, lasting_priors(), self.drafter.seconds)
            self._group = SpeculativeGroup(
                *how, costs=self.verify, rounds=self.rounds, drafter=self.drafter, depth=depth
            )
        else:
            # Decode steps are one token wide, so a sliding window needs no room beyond itself.
            rows = Rows(self.composition, widest=1) if self.composition.batches else None
            self._group = DecodeGroup(self.forward, rows, self.ahead, self.steps, self._left)

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
        comparable, began = not self._group.flying, time.perf_counter()
        rows, packed, piece = self._forwards(iteration, emit)
        mixed = None
        if piece is not None and rows and (packed or comparable):
            seconds = time.perf_counter() - began
            mixed = MixedCost(rows, piece, seconds, packed, comparable)
        preparing = (*self._preparing.values(), *self._ready.values())
        return Report(
            steps=tuple(self._group.timings()),
            rounds=tuple(self._group.rounds()),
            piece=None if packed else piece,
            mixed=mixed,
            running=(*self._group.keys, *(row.key for ready in self._ready.values() for row in ready.rows)),
            kv_bytes=self._group.nbytes + sum(each.state.nbytes for each in preparing),
            token_bytes=self._token_bytes,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def close(self) -> None:
        """See `Runner.close`."""
        self._guard(lambda: self._group.keep(_nobody, _resumable, self._left), _nobody)
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
                        joiner = Joiner(row.key, preparing.state.read(key), length + 1)
                        self._group.join(row, joiner, companion=self._companion(row, preparing))
                except Exception as error:
                    self._fail([row.key], error, emit)
        self._ready.clear()

    def _companion(self, row: Row, preparing: Preparing) -> Companion | None:
        """What the drafter starts from for a row that joins."""
        return None if self.drafter is None else self.reuse.companion(row, self.drafter, preparing.hidden)

    def _left(self, row: Row, rows: Rows) -> None:
        """See `Reuse.left`."""
        self.reuse.left(row, rows, self.drafter)

    def _forwards(self, iteration: Iteration, emit: Emit) -> tuple[int, bool, PieceCost | None]:
        """Run the iteration's decode step and pieces, as one forward if it says so and both make one.

        Returns:
            rows of the step, 0 if there was none or it was more than a step; whether it was one forward; and the
            pieces.
        """
        offers: list[Offered] = []
        step = failure = None
        if iteration.decode and iteration.packed and self.packer is not None:
            offers = self._offers(iteration, emit)
            if offers:
                step = PackedStep(self.forward, self.packer, [offered.group for offered in offers])
        if iteration.decode:
            failure = self._decode(emit, step, iteration.step_s)
        if step is not None and step.failed and failure is not None:
            for offered in offers:
                self._give_up(offered.preparing, failure, emit)
            return 0, False, None
        packed = step is not None and step.rows > 0
        rows = step.rows if step is not None and packed else self._group.flying
        offers = offers or self._offers(iteration, emit)
        return rows, packed, self._prefill(offers, step, emit) if offers else None

    def _decode(self, emit: Emit, step: PackedStep | None, within: float) -> ServeError | None:
        """A decode step; why it failed, if it did."""
        failure = self._guard(lambda: self._group.step(emit, step, within=within), emit)
        self._steps += 1
        if self._steps % _CLEAR_EVERY_STEPS == 0:
            self._guard(lambda: self._group.keep(emit, _resumable, self._left), emit)
            mx.clear_cache()
        return failure

    def _keep(self, preparing: Preparing, length: int) -> None:
        if isinstance(preparing.state, Rows):
            self.reuse.keep(preparing.key, preparing.request, preparing.tokens, length, preparing.state)

    def _offers(self, iteration: Iteration, emit: Emit) -> list[Offered]:
        """Begin the turns of the iteration's pieces, those left out that make no forward."""
        offers = [self._offer(piece, emit) for piece in iteration.pieces]
        return [offered for offered in offers if offered is not None]

    def _offer(self, piece: Piece, emit: Emit) -> Offered | None:
        """Begin the turn of a piece; None where it makes no forward."""
        preparing = self._preparing.get(piece.key)
        if preparing is None or piece.begin not in (None, preparing.position):
            # The row is gone, or it was restored further than anybody knew, or not as far: the next piece is another.
            return None
        begin = preparing.position
        try:
            turn = preparing.state.begin(piece.width, planned=preparing.planned)
        except Exception as error:
            self._give_up(preparing, error, emit)
            return None
        ids = mx.array([preparing.tokens[begin : begin + piece.width]], dtype=mx.int32)
        return Offered(preparing, piece, turn, Group(ids, turn.caches))

    def _prefill(self, offers: Sequence[Offered], step: PackedStep | None, emit: Emit) -> PieceCost | None:
        """Compute the forward of offered pieces, unless a step has brought it along, and what follows from it."""
        packed = step is not None and step.rows > 0
        parts = tuple((offered.piece.width, offered.preparing.position) for offered in offers)
        advances: list[_Advance] = []
        computing = False
        try:
            for offered, tapped in zip(offers, self._hidden(offers, step), strict=True):
                self._advance(offered, tapped, advances, emit)
            failure = self._guard(self._group.wait, emit)
            if packed and failure is not None:
                for advance in advances:
                    self._give_up(advance.preparing, failure, emit)
                return None
            began = time.perf_counter()
            computing = True
            samples = [advance.draw.read() if advance.draw is not None else [] for advance in advances]
            mx.eval([array for advance in advances for array in advance.written])
            seconds = time.perf_counter() - began
        except Exception as error:
            keys = [offered.preparing.key for offered in offers if offered.preparing.key in self._preparing]
            for key in keys:
                del self._preparing[key]
            if packed and computing:
                # What failed was computed for all.
                keys += self._group.discard()
            self._fail(keys, error, emit)
            return None
        if any(advance.piece.ends for advance in advances):
            # Decode has no use for activations of that size, and whatever was submitted has been computed by now.
            mx.clear_cache()
        for advance, drawn in zip(advances, samples, strict=True):
            self._processed(advance, drawn, emit)
        if not advances:
            return None
        return PieceCost.of(parts, seconds)

    def _hidden(self, offers: Sequence[Offered], step: PackedStep | None) -> list[Tapped]:
        """The hidden states of offered pieces, of a forward that a step has brought along or of their own."""
        hiddens = step.take() if step is not None else None
        taps, groups = self._group.taps, [offered.group for offered in offers]
        if hiddens is None and taps is not None and taps.layers:
            return taps.run(groups)
        if hiddens is None:
            hiddens = (self.packer if self.packer is not None and len(offers) > 1 else self.forward).run(groups)
        return [Tapped(hidden, hidden) for hidden in hiddens]

    def _advance(self, offered: Offered, tapped: Tapped, advances: list[_Advance], emit: Emit) -> None:
        """Build what a piece's graph still lacks beside its forward: the first sample if it ends the prompt. One that
        fails is given up."""
        preparing, piece, turn = offered.preparing, offered.piece, offered.turn
        end = preparing.position + piece.width
        try:
            draw = None
            if end == len(preparing.tokens):
                logits = self.forward.head(tapped.hidden[:, -1:])[:, -1]
                rows = preparing.rows
                if len(rows) > 1:
                    logits = mx.repeat(logits, len(rows), axis=0)
                draw = sample(logits, [row.sampler for row in rows])
            written = turn.arrays()
            turn.resolve()
            if self._group.taps is not None:
                known = [tapped.read] if preparing.hidden is None else [preparing.hidden, tapped.read]
                preparing.hidden = mx.contiguous(mx.concatenate(known, axis=1)[:, -READ_OF_PROMPT:])
                written = [*written, preparing.hidden]
        except Exception as error:
            self._give_up(preparing, error, emit)
            return
        preparing.position, preparing.planned = end, piece.ends
        advances.append(_Advance(preparing, piece, draw, written))

    def _processed(self, advance: _Advance, samples: Sequence[Sample], emit: Emit) -> None:
        """A piece has been computed."""
        preparing, piece = advance.preparing, advance.piece
        request = preparing.request
        if piece.ends:
            preparing.settled = preparing.position
            if preparing.position in request.boundaries:
                self._keep(preparing, preparing.position)
        events: list[Event] = [Prefilled(piece.key, preparing.position)]
        if samples:
            del self._preparing[piece.key]
            drafting = self.drafter.token_bytes if self.drafter is not None else 0.0
            token_bytes = preparing.state.nbytes / capacity_for(len(preparing.tokens)) + drafting
            self._token_bytes = max(self._token_bytes, token_bytes)
            events += [row.take(drawn) for row, drawn in zip(preparing.rows, samples, strict=True)]
            preparing.rows = [row for row in preparing.rows if not row.ended]
            if preparing.rows:
                self._ready[piece.key] = preparing
        emit(events)
        if samples and isinstance(preparing.state, Rows):
            self.reuse.prompt_done(piece.key, request, preparing.tokens, preparing.state)

    def _guard(self, work: Callable[[], None], emit: Emit) -> ServeError | None:
        """Do a piece of the decode group's work; if it raises, the group's rows fail and its state is let go.

        Returns:
            Why they failed, if they did.
        """
        try:
            work()
        except Exception as error:
            return self._fail(self._group.discard(), error, emit)
        return None

    def _give_up(self, preparing: Preparing, error: Exception, emit: Emit) -> ServeError:
        """A row in preparation fails, and its state is let go."""
        self._preparing.pop(preparing.key, None)
        return self._fail([preparing.key], error, emit)

    def _fail(self, keys: Sequence[Key], error: Exception, emit: Emit) -> ServeError:
        failure = classify(error)
        if failure is error:
            # An exception that was raised holds the frames it passed, and their arrays: what leaves is a fresh one.
            failure = ServeError(failure.code, failure.message, **failure.data)
        else:
            log.error("the forward of rows %s failed: %s", list(keys), outline(error))
        emit([Failed(key, failure) for key in keys])
        return failure


def _nobody(events: Sequence[Event]) -> None:
    """Nobody is told."""


def _resumable(row: Row) -> bool:
    """Whether a row's state is kept while it is generated, and has changed since."""
    return row.request.caching.checkpoints and row.drawn > row.kept
