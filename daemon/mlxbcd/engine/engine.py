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
from dataclasses import dataclass
from typing import Protocol

from mlxbcd.device import Device
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.runner import Report, Runner
from mlxbcd.engine.scheduler import Iteration, Policy, State, Waiting, decide
from mlxbcd.errors import ServeError, outline
from mlxbcd.methods.events import Drawn, End, Event, Failed, Prefilled
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Sample
from mlxbcd.state.geometry import Key

log = logging.getLogger(__name__)


class Listener(Protocol):
    """What the owner of a request hears, on the loop's thread. Exactly one of the last two ends it.

    One that raises is told `failed` whatever it has heard, and nothing more.
    """

    def prefilled(self, position: int, total: int) -> None:
        """Prompt tokens processed so far; 0 when the row begins."""
        ...

    def sampled(self, sample: Sample, *, eos: bool) -> None:
        """A token was drawn. With `eos` it ends the row and has no text."""
        ...

    def ended(self, reason: End) -> None:
        """The row has drawn its last token."""
        ...

    def failed(self, error: ServeError) -> None:
        """The row is gone."""
        ...


@dataclass(slots=True)
class Entry:
    """A submitted request on the loop's side.

    Attributes:
        since: when it was submitted, in seconds of the monotonic clock.
        total: prompt tokens, forced ones included.
        position: how many of them have been processed.
        started: it has, or is about to get, a state on the device.
        prefilled: its first token is out.
    """

    key: Key
    request: Request
    listener: Listener
    since: float
    total: int
    position: int = 0
    started: bool = False
    prefilled: bool = False

    def __repr__(self) -> str:
        phase = "decoding" if self.prefilled else f"{self.position}/{self.total}" if self.started else "queued"
        return f"Entry({self.key}, {phase})"


class Engine:
    """Interleaves prefill and decode of many requests over one runner.

    Args:
        device: where the runner's calls run.
        runner: the device side.
        policy: the scheduler's settings.
        on_fault: told once when the device can't be trusted any more; every request has failed by then.

    Attributes:
        costs: what the scheduler has learnt about this machine.
        report: the newest iteration's.
        last_active: when it ended, in seconds of the monotonic clock.
    """

    def __init__(self, device: Device, runner: Runner, policy: Policy, on_fault: Callable[[DeviceFault], None]) -> None:
        self.policy = policy
        self.costs = Costs()
        self.report = Report()
        self.last_active = time.monotonic()
        self._device = device
        self._runner: Runner | None = runner
        self._on_fault = on_fault
        self._entries: dict[Key, Entry] = {}
        self._keys = itertools.count(1)
        self._leaving: set[Key] = set()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inbox: deque[Event] = deque()
        self._armed = False
        self._refusal: ServeError | None = None
        self._task = asyncio.get_running_loop().create_task(self._loop(runner), name="engine")

    def __repr__(self) -> str:
        return f"Engine({list(self._entries.values())})"

    @property
    def running(self) -> int:
        """Requests that have a state."""
        return sum(entry.started for entry in self._entries.values())

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return sum(not entry.started for entry in self._entries.values())

    def submit(self, request: Request, listener: Listener) -> Key:
        """Queue a request; its listener hears the rest. Returns the key to `cancel` it with.

        Raises:
            ServeError: shutting_down or device_error, the engine has stopped.
        """
        if self._refusal is not None:
            raise ServeError(self._refusal.code, self._refusal.message)
        key = next(self._keys)
        total = len(request.prompt) + len(request.forced)
        self._entries[key] = Entry(key, request, listener, time.monotonic(), total)
        self._idle.clear()
        self._work.set()
        return key

    def cancel(self, key: Key) -> None:
        """Forget a request: its listener hears nothing more, its row leaves at the next boundary. Idempotent."""
        entry = self._entries.get(key)
        if entry is None:
            return
        self._forget(entry)
        if entry.started:
            self._leaving.add(key)
            self._work.set()

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
                iteration, start = self._decide()
                leave, self._leaving = tuple(self._leaving), set()
                if iteration.empty and not leave:
                    self._work.clear()
                    await self._work.wait()
                    continue
                self._see(await self._device.run(runner.iterate, iteration, start, leave, self._emit))
        except DeviceFault as fault:
            self._fault(fault)
        except Exception as error:
            log.error("the engine's loop failed: %s", outline(error))
            self._fault(DeviceFault(f"the engine's loop failed ({type(error).__name__})"))

    def _decide(self) -> tuple[Iteration, list[tuple[Key, Request]]]:
        waiting = tuple(
            Waiting(entry.key, entry.position, entry.total, entry.since, entry.started)
            for entry in self._entries.values()
            if not entry.prefilled
        )
        iteration = decide(State(waiting, len(self.report.running), time.monotonic()), self.costs, self.policy)
        start: list[tuple[Key, Request]] = []
        if iteration.piece is not None:
            entry = self._entries[iteration.piece.key]
            if not entry.started:
                entry.started = True
                start.append((entry.key, entry.request))
        return iteration, start

    def _see(self, report: Report) -> None:
        """Take in what an iteration cost. All its events are here: it sent them before it returned."""
        self._deliver()
        self.report = report
        self.last_active = time.monotonic()
        for rows, seconds in report.steps:
            self.costs.saw_step(rows, seconds)
        if report.piece is not None:
            self.costs.saw_piece(report.piece.width, report.piece.context, report.piece.seconds)

    # -- what the device tells

    def _emit(self, events: Sequence[Event]) -> None:
        """On the device thread: pass events on, with one wake-up of the loop however many come before it wakes."""
        self._inbox.extend(events)
        if not self._armed:
            self._armed = True
            self._device.tell(self._deliver)

    def _deliver(self) -> None:
        self._armed = False
        while self._inbox:
            event = self._inbox.popleft()
            entry = self._entries.get(event.key)
            if entry is None:
                continue
            try:
                self._tell(entry, event)
            except Exception as error:
                log.error("the listener of %r failed: %s", entry, outline(error))
                self.cancel(entry.key)
                if not isinstance(event, Failed):
                    _fail(entry, ServeError("internal", "the daemon failed at this request; its log says where"))

    def _tell(self, entry: Entry, event: Event) -> None:
        match event:
            case Prefilled(position=position):
                entry.position = position
                entry.listener.prefilled(position, entry.total)
            case Drawn(sample=sample, ended=reason):
                entry.prefilled = True
                entry.listener.sampled(sample, eos=reason == "stop")
                # A listener that has cancelled knows its end.
                if reason is not None and entry.key in self._entries:
                    self._forget(entry)
                    entry.listener.ended(reason)
            case Failed(error=error):
                self._forget(entry)
                entry.listener.failed(error)

    # -- how requests, and the engine, end

    def _forget(self, entry: Entry) -> None:
        self._entries.pop(entry.key, None)
        if not self._entries:
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
            _fail(entry, refusal)


def _fail(entry: Entry, error: ServeError) -> None:
    try:
        entry.listener.failed(error)
    except Exception as fault:
        log.error("the listener of %r failed: %s", entry, outline(fault))
