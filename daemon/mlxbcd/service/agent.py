"""Owns launchd's user agent: rendering its property list."""

from __future__ import annotations

import os
import plistlib
import sys
from pathlib import Path
from typing import Any, Final
from xml.parsers.expat import ExpatError

from mlxbcd.service.files import template
from mlxbcd.service.program import Program

LABEL: Final = "org.mlxbc.daemon"
FILE: Final = f"{LABEL}.plist"

AQUA: Final = "Aqua"
"""The session of somebody who has logged in on the screen."""
BACKGROUND: Final = "Background"
"""The session of a user who hasn't: ssh."""


def directory() -> Path:
    """Where this user's own agents are."""
    return Path.home() / "Library" / "LaunchAgents"


def render(program: Program, session: str) -> bytes:
    """The agent for one kind of session, `AQUA` or `BACKGROUND`: in both it would fight itself for the socket."""
    agent: dict[str, Any] = plistlib.loads(template(FILE))
    agent["ProgramArguments"] = [*program.command, f"--log-file={program.log}"]
    agent["EnvironmentVariables"] = dict(program.environment)
    agent["Sockets"]["Listeners"]["SockPathName"] = str(program.socket)
    agent["WorkingDirectory"] = str(Path.home())
    # launchd never rotates these, so the log proper is a file of the daemon's own.
    agent["StandardOutPath"] = agent["StandardErrorPath"] = str(program.crash_log)
    agent["LimitLoadToSessionType"] = session
    agent["RunAtLoad"] = not program.on_demand
    # SuccessfulExit would imply RunAtLoad. Crashed is the weaker promise: it covers signals, not exit codes.
    agent["KeepAlive"] = {"Crashed": True} if program.on_demand else {"SuccessfulExit": False}
    return plistlib.dumps(agent)


def starts_at_login(agent: bytes) -> bool:
    """Whether an installed agent is one that starts at login."""
    return bool(_read(agent).get("RunAtLoad"))


def logs(agent: bytes) -> list[Path]:
    """The files that the daemon of an installed agent logs to, the log proper first."""
    read = _read(agent)
    option = "--log-file="
    named = [word.removeprefix(option) for word in read.get("ProgramArguments", []) if word.startswith(option)]
    return [Path(path) for path in (*named, read.get("StandardErrorPath")) if path]


def stale(installed: bytes) -> str:
    """What an installed agent says otherwise than this version's, apart from what was chosen; empty if nothing."""
    read, ours = _read(installed), plistlib.loads(template(FILE))
    command = read.get("ProgramArguments") or [""]
    if not read or command[0] != os.path.abspath(sys.executable):
        return f"it starts another program ({command[0]})" if read else "it is no property list"
    for key, value in ours.items():
        found = read.get(key)
        if key == "Sockets":
            found = {"Listeners": {"SockPathMode": (found or {}).get("Listeners", {}).get("SockPathMode")}}
        if found != value:
            return f"{key} is {found!r} instead of {value!r}"
    return ""


def _read(agent: bytes) -> dict[str, Any]:
    """What an agent says; nothing if somebody has broken it, which launchd will complain about."""
    try:
        read = plistlib.loads(agent)
    except (plistlib.InvalidFileException, ExpatError):
        return {}
    return read if isinstance(read, dict) else {}
