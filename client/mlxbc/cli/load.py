"""Owns `mlxbc load`: make a model resident now rather than at its first request."""

from __future__ import annotations

import argparse

from mlxbc.cli import exits
from mlxbc.cli.options import add_keep_alive, model_name
from mlxbc.cli.table import size
from mlxbc.cli.terminal import Terminal
from mlxbc.client import Client

_EPILOG = f"""\
Without a name, the daemon's default model is loaded. A model that is resident
already stays as it is.

examples:
  mlxbc load
  mlxbc load smollm2
  mlxbc load ./my-model --keepalive 30m

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Make a model resident, and wait until it is."
    parser.epilog = _EPILOG
    parser.add_argument(
        "model", nargs="?", type=model_name, metavar="MODEL", help="a name that mlxbc models lists, or a path"
    )
    add_keep_alive(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> int:
    """Load it."""
    terminal = Terminal(quiet=args.quiet)
    with Client(client_name="mlxbc-load", on_starting=terminal.starting) as client:
        try:
            loaded = client.load(args.model, keep_alive=args.keepalive, on_progress=terminal.progress)
        finally:
            terminal.end_text()
    if not args.quiet:
        print(f"loaded {loaded.model} ({size(loaded.bytes)}) in {loaded.seconds:.1f} s")
    return exits.OK
