"""Owns running `mlxbc` as a user does: a process of its own, behind pipes or on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE = 10.0

_ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from mlxbc.cli import main
sys.exit(main())
"""


def environment(socket: Path, **extra: str) -> dict[str, str]:
    """A user's environment, with a terminal that can do everything."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "MLXBC_SOCKET": str(socket), "TERM": "xterm", "LC_ALL": "C.UTF-8", **extra}


def start(socket: Path, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command, with a pipe for each standard stream that `options` of `Popen` don't name."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environ = environment(socket, **options.pop("env", {}))
    return subprocess.Popen([sys.executable, "-m", "mlxbc", *arguments], env=environ, **{**streams, **options})


def run(socket: Path, *arguments: str, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command to its end."""
    with start(socket, *arguments, **options) as process:
        out, err = process.communicate(stdin, timeout=PATIENCE)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send what Ctrl-C sends, once the command waits for the daemon."""
    until_asleep(process.pid)
    process.send_signal(signal.SIGINT)


def until_asleep(pid: int) -> None:
    """Wait until a process waits for something itself. A signal that comes just before can go unnoticed until then."""
    status = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + PATIENCE
    while status.read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline, f"process {pid} never waits"
        os.sched_yield()


def plain(screen: str) -> str:
    """What a terminal has shown, without styles."""
    return re.sub(r"\x1b\[[0-9;]*m", "", screen)


class OnTerminal:
    """The command on a pseudo-terminal, or with its standard output in a pipe.

    Attributes:
        screen: everything the terminal has shown.
    """

    def __init__(self, socket: Path, *arguments: str, pipe_stdout: bool = False, **env: str) -> None:
        self.screen = b""
        self._seen = 0
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, *arguments],
            stdin=theirs,
            stdout=subprocess.PIPE if pipe_stdout else theirs,
            stderr=theirs,
            env=environment(socket, **env),
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        os.close(self._ours)

    def type(self, keys: str) -> None:
        """Press keys; \\x04 is Ctrl-D."""
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the command waits: for a key, or for the daemon."""
        until_asleep(self._process.pid)
        self.type("\x03")

    def kill(self, number: signal.Signals) -> None:
        """Send a signal once the command waits."""
        until_asleep(self._process.pid)
        self._process.send_signal(number)

    def see(self, text: str) -> None:
        """Wait until the terminal has shown this after what was seen before."""
        while (found := self.screen.find(text.encode(), self._seen)) < 0:
            assert self._read(), f"{text!r} was not shown, but {self.screen[self._seen :]!r}"
        self._seen = found + len(text.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self._process.wait(PATIENCE)

    @property
    def stdout(self) -> bytes:
        """What came through the pipe, once the command has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE)
        assert ready, f"the terminal has been silent for {PATIENCE} s after {self.screen!r}"
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # how Linux says that nobody has the other side open
            return False
        self.screen += data
        return bool(data)
