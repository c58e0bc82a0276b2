"""Owns `mlxbc stop`: ask the daemon to end, and wait until its process has."""

from __future__ import annotations

import argparse
import os
import select
import time
from contextlib import suppress

from mlxbc.cli import exits
from mlxbc.client import Client
from mlxbc.errors import DaemonUnavailable

_EPILOG = f"""\
Running requests finish first, and new ones are refused; --now ends them with
an error instead. The command returns when the daemon's process is gone. Where
no daemon runs there is nothing to do, and that is a success.

examples:
  mlxbc stop
  mlxbc stop --now
  mlxbc stop --timeout 30 || mlxbc stop --now

{exits.HELP}"""

_POLL = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Stop the daemon."
    parser.epilog = _EPILOG
    parser.add_argument("--now", action="store_true", help="don't wait for running requests")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="give up waiting (exit 124); the daemon goes on stopping",
    )


def run(args: argparse.Namespace) -> int:
    """Stop the daemon."""
    deadline = None if args.timeout is None else time.monotonic() + args.timeout
    try:
        client = Client(client_name="mlxbc-stop", timeout=args.timeout)
    except DaemonUnavailable:
        exits.explain("no daemon is running")
        return exits.OK
    with client:
        pid = client.welcome.pid
        with _Process(pid) as process:
            client.shutdown(drain=not args.now)
            if process.ended_by(deadline):
                return exits.OK
    exits.explain(f"the daemon (pid {pid}) is still stopping")
    return exits.TIMEOUT


class _Process:
    """Another process, watched from before it is told to end, so that its id cannot name a third one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # an older kernel
                self._descriptor = os.pidfd_open(pid)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def ended_by(self, deadline: float | None) -> bool:
        """Wait for the end, at most until `deadline` on the monotonic clock; whether it came."""
        if self._descriptor is not None:
            return bool(select.select([self._descriptor], [], [], _left(deadline))[0])
        while self._runs():
            left = _left(deadline)
            if left == 0:
                return False
            time.sleep(_POLL if left is None else min(_POLL, left))
        return True

    def _runs(self) -> bool:
        try:
            os.kill(self._pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
