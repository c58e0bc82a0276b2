"""Owns systemd's user units: rendering them, with everything quoted that systemd would read otherwise."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

from mlxbc.errors import ConfigError
from mlxbcd.service.files import template
from mlxbcd.service.program import Program

SOCKET: Final = "mlxbc.socket"
SERVICE: Final = "mlxbc.service"

_PLAIN: Final = re.compile(r"[\w./:=@+,-]+", re.ASCII)


def directory() -> Path:
    """Where this user's own units are."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(config, "systemd", "user")


def render(program: Program) -> dict[str, bytes]:
    """The two units by their file names. Both start modes have the same: what differs is which of them is enabled.

    Raises:
        ConfigError: systemd could not start the interpreter.
    """
    interpreter, *arguments = program.command
    if set(interpreter) & set("\"'\\"):
        raise ConfigError(
            f"systemd starts no program with quotes or backslashes in its path ({interpreter}): "
            f"install mlxbc into a directory without them"
        )
    # A variable is not expanded in the name of the program, so there a dollar sign is one.
    command = " ".join([_word(interpreter), *(_word(argument.replace("$", "$$")) for argument in arguments)])
    environment = "\n".join(f"Environment={_word(f'{name}={value}')}" for name, value in program.environment.items())
    # %t is the user's runtime directory, which the client finds in XDG_RUNTIME_DIR.
    socket = _specifiers(str(program.socket)) if "MLXBC_SOCKET" in program.environment else "%t/mlxbc/mlxbc.sock"
    values = {"COMMAND": command, "ENVIRONMENT": environment, "SOCKET": socket}
    return {name: _fill(template(name).decode(), values).encode() for name in (SOCKET, SERVICE)}


def stale(installed: str) -> str:
    """What an installed service unit says otherwise than this version's, apart from what was chosen; empty if nothing.

    The command, its environment and the socket are up to whoever installs it, but the interpreter must be this one.
    """
    chosen = re.compile(r"^(ExecStart|Environment)=")
    ours = [line for line in template(SERVICE).decode().splitlines() if line and not line.startswith(("#", "@"))]
    theirs = [line for line in installed.splitlines() if line and not line.startswith("#")]
    command = next((line for line in theirs if line.startswith("ExecStart=")), "ExecStart=")
    interpreter = _word(os.path.abspath(sys.executable))
    if not command.startswith(f"ExecStart={interpreter} "):
        return f"it starts another program ({command[:120]})"
    wanted = [line for line in ours if not chosen.match(line)]
    found = [line for line in theirs if not chosen.match(line)]
    for line in wanted:
        if line not in found:
            return f"it lacks {line}"
    extra = [line for line in found if line not in wanted]
    return f"it has {extra[0]}" if extra else ""


def _fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text)


def _word(text: str) -> str:
    """One word of a command line or one assignment."""
    text = _specifiers(text)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _specifiers(text: str) -> str:
    return text.replace("%", "%%")
