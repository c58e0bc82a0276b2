"""Owns `mlxbc pull`: fetch a model for the daemon, which itself never goes online."""

from __future__ import annotations

import argparse
import sys

from mlxbc.cli import exits
from mlxbc.cli.serve import installed

_EPILOG = f"""\
smollm2 is the embedded default model: a small one, good for trying everything.
Any other name is a repository of the Hugging Face hub, and goes to the cache
that other programs share. A running daemon sees the model at once.

The model's directory is printed on standard output; what happens meanwhile, on
standard error.

examples:
  mlxbc pull smollm2
  mlxbc pull mlx-community/Qwen3-0.6B-4bit

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Fetch a model. What is here already is not fetched again."
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="smollm2, or ORG/NAME")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the directory only")


def run(args: argparse.Namespace) -> int:
    """Fetch it, in this process: the daemon's package knows how."""
    if not installed():
        return exits.UNAVAILABLE
    from mlxbcd.errors import ServeError
    from mlxbcd.residency.pull import pull

    def report(line: str) -> None:
        if not args.quiet and sys.stderr is not None:
            print(line, file=sys.stderr)

    try:
        directory = pull(args.model, report=report)
    except ServeError as error:
        exits.explain(error.message)
        return exits.of_code(error.code)
    print(directory)
    return exits.OK
