"""A scripted runner on a real device thread, and a listener that keeps what it hears."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from mlxbcd.device import Device
from mlxbcd.engine.engine import Engine
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.engine.runner import Leaving, MixedCost, PieceCost, Report
from mlxbcd.engine.scheduler import Iteration, Policy
from mlxbcd.errors import ServeError
from mlxbcd.methods.events import Drawn, Emit, End, Failed, Prefilled
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Sample
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.geometry import Key

Heard: TypeAlias = tuple[Any, ...]


def make_request(prompt: int = 4, max_tokens: int = 3, first: int = 100, eos: Sequence[int] = ()) -> Request:
    """A request whose fake tokens are `first`, `first` + 1, …"""
    return Request(prompt=(first,) * prompt, max_tokens=max_tokens, eos=frozenset(eos))


@dataclass
class FakeRow:
    request: Request
    position: int = 0
    drawn: int = 0

    def draw(self, key: Key) -> Drawn:
        token = self.request.prompt[0] + self.drawn
        self.drawn += 1
        end: End | None = "length" if self.drawn >= self.request.max_tokens else None
        return Drawn(key, Sample(token, finite=True), "stop" if token in self.request.eos else end)


class FakeRunner:
    """Draws counting tokens. `on_iterate` runs at the start of every iteration and may raise.

    A packed forward takes `packed_s` seconds, a step and a piece take 1 ms each.
    """

    def __init__(self) -> None:
        self.rows: dict[Key, FakeRow] = {}
        self.decoding: set[Key] = set()
        self.failing: dict[Key, ServeError] = {}
        self.restored: dict[Key, int] = {}
        self.iterations: list[Iteration] = []
        self.left: list[Key] = []
        self.threads: set[int] = set()
        self.closed = 0
        self.packed_s = 0.001
        self.token_bytes = 0.0
        self.on_iterate: Callable[[Iteration], None] = lambda iteration: None

    def iterate(
        self, iteration: Iteration, start: Sequence[tuple[Key, Request]], leave: Sequence[Leaving], emit: Emit
    ) -> Report:
        self.threads.add(threading.get_ident())
        self.iterations.append(iteration)
        self.on_iterate(iteration)
        for leaving in leave:
            key = leaving.key
            self.left.append(key)
            self.rows.pop(key, None)
            self.decoding.discard(key)
        for key, request in start:
            assert key not in self.rows
            row = self.rows[key] = FakeRow(request, self.restored.get(key, 0))
            emit([Prefilled(key, row.position)])
        steps: tuple[tuple[int, float], ...] = ()
        if iteration.decode and self.decoding:
            steps = ((len(self.decoding), 0.001),)
            for key in sorted(self.decoding, key=repr):
                self.tell(key, emit)
        cost = mixed = None
        token_bytes = 0.0
        pieces = [piece for piece in iteration.pieces if piece.key in self.rows]
        if pieces:
            cost = PieceCost.of(tuple((piece.width, self.rows[piece.key].position) for piece in pieces), 0.001)
        for piece in pieces:
            row = self.rows[piece.key]
            row.position += piece.width
            emit([Prefilled(piece.key, row.position)])
            if row.position == len(row.request.prompt):
                token_bytes = self.token_bytes
                self.decoding.add(piece.key)
                self.tell(piece.key, emit)
        if steps and cost is not None:
            seconds = self.packed_s if iteration.packed else 0.002
            mixed = MixedCost(steps[0][0], cost, seconds, iteration.packed, comparable=True)
            if iteration.packed:
                steps, cost = (), None
        running = tuple(self.decoding)
        return Report(steps, cost, mixed, running=running, kv_bytes=len(self.rows), token_bytes=token_bytes)

    def tell(self, key: Key, emit: Emit) -> None:
        error = self.failing.pop(key, None)
        event = Failed(key, error) if error is not None else self.rows[key].draw(key)
        if isinstance(event, Failed) or event.ended is not None:
            self.rows.pop(key)
            self.decoding.discard(key)
        emit([event])

    def close(self) -> None:
        self.closed += 1
        self.rows.clear()
        self.decoding.clear()


class Recorder:
    """A listener. `react` is called after each thing heard."""

    def __init__(self, react: Callable[[Heard], None] = lambda heard: None) -> None:
        self.heard: list[Heard] = []
        self.over = asyncio.Event()
        self._react = react

    @property
    def tokens(self) -> list[int]:
        return [heard[1] for heard in self.heard if heard[0] == "sampled"]

    @property
    def ends(self) -> list[Heard]:
        return [heard for heard in self.heard if heard[0] in ("ended", "failed")]

    def prefilled(self, position: int, total: int) -> None:
        self._hear("prefilled", position, total)

    def sampled(self, sample: Sample, *, eos: bool, candidate: int = 0) -> None:
        self._hear("sampled", sample.token, eos)

    def speculated(self, statistics: Statistics, candidate: int = 0) -> None:
        self._hear("speculated", statistics.drafted, statistics.accepted)

    def ended(self, reason: End, candidate: int = 0) -> None:
        self.over.set()
        self._hear("ended", reason)

    def failed(self, error: ServeError) -> None:
        self.over.set()
        self._hear("failed", error.code)

    def _hear(self, *heard: Any) -> None:
        self.heard.append(heard)
        self._react(heard)


@dataclass
class Bench:
    """An engine on a scripted runner."""

    device: Device
    runner: FakeRunner
    engine: Engine
    faults: list[DeviceFault]


@asynccontextmanager
async def running(policy: Policy | None = None, packing: PackingRanges | None = None) -> AsyncIterator[Bench]:
    """An engine that is closed afterwards, with all that it started."""
    device, runner, faults = Device(), FakeRunner(), list[DeviceFault]()
    device.start()
    engine = Engine(device, runner, policy or Policy(), faults.append, packing=packing)
    try:
        yield Bench(device, runner, engine, faults)
    finally:
        await engine.close()
        await device.close()
