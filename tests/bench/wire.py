"""Owns `wire`: the processor time that a token costs between the device and its reader, daemon and client together.

The daemon's device is made up (see `wire_daemon`), so what is left is the engine's loop, text, framing, the socket and
the client: eight streams on one connection, read by the package's asyncio client in this process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import median

from bench.processes import Daemon, module_environment
from bench.registry import Settings
from bench.stories import chat
from bench.table import Row, Target, compare
from mlxbc.aio import AsyncClient

_STREAMS = 8


def run(settings: Settings) -> list[Row]:
    """Row `wire/token`, and the daemon's and the client's shares of it."""
    length = settings.pick(2000, 200)
    with MadeUpDaemon(settings.model) as daemon:
        daemon.await_ready()
        figures = asyncio.run(_measure(daemon, length, settings.pick(5, 2)))
    daemon_us, client_us, token_us = (median(column) for column in zip(*figures, strict=True))
    return [
        compare("wire/token", token_us, None, "µs CPU", "lower", target=Target("ours", "<=", 50)),
        compare("wire/token/daemon", daemon_us, None, "µs CPU", "lower"),
        compare("wire/token/client", client_us, None, "µs CPU", "lower"),
    ]


class MadeUpDaemon(Daemon):
    """Our daemon over a device that only sleeps."""

    talks = True

    def command(self) -> Sequence[str]:
        own = ["--socket", str(self.socket), "--model", str(self.model)]
        return [sys.executable, "-P", "-m", "bench.wire_daemon", *own]

    def environment(self) -> dict[str, str]:
        return module_environment()

    def processor_s(self) -> float:
        """Processor time it has used so far."""
        return float(self.say(b"\n"))


async def _measure(daemon: MadeUpDaemon, length: int, rounds: int) -> list[tuple[float, float, float]]:
    """Per round, microseconds per token: the daemon's, the client's, and both."""
    figures = []
    async with AsyncClient(daemon.socket, client_name="bench") as client:
        await _round(client, length // 10)
        for _ in range(rounds):
            theirs, mine = daemon.processor_s(), time.process_time()
            tokens = await _round(client, length)
            mine, theirs = time.process_time() - mine, daemon.processor_s() - theirs
            figures.append((theirs / tokens * 1e6, mine / tokens * 1e6, (theirs + mine) / tokens * 1e6))
    return figures


async def _round(client: AsyncClient, length: int) -> int:
    """Read eight streams of `length` tokens; the tokens of all."""
    return sum(await asyncio.gather(*(_read(client, seed, length) for seed in range(_STREAMS))))


async def _read(client: AsyncClient, seed: int, length: int) -> int:
    async with client.generate(messages=chat(10, "wire", seed), temperature=0.0, max_tokens=length) as stream:
        async for _piece in stream.text:
            pass
    return stream.result.usage.generated
