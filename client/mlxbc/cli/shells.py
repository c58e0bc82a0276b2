"""Owns making the completion files that `mlxbc completion` prints, by shtab, from what every command declares.

`python -m mlxbc.cli.shells` writes the checked-in copies anew.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, Final

import shtab

from mlxbc.cli import COMMANDS
from mlxbc.cli.completion import DIRECTORY, FILES

_FILE: Final = shtab.FILE
_NAMES: Final = {
    "model": shtab.cmd("mlxbc complete models"),
    "template": shtab.cmd("mlxbc complete templates"),
    "cid": shtab.cmd("mlxbc complete conversations"),
    "option": shtab.cmd("mlxbc complete options"),
    "file": _FILE,
}
"""What completes an argument, by its name in the parser."""
_OF_COMMAND: Final = {("templates", "name"): _NAMES["template"], ("pull", "model"): None}
"""The same for arguments that are called like others and mean something else."""


def script(shell: str) -> str:
    """The completion file of a shell."""
    return shtab.complete(parser(), shell)


def parser() -> argparse.ArgumentParser:
    """All commands in one parser, which `mlxbc` itself never builds."""
    whole = argparse.ArgumentParser("mlxbc", description="Ask language models that stay resident in a local daemon.")
    whole.add_argument("--version", action="store_true", help="show the version")
    commands = whole.add_subparsers()
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == "serve":  # its arguments are the daemon's
            continue
        import_module(f"mlxbc.cli.{name}").configure(command)
        for action in command._actions:
            _mark(name, action)
    return whole


def _mark(command: str, action: Any) -> None:
    how = _OF_COMMAND.get((command, action.dest), _NAMES.get(action.dest))
    if how is not None:
        action.complete = how


if __name__ == "__main__":
    for shell, file in FILES.items():
        (DIRECTORY / file).write_text(script(shell), encoding="utf-8")
