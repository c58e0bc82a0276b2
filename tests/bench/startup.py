"""Owns `startup`: how soon a server answers and says its first word after it was started, and what one question costs.

Both servers are told to preload the model, and are asked as soon as they answer at all; only one lives at a time. The
cost of a question is the processor time of a whole client process, start of the interpreter included: our `mlxbc ask`
beside the least Python that streams an answer over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import sleep

from bench.chats import Chat, Ours, Side, Theirs
from bench.machine import peer_version
from bench.processes import Daemon, Peer, Server, script
from bench.registry import Settings
from bench.stories import chat
from bench.table import Row, Target, compare
from bench.to_wire import milliseconds as to_wire_ms
from bench.weights import exported
from mlxbc.client import Client

_POLL_S = 0.01

_FASTER = Target("ratio", ">=", 1.0)
_TWICE = Target("ratio", ">=", 2.0)
_SOON = Target("ours", "<=", 100)
_QUESTION = "What is the capital of France?"
_ANSWER = 8

_HTTP_CLIENT = """\
import json, sys, urllib.request
question = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
with urllib.request.urlopen(question) as answer:
    for line in answer:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
print()
"""


def run(settings: Settings) -> list[Row]:
    """Rows `startup/ready`, `startup/idle`, `startup/first-token`, `startup/client` and `startup/client-to-wire`."""
    model, peer_model = settings.model, exported(settings.model)
    starts: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for _ in range(settings.pick(7, 2)):
        daemon = Daemon(model)
        starts["ours"].append(_start(daemon, Ours(daemon.socket)))
        peer = Peer(peer_model)
        starts["peer"].append(_start(peer, Theirs(peer.port)))
    ready, first = ({side: median(figure[i] for figure in figures) for side, figures in starts.items()} for i in (0, 1))
    client = _clients(Daemon(model), Peer(peer_model), settings.pick(15, 3))
    version = peer_version()
    to_wire = to_wire_ms(settings.pick(15, 3))
    rows = [
        compare(name, figures["ours"], figures["peer"], unit, "lower", peer_version=version, target=target, note=note)
        for name, figures, unit, target, note in (
            ("startup/ready", ready, "s", _TWICE, ""),
            ("startup/first-token", first, "s", _FASTER, "of a short greedy chat"),
            ("startup/client", client, "ms CPU", _FASTER, "beside urllib and json alone"),
        )
    ]
    idle, measure = _idle(model)
    rows.insert(1, compare("startup/idle", idle, None, "MB", "lower", note=f"{measure}, MLX is up, no model"))
    if to_wire is not None:
        rows.append(compare("startup/client-to-wire", to_wire, None, "ms CPU", "lower", target=_SOON))
    return rows


def _idle(model: Path) -> tuple[float, str]:
    """Megabytes of a daemon that has loaded no model, as the system accounts them, and how it does."""
    with Daemon(model, "--no-preload") as daemon:
        daemon.await_ready()
        with Client(daemon.socket, client_name="bench") as client:
            while (report := client.status()).device == "starting":
                sleep(_POLL_S)
    return report.footprint / 1e6, report.footprint_measure


def _start(server: Server, side: Side) -> tuple[float, float]:
    """Seconds from the start of the process until it answers, and until the first text of a chat."""
    with server:
        ready = server.await_ready()
        short = Chat(chat(5, secrets.token_hex(4), 0), _ANSWER)
        asyncio.run(_hold(side, short))
        return ready, short.arrivals[0] - server.began


async def _hold(side: Side, one: Chat) -> None:
    await side.hold(one)


def _clients(daemon: Daemon, peer: Peer, repetitions: int) -> dict[str, float]:
    """Median milliseconds of processor time of one client process."""
    with daemon, peer:
        ask = [script("mlxbc"), "ask", "-o", "temperature", "0", "-o", "max_tokens", str(_ANSWER), _QUESTION]
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": _QUESTION}],
                "temperature": 0,
                "max_tokens": _ANSWER,
                "stream": True,
            }
        )
        url = f"http://127.0.0.1:{peer.port}/v1/chat/completions"
        commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
            "ours": (ask, {**os.environ, "MLXBC_SOCKET": str(daemon.socket), "MLXBC_DATA": str(daemon.directory)}),
            "peer": ([sys.executable, "-c", _HTTP_CLIENT, url, body], os.environ),
        }
        daemon.await_ready()
        peer.await_ready()
        costs: dict[str, list[float]] = {side: [] for side in commands}
        for repetition in range(repetitions + 1):
            for side, (command, environment) in commands.items():
                cost = _processor_ms(command, environment)
                # The first of each waits for the model, and for the disk.
                if repetition:
                    costs[side].append(cost)
        return {side: median(figures) for side, figures in costs.items()}


def _processor_ms(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """User and system time of a process, in milliseconds.

    Raises:
        RuntimeError: it failed.
    """
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not answer.strip():
        raise RuntimeError(f"{' '.join(command[:2])} exited with {process.returncode} and said {answer!r}")
    return (usage.ru_utime + usage.ru_stime) * 1e3
