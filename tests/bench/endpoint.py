"""Owns `http`: what the HTTP endpoint adds to the first token of a stream, and what a token costs it.

The daemon's device is made up (see `wire_daemon`). The same chat is asked over the socket and over HTTP by turns, by
the least client for each: our asyncio client, and one that writes a request and reads events from a connection kept.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from bench.processes import Server, script
from bench.registry import Settings
from bench.stories import chat
from bench.table import Row, Target, compare
from bench.wire import MadeUpDaemon
from mlxbc.aio import AsyncClient

_TOKENS = 8


def run(settings: Settings) -> list[Row]:
    """Rows `http/first-token`, the difference that is asked about, with both sides, and `http/token`."""
    with MadeUpDaemon(settings.model) as daemon:
        daemon.await_ready()
        with Endpoint(daemon) as endpoint:
            endpoint.await_ready()
            pairs, token_us = asyncio.run(_measure(daemon, endpoint, settings.pick(200, 20), settings.pick(4000, 200)))
    socket_ms, http_ms = (median(side) for side in zip(*pairs, strict=True))
    added = median(http - socket for socket, http in pairs)
    note = f"{http_ms:.2f} over HTTP, {socket_ms:.2f} over the socket"
    return [
        compare("http/first-token", added, None, "ms", "lower", target=Target("ours", "<=", 3), note=note),
        compare("http/token", token_us, None, "µs CPU", "lower", note="of the endpoint, beside the daemon's and ours"),
    ]


class Endpoint(Server):
    """`mlxbc http` before a daemon. Ready once it has said where it listens."""

    talks = True

    def __init__(self, daemon: MadeUpDaemon) -> None:
        super().__init__()
        self._daemon = daemon
        self.port = 0

    def command(self) -> Sequence[str]:
        return [script("mlxbc"), "http", "--no-token", "--port", "0"]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "MLXBC_SOCKET": str(self._daemon.socket)}

    def answers(self) -> bool:
        assert self._process.stdout is not None
        self.port = urlsplit(self._process.stdout.readline().decode().strip()).port or 0
        return self.port > 0

    def processor_s(self) -> float:
        """Processor time it has used so far."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def _measure(
    daemon: MadeUpDaemon, endpoint: Endpoint, rounds: int, length: int
) -> tuple[list[tuple[float, float]], float]:
    """Milliseconds to the first token, over the socket and over HTTP, per round; microseconds of a token over HTTP."""
    pairs = []
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    async with AsyncClient(daemon.socket, client_name="bench") as client:
        for number in range(rounds + 5):
            socket, http = await _over_socket(client, number), await _over_http(reader, writer, number, _TOKENS)
            # The first few wait for whatever is done only once.
            if number >= 5:
                pairs.append((socket, http))
    used = endpoint.processor_s()
    await _over_http(reader, writer, 0, length)
    used = endpoint.processor_s() - used
    writer.close()
    await writer.wait_closed()
    return pairs, used / length * 1e6


async def _over_socket(client: AsyncClient, number: int) -> float:
    began = perf_counter()
    first = 0.0
    async with client.generate(messages=chat(10, "http", number), temperature=0.0, max_tokens=_TOKENS) as stream:
        async for _piece in stream.text:
            first = first or perf_counter()
    return (first - began) * 1e3


async def _over_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, max_tokens: int) -> float:
    began = perf_counter()
    first = 0.0
    asked = {"messages": chat(10, "http", number), "temperature": 0, "max_tokens": max_tokens, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    if not status.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the endpoint answered {status.decode().strip()}")
    while (line := await reader.readline()) != b"0\r\n":
        if line.startswith(b"data: {"):
            first = first or perf_counter()
        elif not line:
            raise RuntimeError("the endpoint hung up")
    await reader.readline()
    return (first - began) * 1e3
