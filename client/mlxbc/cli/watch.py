"""Owns `mlxbc watch`: the daemon's status, again whenever it changes."""

from __future__ import annotations

import argparse

import msgspec

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.cli.table import size
from mlxbc.client import Client
from mlxbc.errors import ShuttingDown

_EPILOG = f"""\
One line for each change, until Ctrl-C or the daemon ends; nothing is printed
while nothing happens, and an idle daemon isn't woken. A daemon that is told to
stop ends this with status 0. For a status line of an editor or a bar, --json
prints one object a line with everything that `mlxbc status --json` has.

examples:
  mlxbc watch
  mlxbc watch --interval 1000
  mlxbc watch --json | jq --unbuffered -r '"\\(.running) running"'

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Show the daemon's status whenever it changes."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument(
        "--interval", type=_interval, default=250, metavar="MS", help="not more often than this (default: 250)"
    )


def run(args: argparse.Namespace) -> int:
    """Show it."""
    with Client(client_name="mlxbc-watch") as client:
        last = ""
        try:
            for report in client.watch(interval_ms=args.interval):
                line = msgspec.json.encode(report).decode() if args.json else _line(report)
                if line != last:  # what has changed need not show in a line for people
                    print(line, flush=True)
                last = line
        except ShuttingDown:
            exits.explain(exits.STOPPED)
    return exits.OK


def _line(report: wire.StatusReport) -> str:
    parts = [report.state, f"{report.running} running", f"{report.queued} queued"]
    parts += [f"{size(report.memory_used)} of {size(report.memory_limit)}", f"{report.generated_tokens} tokens"]
    parts.append(", ".join(model.model for model in report.models) or "no model")
    parts += [f"loading {one.model} {100 * one.done // max(one.total, 1)} %" for one in report.loading]
    return " | ".join(parts)


def _interval(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 50 <= int(text) <= 60_000):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 50 to 60000")
    return int(text)
