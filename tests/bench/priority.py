"""Owns `priority`: a keystroke's prompt on a machine that is busy with background work, beside an idle one."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.processes import Daemon
from bench.registry import Settings
from bench.stories import chat
from bench.table import Row, Target, compare
from mlxbc.aio import AsyncClient
from mlxbc.wire import Progress, Token

_KEYSTROKE_WORDS = 155
"""With the template around them, 200 tokens."""
_BACKGROUND_WORDS = 3950
_STREAMS = 4


def run(settings: Settings) -> list[Row]:
    """Row `priority/first-token`."""
    with Daemon(settings.model) as daemon:
        daemon.await_ready()
        idle, busy = asyncio.run(_run(daemon.socket, settings))
    note = f"idle {median(idle):.2f} s, busy {median(busy):.2f} s, worst {max(busy):.2f} s"
    ratio = median(busy) / median(idle)
    return [
        compare("priority/first-token", ratio, None, "x idle", "lower", target=Target("ours", "<=", 1.5), note=note)
    ]


async def _run(socket: Path, settings: Settings) -> tuple[list[float], list[float]]:
    idle: list[float] = []
    busy: list[float] = []
    async with AsyncClient(socket, client_name="agent") as agent, AsyncClient(socket, client_name="editor") as editor:
        await _ask(editor, settings)
        for _ in range(settings.pick(5, 1)):
            idle.append(await _ask(editor, settings))
            flowing = [asyncio.Event() for _ in range(_STREAMS)]
            work = [asyncio.create_task(_decode(agent, each)) for each in flowing]
            await asyncio.gather(*(each.wait() for each in flowing))
            prefilling = asyncio.Event()
            work.append(asyncio.create_task(_prefill(agent, settings, prefilling)))
            await prefilling.wait()
            busy += [await _ask(editor, settings) for _ in range(settings.pick(2, 1))]
            if any(task.done() for task in work):
                raise RuntimeError("background work ended before the keystrokes were answered")
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            await asyncio.sleep(1.0)
    return idle, busy


async def _ask(editor: AsyncClient, settings: Settings) -> float:
    """Seconds until the first token of a 200-token prompt."""
    messages = chat(settings.pick(_KEYSTROKE_WORDS, 20), secrets.token_hex(4), 1)
    began = perf_counter()
    async with editor.generate(messages=messages, temperature=0.0, max_tokens=4, priority="interactive") as stream:
        async for event in stream:
            if isinstance(event, Token):
                return perf_counter() - began
    raise RuntimeError("no token came")


async def _decode(agent: AsyncClient, flowing: asyncio.Event) -> None:
    messages = chat(12, secrets.token_hex(4), 2)
    async with agent.generate(messages=messages, temperature=0.0, max_tokens=4000, priority="background") as stream:
        async for event in stream:
            if isinstance(event, Token):
                flowing.set()


async def _prefill(agent: AsyncClient, settings: Settings, prefilling: asyncio.Event) -> None:
    messages = chat(settings.pick(_BACKGROUND_WORDS, 2000), secrets.token_hex(4), 3)
    async with agent.generate(messages=messages, temperature=0.0, max_tokens=4, priority="background") as stream:
        async for event in stream:
            if isinstance(event, Progress):
                prefilling.set()
