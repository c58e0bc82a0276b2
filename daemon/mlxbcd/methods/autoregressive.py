"""Owns plain decoding of a group of rows: one token per row and step, the next step built before the last is read.

Step n + 1 takes step n's samples from the device, so its graph can be built, and submitted, before the host has seen
them. Two modes share the loop: *run ahead* submits n + 1 while n runs; *build ahead* only builds it and submits once n
is done. Either way only the sampled tokens are submitted: naming a state array there would keep it alive past its
next write and turn that write into a copy of the whole buffer.

A row whose constraint depends on the token in flight can't be drawn unread. A step with such a row is built, and its
forward submitted, as ever, and only its draw waits until the host has read the last one.

What is in flight is tentative: a row that ends drops its sample, and whenever membership or order changes the flight is
read first, so the next step starts from tokens known to the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

import mlx.core as mx

from mlxbcd.errors import ServeError
from mlxbcd.methods.events import Drawn, Emit, End, Event, Failed, Round
from mlxbcd.methods.step import EagerSteps, StepBuilder
from mlxbcd.model.forward import Forward
from mlxbcd.model.taps import Taps
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Draw, RowSampler, Sample, Samplers
from mlxbcd.spec.drafter import Companion
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, Rows, commit


class Ahead(Enum):
    """How far the next step gets before the last one is read."""

    RUN = "run"
    BUILD = "build"


@dataclass(slots=True)
class Row:
    """A row's device side.

    Attributes:
        sampler: draws its tokens; its index counts draws made, those in flight included.
        pending: newest sample read, the input of its next forward.
        drawn: samples read so far, forced tokens included.
        tokens: those samples, without the forced ones.
        ended: it draws no more.
        failed: it ended with an error.
        poisoned: its logits held NaN or Inf, so its slot must be cleaned when it leaves.
        kept: samples read when its state was last kept.
    """

    key: Key
    request: Request
    sampler: RowSampler
    pending: int = -1
    drawn: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    failed: bool = False
    poisoned: bool = False
    kept: int = 0

    @property
    def sequence(self) -> list[int]:
        """All its tokens, from the prompt on. Its state covers the first ones; not the last, as long as it runs."""
        return [*self.request.prompt, *self.request.forced, *self.tokens]

    def stop(self, drawn: int) -> None:
        """It ends with the first `drawn` of its samples, forced ones included: what came after is nobody's."""
        del self.tokens[max(drawn - len(self.request.forced), 0) :]
        self.ended = True

    def take(self, sample: Sample) -> Event:
        """Read a sample, and tell by the precedence of one token whether the row ends with it."""
        self.drawn += 1
        self.pending = sample.token
        self.tokens.append(sample.token)
        if not sample.finite:
            self.ended = self.failed = self.poisoned = True
            message = "the model's output for this request held NaN or infinity, so it was ended; retry it"
            return Failed(self.key, ServeError("device_error", message))
        end: End | None = None
        constraint = self.sampler.constraint
        if sample.token in self.request.eos:
            end = "stop"
        elif constraint is not None:
            constraint.accept(sample.token)
            end = "complete" if constraint.complete else None
        if constraint is not None and constraint.fault:
            self.ended = self.failed = True
            message = f"the grammar can't be followed any further ({constraint.fault}); simplify it"
            return Failed(self.key, ServeError("grammar_invalid", message))
        if end is None and self.drawn >= self.request.max_tokens:
            end = "length"
        self.ended = end is not None
        return Drawn(self.key, sample, end)

    @property
    def exhausted(self) -> bool:
        """Every token it may draw has been drawn, though perhaps not read."""
        return self.ended or self.sampler.index >= self.request.max_tokens


@dataclass(slots=True)
class Flight:
    """A step whose samples are not read yet.

    Attributes:
        begun_at: when the device was given its forward, if that was before its draw.
        submitted_at: when the device was given the first of it; None while it is only a graph.
        timed: its time has been taken.
        shared: its forward was another group's too, so its time says nothing about a step.
        read: the rows have taken their samples.
        hidden: the rows' hidden states, [B, 1, D], where somebody reads them; see `Tapped.read`.
        guesses: what a drafter thinks that rows draw in it, to be compared and no more.
    """

    rows: tuple[Row, ...]
    draw: Draw
    begun_at: float | None = None
    submitted_at: float | None = None
    timed: bool = False
    shared: bool = False
    read: bool = False
    hidden: mx.array | None = None
    guesses: Mapping[Key, int] = field(default_factory=dict)

    def submit(self) -> None:
        """Start computing, unless that has been done."""
        if self.submitted_at is None:
            self.submitted_at = self.begun_at or time.perf_counter()
            mx.async_eval(*self.draw.arrays)  # type: ignore[no-untyped-call]


class DecodeGroup:
    """Rows that decode together.

    If a method raises, what is in flight is lost: `discard` the group's rows then, unless the method says otherwise.

    Args:
        forward: the model.
        state: an empty collection, or None for a model whose rows run alone (then `adopt` brings the state).
        steps: builds the steps; eagerly by default.
        ended: told of each row that has ended without an error, with the state that it is still in.
    """

    def __init__(
        self,
        forward: Forward,
        state: Rows | None,
        ahead: Ahead,
        steps: StepBuilder | None = None,
        ended: Callable[[Row, Rows], None] = lambda row, state: None,
    ) -> None:
        self._steps: StepBuilder = steps or EagerSteps(forward)
        self._ended = ended
        self._samplers: Samplers | None = None
        self._state: Rows | AloneRow | None = state
        self._ahead = ahead
        self._rows: dict[Key, Row] = {}
        self._flight: Flight | None = None
        self._timings: list[tuple[int, float]] = []
        self._rounds: list[Round] = []
        self._free_at = 0.0

    def __repr__(self) -> str:
        return f"DecodeGroup({list(self._rows)}, {'in flight' if self._flight else 'settled'})"

    def __len__(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        """Drop everything. Whoever was told of rows holds this group, and must not be held by it."""
        self.discard()
        self._ended = lambda row, state: None

    @property
    def keys(self) -> list[Key]:
        return list(self._rows)

    @property
    def flying(self) -> int:
        """Rows of the step that the device may be at; 0 if nothing of the group runs."""
        return len(self._flight.rows) if self._flight is not None and not self._flight.timed else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the group's state."""
        return self._state.nbytes if self._state is not None else 0

    @property
    def taps(self) -> Taps | None:
        """How to get the hidden states at the end of a row's prompt, if `join` wants them."""
        return None

    def join(self, row: Row, joiner: Joiner, *, companion: Companion | None = None) -> None:
        """Take in a row whose prompt is processed and whose first sample is its pending token. Settle before.

        A failure leaves the running rows as they were.

        Args:
            companion: what the group's drafter starts from, if it has one.
        """
        assert isinstance(self._state, Rows)
        assert self._flight is None
        commit(self._state.prepare(join=[joiner]))
        self._rows[row.key] = row

    def adopt(self, row: Row, state: AloneRow) -> None:
        """Take over a row that runs alone, with its state."""
        assert not self._rows, "a row that runs alone can't join others"
        self._state = state
        self._rows[row.key] = row

    def leave(self, keys: Iterable[Key], emit: Emit, stopped: Mapping[Key, int] = MappingProxyType({})) -> None:
        """Drop rows between steps. Unknown keys are ignored.

        Args:
            stopped: rows that end with so many of their samples, found out elsewhere.
        """
        leaving = [key for key in keys if key in self._rows]
        if leaving:
            for key in leaving:
                if key in stopped and not self._rows[key].ended:
                    self._rows[key].stop(stopped[key])
            self.settle(emit)
            # One that ended with the step just read has gone already.
            self._drop([key for key in leaving if key in self._rows])

    def settle(self, emit: Emit) -> None:
        """Read what is in flight, then drop the rows that have ended: nothing of the group runs any more."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._deliver(flight, emit)
        self._drop([key for key, row in self._rows.items() if row.ended])

    def step(self, emit: Emit, shared: StepBuilder | None = None, *, within: float = math.inf) -> None:
        """One decode step: build the next one, then read the one in flight (see `Ahead`).

        Args:
            shared: builds this step, if there is one to build, in a forward that it shares with another group.
            within: seconds that whatever a group makes instead of a plain step may take.
        """
        if any(row.exhausted for row in self._rows.values()) or self._unsettled():
            self.settle(emit)
        if not self._rows:
            return
        last, self._flight = self._flight, None
        ahead = self._build(last, emit, shared or self._steps)
        ahead.shared = shared is not None
        if last is None or self._ahead is Ahead.RUN:
            ahead.submit()
        if last is not None:
            self._deliver(last, emit)
            if all(row.ended for row in ahead.rows) and ahead.submitted_at is None:
                # Nobody wants what was built ahead.
                self._drop([row.key for row in ahead.rows])
                return
        ahead.submit()
        self._flight = ahead

    def keep(self, emit: Emit, due: Callable[[Row], bool], keep: Callable[[Row, Rows], None]) -> None:
        """Settle, and show the rows that are due, with their state, to who keeps it."""
        self.settle(emit)
        if isinstance(self._state, Rows):
            for row in self._rows.values():
                if due(row):
                    row.kept = row.drawn
                    keep(row, self._state)

    def wait(self) -> None:
        """Wait until what is in flight has been computed, so that whatever comes next has the device to itself."""
        if self._flight is not None:
            self._time(self._flight)

    def timings(self) -> list[tuple[int, float]]:
        """(rows, seconds) of each step of one token per row that was computed since the last call."""
        timings, self._timings = self._timings, []
        return timings

    def rounds(self) -> list[Round]:
        """Wider forwards since the last call, which say nothing about what a step costs."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def discard(self) -> list[Key]:
        """Let all rows and their state go without reading anything; the keys they had."""
        keys = list(self._rows)
        self._flight = None
        self._samplers = None
        self._rows.clear()
        self._state = self._state.successor() if isinstance(self._state, Rows) else None
        return keys

    def _unsettled(self) -> bool:
        return self._state is not None and self._state.unsettled(1)

    def _build(self, last: Flight | None, emit: Emit, steps: StepBuilder) -> Flight:
        state = self._state
        assert state is not None
        turn = state.begin(1)
        rows = tuple(self._rows[key] for key in state.order)
        samplers = self._sampling(rows)
        if last is None:
            ids = mx.array([row.pending for row in rows], dtype=mx.int32)
        else:
            ids = last.draw.tokens
        if last is None or not samplers.wait:
            draw = steps.build(turn, ids, samplers)
            turn.resolve()
            return Flight(rows, draw)
        logits = steps.logits(turn, ids)
        turn.resolve()
        begun = self._begin(logits) if self._ahead is Ahead.RUN else None
        self._deliver(last, emit)
        if begun is None and not all(row.ended for row in rows):
            begun = self._begin(logits)
        # The device is at the forward while the host computes what may be drawn.
        return Flight(rows, samplers.draw(logits), begun_at=begun)

    @staticmethod
    def _begin(logits: mx.array) -> float:
        """Start computing a forward whose draw isn't built yet; when that was."""
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        return time.perf_counter()

    def _sampling(self, rows: tuple[Row, ...]) -> Samplers:
        """The rows' samplers in batch order; the same object for as long as rows and order stay."""
        wanted = tuple(row.sampler for row in rows)
        if self._samplers is None or self._samplers.rows != wanted:
            self._samplers = Samplers(wanted)
        return self._samplers

    def _deliver(self, flight: Flight, emit: Emit) -> None:
        """Let the rows take a step's samples, unless they have."""
        if flight.read:
            return
        flight.read = True
        self._time(flight)
        # A row that ended with the step before this one draws no more.
        events = [row.take(drawn) for row, drawn in zip(flight.rows, flight.draw.read(), strict=True) if not row.ended]
        if events:
            emit(events)

    def _time(self, flight: Flight) -> None:
        """Take a step's time: since it was submitted, or since the work before it was done."""
        if flight.timed:
            return
        assert flight.submitted_at is not None
        mx.eval(*flight.draw.arrays)
        now = time.perf_counter()
        if not flight.shared:
            self._timings.append((len(flight.rows), now - max(flight.submitted_at, self._free_at)))
        self._free_at = now
        flight.timed = True

    def _drop(self, keys: list[Key]) -> None:
        if not keys:
            return
        for key in keys:
            row = self._rows.pop(key)
            if not isinstance(self._state, Rows):
                continue
            if row.ended and not row.failed:
                self._ended(row, self._state)
            if row.poisoned:
                self._state.scrub(key)
        self._samplers = None
        if isinstance(self._state, Rows):
            self._keep(self._state)
        elif not self._rows:
            self._state = None

    def _keep(self, state: Rows) -> None:
        """Let the states go of all rows but those that are left."""
        commit(state.prepare(keep=self._rows))
