"""Owns `mlxbc complete`, which shells call when TAB is pressed: names of what is there, one a line.

Whatever goes wrong, nothing is printed: a shell has no place for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mlxbc.cli import exits
from mlxbc.errors import MlxbcError

_PATIENCE_S = 1.0
"""How long somebody who pressed TAB is kept waiting."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Print names for a shell to complete with."
    parser.epilog = f"examples:\n  mlxbc complete models\n\n{exits.HELP}"
    parser.add_argument("what", choices=list(_KINDS), metavar="KIND", help=", ".join(_KINDS))


def run(args: argparse.Namespace) -> int:
    """Print them."""
    try:
        names = _KINDS[args.what]()
    except (MlxbcError, OSError):
        names = []
    for name in names:
        print(name)
    return exits.OK


def _models() -> list[str]:
    from mlxbc.client import Client

    with Client(client_name="mlxbc-complete", timeout=_PATIENCE_S) as client:
        return [entry.name for entry in client.models()]


def _templates() -> list[str]:
    from mlxbc.cli import template

    return template.names()


def _conversations() -> list[str]:
    from mlxbc.cli import conversations

    return [one.cid for one in conversations.every()]


def _options() -> list[str]:
    from mlxbc.cli import options

    return options.names()


_KINDS: dict[str, Callable[[], list[str]]] = {
    "models": _models,
    "templates": _templates,
    "conversations": _conversations,
    "options": _options,
}
