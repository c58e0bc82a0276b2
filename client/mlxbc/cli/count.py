"""Owns `mlxbc count`: how long a text is for its model."""

from __future__ import annotations

import argparse

from mlxbc.cli import exits
from mlxbc.cli.tokenize import add_arguments, request_fields
from mlxbc.client import Client

_EPILOG = f"""\
The text is what standard input holds, unless that is a terminal, followed by
the arguments. It is taken as it is; --chat puts it through the model's chat
template, as mlxbc ask would.

examples:
  mlxbc count <README.md
  mlxbc count --chat -s "Be brief." "Hello"

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Print how many tokens a text has."
    parser.epilog = _EPILOG
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    fields = request_fields(args)
    with Client(client_name="mlxbc-count") as client:
        print(client.count(**fields))
    return exits.OK
