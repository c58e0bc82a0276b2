"""Owns `mlxbc unload`: give a model's memory back."""

from __future__ import annotations

import argparse

from mlxbc.cli import exits
from mlxbc.cli.options import model_name
from mlxbc.client import Client

_EPILOG = f"""\
A model that requests run on is not dropped. One that is dropped comes back
when it is asked for, the default model too.

examples:
  mlxbc unload smollm2

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Drop a resident model."
    parser.epilog = _EPILOG
    parser.add_argument("model", type=model_name, metavar="MODEL", help="a name that mlxbc ps lists")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> int:
    """Drop it."""
    with Client(client_name="mlxbc-unload") as client:
        unloaded = client.unload(args.model)
    if not args.quiet:
        print(f"unloaded {unloaded.model}")
    return exits.OK
