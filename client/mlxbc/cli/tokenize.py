"""Owns `mlxbc tokenize`: a text as its model reads it."""

from __future__ import annotations

import argparse
from typing import Any

from mlxbc import request
from mlxbc.cli import exits, options
from mlxbc.cli.text import ARGUMENT_HELP, gather
from mlxbc.client import Client

_EPILOG = f"""\
The text is what standard input holds, unless that is a terminal, followed by
the arguments. It is taken as it is; --chat puts it through the model's chat
template, as mlxbc ask would.

examples:
  mlxbc tokenize "Hello, world"
  mlxbc tokenize --chat -s "Be brief." "Hello"

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Print the token ids of a text, separated by spaces."
    parser.epilog = _EPILOG
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    fields = request_fields(args)
    with Client(client_name="mlxbc-tokenize") as client:
        print(*client.tokenize(**fields))
    return exits.OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tokenize` and `count` share."""
    parser.set_defaults(parser=parser)
    parser.add_argument("text", nargs="*", help=ARGUMENT_HELP)
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    options.add_system(parser)
    options.add_model(parser)


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `tokenize` or `count` request that the arguments ask for."""
    if args.system is not None and not args.chat:
        args.parser.error("-s needs --chat: without the template there is no system prompt")
    text = gather(args.parser, args.text, exact=not args.chat)
    fields: dict[str, Any] = {} if args.model is None else {"model": args.model}
    return fields | ({"messages": request.conversation(text, args.system)} if args.chat else {"text": text})
