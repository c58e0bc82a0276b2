"""Owns `mlxbc trace`: what the daemon does, as a file that trace viewers read."""

from __future__ import annotations

import argparse
import os
import signal
import time
from contextlib import suppress

import msgspec

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.client import Client
from mlxbc.errors import RequestTimeout, ShuttingDown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, TextIO

_EPILOG = f"""\
Records from now on, until Ctrl-C or SIGTERM, --for, --most spans, or until the
daemon is told to stop. The file is Chrome's trace format, which Perfetto
(ui.perfetto.dev) and chrome://tracing open. Each request has a track: load,
prepare, queue, prefill with its pieces, decode; and so has each model's device:
iterations, decode steps with their rows, prefill forwards, and how long samples
waited for the event loop. No text of a prompt or an answer is in it. Nothing is
recorded while nobody asks.

examples:
  mlxbc trace
  mlxbc trace --for 30 /tmp/mlxbc.json

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Record what the daemon does."
    parser.epilog = _EPILOG
    parser.add_argument("file", nargs="?", default="trace.json", help="write there (default: trace.json)")
    parser.add_argument("--for", dest="seconds", type=float, metavar="SECONDS", help="stop after this long")
    parser.add_argument("--most", type=int, default=200_000, metavar="N", help="stop after N spans (default: 200000)")


def run(args: argparse.Namespace) -> int:
    """Record."""
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    _end_well()
    # A file that is there already is only touched once there is something to write.
    with Client(client_name="mlxbc-trace") as client, _open(args.file) as file:
        exits.explain(f"recording into {args.file}; Ctrl-C ends it")
        counted = Counted()
        try:
            with suppress(KeyboardInterrupt):
                _record(file, client, deadline, args.most, counted)
        except ShuttingDown:
            exits.explain(exits.STOPPED)
        finally:
            # However the recording ends, what came so far is a whole file.
            file.write("\n]}\n")
            exits.explain(f"{counted.spans} spans")
    return exits.OK


def _end_well() -> None:
    """Let whatever ends this command politely do what Ctrl-C does: a recording that was cut off is no JSON."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored, and that stays
            signal.signal(number, signal.default_int_handler)


class Counted:
    """How many spans have been written."""

    spans = 0


def _open(path: str) -> TextIO:
    try:
        return open(path, "w", encoding="utf-8", opener=_private)
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None


def _record(file: TextIO, client: Client, deadline: float | None, most: int, counted: Counted) -> None:
    """Write what comes until it is enough."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    file.write(_encode({"ph": "M", "name": "process_name", "pid": client.welcome.pid, "args": {"name": "mlxbcd"}}))
    tracks: dict[str, int] = {}
    for span in _spans(client, deadline):
        if span.track not in tracks:
            tracks[span.track] = len(tracks) + 1
            named = {"ph": "M", "name": "thread_name", "pid": client.welcome.pid, "tid": tracks[span.track]}
            file.write(",\n" + _encode({**named, "args": {"name": span.track}}))
        event = {"ph": "X", "name": span.name, "pid": client.welcome.pid, "tid": tracks[span.track]}
        file.write(",\n" + _encode({**event, "ts": span.begin_us, "dur": span.micros, "args": span.facts}))
        counted.spans += 1
        if counted.spans >= most:
            break


def _spans(client: Client, deadline: float | None) -> Iterator[wire.Span]:
    with suppress(RequestTimeout):
        for batch in client.trace(until=deadline):
            yield from batch


def _encode(event: dict[str, Any]) -> str:
    return msgspec.json.encode(event).decode()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
