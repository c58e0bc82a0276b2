"""Owns `mlxbc ps`: the resident models."""

from __future__ import annotations

import argparse
import sys

import msgspec

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.cli.table import duration, size, table, titled
from mlxbc.client import Client

_EPILOG = f"""\
SIZE is that of the weights; KV the memory that running requests hold; CONTEXT
the most tokens of one request; RUNNING and QUEUED count requests; IDLE is the
time since the last one; UNTIL when the model is dropped if nobody asks it. A
pinned model stays whatever happens. Any other goes when its room is needed, the
least recently used first, and never while it is asked. BATCHING says whether
requests run together or one at a time, and why. A model that drafts for another
stands beside its name, and SIZE is that of both.

examples:
  mlxbc ps
  mlxbc ps --json | jq -r '.[].model'

{exits.HELP}"""

_HEADER = ("NAME", "SIZE", "DTYPE", "KV", "CONTEXT", "RUNNING", "QUEUED", "IDLE", "UNTIL", "BATCHING")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "List the resident models."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """List them."""
    with Client(client_name="mlxbc-ps") as client:
        processes = client.ps()
    if args.json:
        print(msgspec.json.encode(processes).decode())
    else:
        sys.stdout.write(table(_HEADER, [_row(process) for process in processes]))
    return exits.OK


def _until(process: wire.Process) -> str:
    if process.pinned:
        return "pinned"
    return "room needed" if process.expires_s is None else f"in {duration(process.expires_s)}"


def _row(process: wire.Process) -> tuple[str, ...]:
    together = "together" if process.placement == "continuous" else "one at a time"
    return (
        titled(process),
        size(process.bytes),
        process.dtype,
        size(process.kv_bytes),
        str(process.context),
        str(process.running),
        str(process.queued),
        "-" if process.running else duration(process.idle_s),
        _until(process),
        f"{together} ({process.reason})" if process.reason else together,
    )
