"""Owns starting a daemon in the background: the parent's side of `--detach` and `--wait`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mlxbc import wire
from mlxbc.framing import Codec, FrameError, Inbound, frame
from mlxbcd import __version__
from mlxbcd.serve.logs import make_private
from mlxbcd.serve.peer import peer_of

TAIL: Final = 20
"""Lines of the log that are shown when the daemon didn't come up."""

SLOW_S: Final = 2.0
"""A start that takes longer is worth a word; the first one on a machine does."""

_POLL_S: Final = 0.02
_OTHER_S: Final = 5.0
"""How long a daemon that was faster than ours may take to listen."""


def detach(command: Sequence[str], path: Path, log: Path, *, wait: bool, replace: bool = False) -> int:
    """Start `command`, a daemon that will listen on `path` and log to `log`, in a session of its own.

    Prints the process id of the daemon that serves `path`: the new one, or one that was there already. With
    `wait` that happens when it answers; if it dies before, the end of its log goes to stderr. With `replace` the
    new one takes over from whoever serves there.

    Returns:
        An exit code: 0 if a daemon was started or found and, with `wait`, answers.

    Raises:
        OSError: the log can't be written, or the command not be run.
    """
    listening = _listener(path)
    if listening is not None and not replace:
        # A service manager that listens for its daemon is not that daemon: only an answer tells who serves.
        running = _ask(path) if wait else listening
        _say(f"already running on {path} (pid {running or listening})")
        if running is None:
            _say("but it does not answer")
            return os.EX_UNAVAILABLE
        return _print(running)
    make_private(log)
    start = log.stat().st_size
    with log.open("ab") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    if not wait:
        return _print(child.pid)
    slow = threading.Timer(SLOW_S, _say, [f"the daemon is getting ready; it logs to {log}"])
    slow.daemon = True
    slow.start()
    try:
        pid = _await_answer(child, path, listening if replace else None)
    finally:
        slow.cancel()
    if pid is not None:
        return _print(pid)
    code = child.returncode
    how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}"
    _say(f"the daemon {how} before it answered; from its log ({log}):")
    sys.stderr.write(_tail(log, start))
    # As a shell tells of signals.
    return 128 - code if code < 0 else code or os.EX_SOFTWARE


def _await_answer(child: subprocess.Popen[bytes], path: Path, old: int | None) -> int | None:
    """The id of the daemon that answers: ours, or one that was faster; None if ours died without one.

    Args:
        old: one that may answer until ours has taken over.
    """
    given_up = None
    while True:
        pid = _ask(path)
        if pid is not None and not (pid == old and child.poll() is None):
            if pid != child.pid:
                # Ours has nothing to do, unless the other one ends before it notices: then nobody would know of it.
                child.terminate()
                child.wait()
            return pid
        if child.poll() is not None:
            # Code 0 says that another daemon got there first; it may not have bound its socket yet.
            given_up = given_up or time.monotonic() + (_OTHER_S if child.returncode == 0 else 0)
            if time.monotonic() >= given_up:
                return None
        time.sleep(_POLL_S)


def _ask(path: Path) -> int | None:
    """Say hello and wait for the answer; the daemon's process id, or None if there is no answer.

    A daemon listens before it has loaded anything, so this can take long; but if it dies, the connection
    ends.
    """
    replies: Inbound[wire.Reply] = Inbound(wire.Reply, codec=Codec.MSGPACK)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.fspath(path))
            connection.sendall(frame(_hello(), Codec.MSGPACK))
            while data := connection.recv(65536):
                for reply in replies.feed(data):
                    return reply.pid if isinstance(reply, wire.Welcome) else None
        except (OSError, FrameError):
            pass
    return None


def _hello() -> wire.Hello:
    return wire.Hello(proto=wire.PROTOCOL, client="mlxbcd", version=__version__)


def _listener(path: Path) -> int | None:
    """The id of the process that listens on `path`, if one does."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.fspath(path))
            return peer_of(connection).pid
        except OSError:
            return None


def _tail(log: Path, start: int) -> str:
    """The last lines that were logged since the file had `start` bytes."""
    with log.open("rb") as file:
        file.seek(min(start, log.stat().st_size))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-TAIL:])


def _say(text: str) -> None:
    sys.stderr.write(f"mlxbcd: {text}\n")


def _print(pid: int) -> int:
    sys.stdout.write(f"{pid}\n")
    return os.EX_OK
