"""Owns real daemons with a tiny model, also ones whose device fails or that can't write, and what tests ask of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from real_daemon import PATIENCE_S, Daemon

from mlxbc import wire

HERE: Final = Path(__file__).parent
NO_ROOM: Final = ["sh", "-c", 'ulimit -S -f 0; exec "$@"', "sh"]
"""Begins a command that can't write a byte to any file."""
STORY: Final = "the story in a land"
POISON: Final = "x" * 97
"""Every byte is a token, so this prompt has as many; a faulty daemon knows it by that."""


@contextlib.contextmanager
def serving(path: Path, model: Path, *arguments: str, fault: str = "", room: bool = True) -> Iterator[Daemon]:
    """A daemon that answers; with a `fault`, one whose device has it, and without `room`, one on a full disk."""
    program = [str(HERE / "faulty_daemon.py")] if fault else ["-P", "-m", "mlxbcd.serve.main"]
    command = [sys.executable, *program, "--socket", str(path), "--model", str(model), *arguments]
    if not room:
        command = [*NO_ROOM, *command]
    environment = {**os.environ, **({"MLXBC_TEST_FAULT": fault} if fault else {})}
    started = Daemon.__new__(Daemon)
    started.path, started.said = path, ""
    started.popen = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        started.logged("ready after")
        yield started
    finally:
        started.popen.kill()
        started.popen.communicate()


def answer(daemon: Daemon, prompt: str = STORY, **fields: Any) -> list[int]:
    with daemon.client() as client:
        return client.generate(prompt, **{"temperature": 0, "max_tokens": 12, "resumable": True} | fields).wait().ids


def await_status(daemon: Daemon, condition: Callable[[wire.StatusReport], bool]) -> wire.StatusReport:
    deadline = time.monotonic() + PATIENCE_S
    with daemon.client() as client:
        while not condition(report := client.status()):
            assert time.monotonic() < deadline, report
            time.sleep(0.02)
    return report


def at_rest(daemon: Daemon) -> wire.StatusReport:
    """Once nothing is open but the connection that asks."""
    return await_status(
        daemon,
        lambda report: (
            report.running + report.queued == 0
            and report.connections == 1
            and sum(model.kv_bytes for model in report.models) == 0
        ),
    )
