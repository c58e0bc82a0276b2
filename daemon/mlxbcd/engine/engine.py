"""Owns the loop: decide (pure), run (device), deliver. One engine serves one loaded model.

The loop holds no timer and makes no pass when there is nothing to do: a submitted request wakes it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, cast

from mlxbcd.device import Device
from mlxbcd.engine.cohorts import Cohorts, Part
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.entry import Entry, Held, Listener
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.engine.runner import Leaving, MixedCost, Report, Runner
from mlxbcd.engine.scheduler import Iteration, Policy, Running, State, Waiting, decide
from mlxbcd.engine.spans import trace
from mlxbcd.errors import ServeError, outline
from mlxbcd.methods.events import Drawn, Event, Failed, Prefilled, Speculated, owner, row_key
from mlxbcd.plan.request import Priority, Request
from mlxbcd.state.geometry import Key
from mlxbcd.trace import Tracer

log = logging.getLogger(__name__)

_ALLOWANCE: Final = 1.2
"""Times the decode gap that a forward may take which is run to learn from; it is a rare one."""
_MOST_CHARGED_S: Final = 1.0
_MOST_CHARGED_PIECES: Final = 4.0
"""What an iteration's forwards of one kind are charged at most, in seconds or in pieces' time, whichever is more: what
takes longer was a process that was stopped, or swapped out, and its client would wait for as long again."""


class Activity(Enum):
    """What an engine does, for those who must not get in its way."""

    IDLE = "idle"
    BUSY = "busy"
    INTERACTIVE = "interactive"
    """Somebody watches what it does."""


@dataclass(frozen=True, slots=True)
class _Bill:
    """Who an iteration's time is for: the clients of its pieces, by their tokens, and those of the rows that decode."""

    pieces: dict[str, int]
    rows: dict[str, int]


class Engine:
    """Interleaves prefill and decode of many requests over one runner.

    Args:
        device: where the runner's calls run.
        runner: the device side.
        policy: the scheduler's settings.
        on_fault: told once when the device can't be trusted any more; every request has failed by then.
        costs: what an earlier engine has learnt about this model on this machine.
        packing: where it has found packed forwards to pay; None where there can't be any.
        cohorts: what it has found forwards of several prompts to cost.
        shed: asked to let go of this many bytes that no row needs, before a request has to wait for them.
        tracer: told what it does, under this `name`.

    Attributes:
        active: told whenever what it does changes.
        costs: what the scheduler has learnt about this machine.
        packing: where a decode step and a piece run as one forward; None where they can't.
        cohorts: where pieces of several rows do, if they can.
        report: the newest iteration's.
        last_active: when it ended, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        device: Device,
        runner: Runner,
        policy: Policy,
        on_fault: Callable[[DeviceFault], None],
        *,
        costs: Costs | None = None,
        packing: PackingRanges | None = None,
        cohorts: Cohorts | None = None,
        shed: Callable[[int], None] = lambda wanted: None,
        tracer: Tracer | None = None,
        name: str = "",
    ) -> None:
        self.costs = costs or Costs()
        self.packing = packing
        self.cohorts = cohorts or Cohorts()
        self.report = Report()
        self.last_active = time.monotonic()
        self._policy = policy
        self._device = device
        self._runner: Runner | None = runner
        self._on_fault = on_fault
        self._shed = shed
        self.active: Callable[[Activity], None] = lambda activity: None
        self._activity = Activity.IDLE
        self._tracer = tracer or Tracer()
        self._track = f"device: {name}"
        self._entries: dict[int, Entry] = {}
        self._keys = itertools.count(1)
        self._leaving: dict[Key, Leaving] = {}
        self._served: dict[str, float] = {}
        self._pieces = 0
        self._stepped = 0.0
        self._token_bytes = 0.0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inbox: deque[Event] = deque()
        self._armed = False
        self._told_at = 0.0
        self._refusal: ServeError | None = None
        self._task = asyncio.get_running_loop().create_task(self._loop(runner), name="engine")

    def __repr__(self) -> str:
        return f"Engine({list(self._entries.values())})"

    @property
    def policy(self) -> Policy:
        """The scheduler's settings; what is set counts from the next iteration on."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._work.set()

    @property
    def running(self) -> int:
        """Requests that have a state."""
        return sum(entry.started for entry in self._entries.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return sum(not entry.started for entry in self._entries.values())

    @property
    def claimed(self) -> int:
        """Bytes that the states of requests with a place hold, or may come to need."""
        needed = sum(entry.need(self._token_bytes) for entry in self._entries.values() if entry.started)
        return max(self.report.kv_bytes, needed)

    def submit(self, request: Request, listener: Listener, client: str = "", *, held: Held | None = None) -> int:
        """Queue a request; its listener hears the rest. Returns the key to `cancel` it with.

        Args:
            held: a prefix of its prompt to be restored; released once it is, or if this raises.

        Raises:
            ServeError: shutting_down or device_error, the engine has stopped; bad_request or out_of_memory, it could
                never run.
        """
        try:
            return self._submit(request, listener, client, held)
        except ServeError:
            if held is not None:
                held.release()
            raise

    def _submit(self, request: Request, listener: Listener, client: str, held: Held | None) -> int:
        if self._refusal is not None:
            raise ServeError(self._refusal.code, self._refusal.message)
        if request.candidates > self._policy.row_limit(request.priority):
            most = self._policy.row_limit(request.priority)
            raise ServeError("bad_request", f"n is {request.candidates}; this model runs {most} rows at most")
        key = next(self._keys)
        total = len(request.prompt) + len(request.forced)
        alive = set(range(request.candidates))
        position = held.length if held is not None else 0
        entry = Entry(key, request, listener, client, time.monotonic(), total, alive, position, held=held)
        self._check_need(entry)
        # One that comes back has no claim to what it did not use in the meantime.
        present = [self._served.get(other.client, 0.0) for other in self._entries.values()]
        self._served[client] = max(self._served.get(client, 0.0), min(present, default=0.0))
        self._entries[key] = entry
        self._idle.clear()
        self._work.set()
        return key

    def cancel(
        self, key: int, candidate: int | None = None, *, stopped: int | None = None, superseded: bool = False
    ) -> None:
        """Forget a request, or one candidate of it: its listener hears nothing more of that. Idempotent.

        Rows leave at the next boundary.

        Args:
            stopped: the text has ended with so many samples, so its state is kept as if it had ended by itself.
            superseded: one much like it comes, so what has been processed of its prompt is kept.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        gone = set(entry.alive) if candidate is None else entry.alive & {candidate}
        entry.alive -= gone
        if not entry.alive:
            self._forget(entry)
        if entry.started:
            for each in gone:
                row = row_key(key, each)
                self._leaving[row] = Leaving(row, stopped, superseded)
            self._work.set()

    def rehear(self, key: int, listener: Listener) -> None:
        """From now on another listener hears of a request."""
        if (entry := self._entries.get(key)) is not None:
            entry.listener = listener

    async def drain(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()

    async def close(self) -> None:
        """Fail what is left, stop after the running iteration, and let the runner go. Idempotent."""
        self._stop(ServeError("shutting_down", "the model is being unloaded; retry once it is back"))
        self._work.set()
        await asyncio.wait([self._task])
        runner, self._runner = self._runner, None
        if runner is not None:
            await self._device.run(runner.close)

    # -- the loop

    async def _loop(self, runner: Runner) -> None:
        try:
            while self._refusal is None:
                iteration, bill, start = self._decide()
                leave, self._leaving = tuple(self._leaving.values()), {}
                self._tell_activity()
                if iteration.blocked:
                    self._shed(iteration.blocked)
                if iteration.empty and not leave:
                    self._work.clear()
                    await self._work.wait()
                    continue
                began = time.monotonic()
                report = await self._device.run(runner.iterate, iteration, start, leave, self._emit)
                self._see(iteration, bill, report)
                if self._tracer.on:
                    trace(self._tracer, self._track, began, iteration, report)
        except DeviceFault as fault:
            self._fault(fault)
        except Exception as error:
            log.error("the engine's loop failed: %s", outline(error))
            self._fault(DeviceFault(f"the engine's loop failed ({type(error).__name__})"))
        finally:
            self._tell_activity()

    def _decide(self) -> tuple[Iteration, _Bill, list[tuple[Key, Request]]]:
        waiting, running = [], []
        rows_of: dict[str, int] = {}
        for entry in self._entries.values():
            rows, need = len(entry.alive), entry.need(self._token_bytes)
            priority = entry.request.priority
            if entry.prefilled:
                running.append(Running(priority, entry.client, rows, need))
                rows_of[entry.client] = rows_of.get(entry.client, 0) + rows
            else:
                ends = entry.request.boundaries
                at = (entry.position, entry.total, entry.since, entry.started)
                waiting.append(Waiting(entry.key, *at, priority, entry.client, rows, need, ends))
        state = State(tuple(waiting), tuple(running), time.monotonic(), self._stepped, dict(self._served), self._pieces)
        # Until one prompt has ended nobody knows what a row takes, so several at once might take more than there is.
        together = self.packing is not None and self._token_bytes > 0
        iteration = decide(state, self.costs, self._policy, self.cohorts if together else None)
        iteration = self._pack(iteration, sum(rows_of.values()))
        start: list[tuple[Key, Request]] = []
        tokens_of: dict[str, int] = {}
        for piece in iteration.pieces:
            entry = self._entries[cast(int, piece.key)]
            tokens_of[entry.client] = tokens_of.get(entry.client, 0) + piece.width
            if not entry.started:
                entry.started = True
                start.append((entry.key, entry.request))
        return iteration, _Bill(tokens_of, rows_of), start

    def _pack(self, iteration: Iteration, rows: int) -> Iteration:
        """The iteration with its forwards as one, where that pays or is to be found out."""
        piece = iteration.piece
        if self.packing is None or piece is None or not iteration.decode or not rows:
            return iteration
        parts = [(piece.width, piece.begin or 0) for piece in iteration.pieces]
        tokens = sum(width for width, _ in parts)
        expected = self._expected(rows, parts)
        budget = _ALLOWANCE * iteration.gap_s
        return replace(iteration, packed=self.packing.choose(rows, rows + tokens, expected, budget))

    def _expected(self, rows: int, parts: Sequence[Part]) -> float:
        """Seconds expected of a decode step and then the pieces; 0 where nothing is known."""
        known = self.costs.step_s and self.costs.widest
        return self.costs.step(rows) + self.cohorts.expected(parts, self.costs) if known else 0.0

    def _see(self, iteration: Iteration, bill: _Bill, report: Report) -> None:
        """Take in what an iteration cost. All its events are here: it sent them before it returned."""
        piece = report.piece
        self._charge(bill, report)
        self._deliver()
        self.report = report
        self.last_active = time.monotonic()
        if iteration.decode:
            self._stepped = self.last_active
        for rows, seconds in report.steps:
            self.costs.saw_step(rows, seconds)
        mixed = report.mixed
        if mixed is not None and mixed.comparable and self.packing is not None:
            expected, total = self._expected(mixed.rows, mixed.piece.rows), mixed.rows + mixed.piece.width
            self.packing.saw(mixed.rows, total, mixed.seconds, expected, packed=mixed.packed)
        if piece is not None:
            self.cohorts.saw(piece.rows, piece.seconds, self.costs)
            if not piece.parts:
                self.costs.saw_piece(piece.width, piece.context, piece.seconds)
        if piece is not None or (mixed is not None and mixed.packed):
            self._pieces += 1
        if report.token_bytes > self._token_bytes:
            self._token_bytes = report.token_bytes
            for entry in [entry for entry in self._entries.values() if not entry.started]:
                self._recheck(entry)

    def _tell_activity(self) -> None:
        started = [entry.request.priority for entry in self._entries.values() if entry.started]
        interactive = Priority.INTERACTIVE in started
        activity = Activity.INTERACTIVE if interactive else Activity.BUSY if started else Activity.IDLE
        if activity is not self._activity:
            self._activity = activity
            self.active(activity)

    def _charge(self, bill: _Bill, report: Report) -> None:
        """Put the device's time on the accounts of those it was spent for."""
        seconds = sum(s for _, s in report.steps) + sum(one.seconds for one in report.rounds)
        rows = sum(bill.rows.values())
        prefill = report.piece.seconds if report.piece is not None else 0.0
        if report.mixed is not None and report.mixed.packed:
            own = self._step_share(report.mixed) if rows else 0.0
            prefill += (1 - own) * report.mixed.seconds
            seconds += own * report.mixed.seconds
        most = max(_MOST_CHARGED_S, _MOST_CHARGED_PIECES * self._policy.max_piece_s)
        seconds, prefill = min(seconds, most), min(prefill, most)
        for client, tokens in bill.pieces.items():
            self._pay(client, prefill * tokens / sum(bill.pieces.values()))
        for client, count in bill.rows.items():
            self._pay(client, seconds * count / rows)

    def _step_share(self, mixed: MixedCost) -> float:
        """The part of a packed forward's time that is the decode step's, by what the two are expected to take apart."""
        expected = self._expected(mixed.rows, mixed.piece.rows)
        return self.costs.step(mixed.rows) / expected if expected else mixed.rows / (mixed.rows + mixed.piece.width)

    def _pay(self, client: str, seconds: float) -> None:
        self._served[client] = self._served.get(client, 0.0) + seconds

    def _check_need(self, entry: Entry) -> None:
        """Refuse what would not fit even alone.

        Raises:
            ServeError: out_of_memory.
        """
        policy, need = self._policy, entry.need(self._token_bytes)
        limit = policy.bytes_limit if policy.bytes_most is None else policy.bytes_most
        if limit is not None and need > limit:
            raise ServeError(
                "out_of_memory",
                f"this request may need {need / 1e6:.0f} MB for its state where {limit / 1e6:.0f} MB are allowed; "
                "lower max_tokens or shorten the prompt",
                need=need,
                limit=limit,
            )

    def _recheck(self, entry: Entry) -> None:
        try:
            self._check_need(entry)
        except ServeError as error:
            self._forget(entry)
            entry.fail(error)

    # -- what the device tells

    def _emit(self, events: Sequence[Event]) -> None:
        """On the device thread: pass events on, with one wake-up of the loop however many come before it wakes."""
        self._inbox.extend(events)
        if not self._armed:
            self._armed = True
            self._told_at = time.monotonic()
            self._device.tell(self._deliver)

    def _deliver(self) -> None:
        events, self._armed = len(self._inbox), False
        if events:
            self._tracer.span("deliver", self._track, self._told_at, events=events)
        while self._inbox:
            event = self._inbox.popleft()
            entry = self._entries.get(cast(int, owner(event.key)[0]))
            if entry is None:
                continue
            try:
                self._tell(entry, event)
            except Exception as error:
                log.error("the listener of %r failed: %s", entry, outline(error))
                self.cancel(entry.key)
                if not isinstance(event, Failed):
                    entry.fail(ServeError("internal", "the daemon failed at this request; its log says where"))

    def _tell(self, entry: Entry, event: Event) -> None:
        match event:
            case Prefilled(position=position):
                entry.release()
                entry.position = position
                entry.listener.prefilled(position, entry.total)
            case Drawn(sample=sample, ended=reason):
                entry.prefilled = True
                candidate = owner(event.key)[1]
                if candidate not in entry.alive:
                    return
                entry.listener.sampled(sample, eos=reason == "stop", candidate=candidate)
                # A listener that has cancelled knows its end.
                if reason is not None and candidate in entry.alive:
                    entry.alive.discard(candidate)
                    if not entry.alive:
                        self._forget(entry)
                    entry.listener.ended(reason, candidate)
            case Speculated(statistics=statistics):
                if (candidate := owner(event.key)[1]) in entry.alive:
                    entry.listener.speculated(statistics, candidate)
            case Failed(error=error):
                # Its other candidates have nobody to draw for.
                self.cancel(entry.key)
                entry.listener.failed(error)

    # -- how requests, and the engine, end

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.key, None)
        entry.release()
        if not self._entries:
            # Nobody is left to be fair to.
            self._served.clear()
            self._idle.set()

    def _fault(self, fault: DeviceFault) -> None:
        self._stop(ServeError("device_error", f"the device failed ({fault}); the daemon restarts, retry then"))
        self._on_fault(fault)

    def _stop(self, refusal: ServeError) -> None:
        """Take no more requests, and fail those there are."""
        if self._refusal is None:
            self._refusal = refusal
        while self._entries:
            entry = next(iter(self._entries.values()))
            self._forget(entry)
            entry.fail(refusal)
