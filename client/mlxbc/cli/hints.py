"""Owns what is said of words that are no command and of options that a command doesn't have.

Imported only once there is such a word.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from mlxbc.cli.options import names

_RESIDENT = "mlxbc load MODEL makes it resident, mlxbc unload MODEL drops it from memory"
_START = "mlxbc serve --detach --wait, or mlxbc service start where the service is installed"
_RESTART = "mlxbc serve --replace --detach --wait, or mlxbc service restart where the service is installed"
_STOP = "mlxbc stop"
_FETCH = "mlxbc pull MODEL"
_LIST = "mlxbc models"
_ASK = "mlxbc ask TEXT, or mlxbc chat"
_FILES = (
    "mlxbc models --json tells each model's directory, which can be deleted; mlxbc unload drops one from memory only"
)

_OTHERWISE = {
    "help": "mlxbc --help, or mlxbc COMMAND --help",
    "version": "mlxbc --version",
    "start": _START,
    "up": _START,
    "daemon": _START,
    "restart": _RESTART,
    "replace": _RESTART,
    "upgrade": _RESTART,
    "update": _RESTART,
    "down": _STOP,
    "kill": _STOP,
    "quit": _STOP,
    "exit": _STOP,
    "shutdown": _STOP,
    "reload": "mlxbc config reload",
    "set": "mlxbc config, which tells where the file of settings is",
    "settings": "mlxbc config",
    "init": "mlxbc config init",
    "install": f"mlxbc service install for the daemon, {_FETCH} for a model",
    "uninstall": "mlxbc service uninstall",
    "enable": "mlxbc service install",
    "disable": "mlxbc service uninstall",
    "logs": "mlxbc service logs for the daemon's log, mlxbc log for conversations",
    "history": "mlxbc log",
    "list": f"{_LIST}, or mlxbc ps for those in memory",
    "ls": f"{_LIST}, or mlxbc ps for those in memory",
    "show": f"{_LIST}, or mlxbc status",
    "info": "mlxbc status",
    "top": "mlxbc watch",
    "check": "mlxbc doctor",
    "download": _FETCH,
    "fetch": _FETCH,
    "get": _FETCH,
    "add": _FETCH,
    "use": _RESIDENT,
    "rm": _FILES,
    "remove": _FILES,
    "delete": _FILES,
    "run": _ASK,
    "generate": _ASK,
    "prompt": _ASK,
    "answer": _ASK,
    "question": _ASK,
    "infill": "mlxbc fim",
    "tokens": "mlxbc count TEXT, or mlxbc tokenize TEXT",
    "clear": "mlxbc cache clear",
    "prime": "mlxbc cache prime TEXT",
    "completions": "mlxbc completion bash, zsh or fish",
    "template": "mlxbc templates",
    "server": "mlxbc serve, or mlxbc http for OpenAI's API",
    "metrics": "mlxbc status --prometheus",
}
"""What people try, and what it is called here."""


def command(name: str, known: Iterable[str]) -> str:
    """What to type instead of a word that is no command."""
    meant = _OTHERWISE.get(name.lower())
    if meant is not None:
        return f"there is {meant}"
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "see mlxbc --help"


def unrecognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What is wrong with arguments that a command doesn't take."""
    options = parser._option_string_actions
    message = f"unrecognized arguments: {' '.join(words)}"
    odd = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    if odd is None:
        return message
    key = odd.removeprefix("--").replace("-", "_")
    if "-o" in options and key in names():
        return f"{message}; that is an option of the generation: -o {key} VALUE"
    near = get_close_matches(odd, [option for option in options if option.startswith("--")], n=1)
    return f"{message}; did you mean {near[0]}?" if near else message
