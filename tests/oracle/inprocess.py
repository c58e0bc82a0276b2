"""Owns running requests through the real engine in this process: one by one, or all together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mlxbcd.device import Device
from mlxbcd.engine.engine import Engine
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.scheduler import Policy
from mlxbcd.errors import ServeError
from mlxbcd.methods.events import End
from mlxbcd.plan.request import Request
from mlxbcd.residency.build import build
from mlxbcd.sampling.sampler import Sample
from mlxbcd.spec.statistics import Statistics


class Row:
    """Listens to one request.

    Attributes:
        begun: part of its prompt is processed.
        first: its first token is drawn.
        enough: as many tokens as wanted are drawn, or it is over.
    """

    def __init__(self, wanted: int) -> None:
        self.begun = asyncio.Event()
        self.first = asyncio.Event()
        self.enough = asyncio.Event()
        self._wanted = wanted
        self._tokens: list[int] = []
        self._error: ServeError | None = None

    def prefilled(self, position: int, total: int) -> None:
        self.begun.set()

    def sampled(self, sample: Sample, *, eos: bool, candidate: int) -> None:
        self._tokens.append(sample.token)
        self.first.set()
        if len(self._tokens) >= self._wanted:
            self.enough.set()

    def speculated(self, statistics: Statistics, candidate: int) -> None:
        """Nobody asks."""

    def ended(self, reason: End, candidate: int) -> None:
        self.enough.set()

    def failed(self, error: ServeError) -> None:
        self._error = error
        for event in (self.begun, self.first, self.enough):
            event.set()

    async def drawn(self) -> list[int]:
        """The wanted tokens, once they are drawn.

        Raises:
            ServeError: the row failed.
        """
        await self.enough.wait()
        if self._error is not None:
            raise self._error
        return self._tokens[: self._wanted]


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[Engine]:
    """An engine over the model of a directory, on a device thread of its own."""

    def on_fault(fault: DeviceFault) -> None:
        raise fault

    device = Device()
    device.start()
    built = await device.run(build, directory, lambda done, total: None, lambda: False)
    running = Engine(device, built.executor, Policy(), on_fault)
    try:
        yield running
    finally:
        await running.close()
        await device.run(built.close)
        await device.close()


async def alone(engine: Engine, request: Request) -> list[int]:
    """A request's tokens with the engine to itself."""
    row = Row(request.max_tokens)
    engine.submit(request, row)
    return await row.drawn()


async def together(
    engine: Engine, requests: Sequence[Request], wanted: int, *, one_at_a_time: bool = False
) -> tuple[list[list[int]], int]:
    """The first `wanted` tokens of requests that start one after the other, each once the one before has begun.

    A request that is to draw more than that stays until all have drawn enough, and is then cancelled.

    Args:
        one_at_a_time: each starts only once the one before has its first token, so one prompt is processed at a time.

    Returns:
        Each request's tokens, and how many were running when the last one had enough.
    """
    rows = [Row(wanted) for _ in requests]
    keys = []
    for request, row in zip(requests, rows, strict=True):
        keys.append(engine.submit(request, row))
        await (row.first if one_at_a_time else row.begun).wait()
    tokens = [await row.drawn() for row in rows]
    running = engine.running
    for key in keys:
        engine.cancel(key)
    await engine.drain()
    return tokens, running
