"""Owns the choice of the service manager, and what every one of them can do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mlxbcd.serve.listen import holder
from mlxbcd.service.commands import Commands, NoManager, ServiceError, Shell
from mlxbcd.service.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How the service is.

    Attributes:
        manager: which one, for people.
        unit: the file that is or would be installed.
        installed: it is there.
        at_login: it starts at login instead of at the first connection.
        listening: the manager holds the socket, so that a connection starts the daemon if need be.
        pid: the daemon, if it runs.
        ended: how the last daemon ended, where the manager knows.
        notes: what the user should know or do.
    """

    manager: str
    unit: Path
    installed: bool = False
    at_login: bool = False
    listening: bool = False
    pid: int | None = None
    ended: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        """A client that connects is answered."""
        return self.listening or self.pid is not None


class Manager(Protocol):
    """A service manager of this user. Every method may raise `ServiceError` or `OSError`."""

    def install(self, program: Program) -> None:
        """Write the unit, and start as it says. If that is how it is already nothing changes; a daemon that runs by
        another unit is stopped first."""

    def uninstall(self) -> bool:
        """Stop it and remove the unit; False if there was none."""

    def start(self) -> None:
        """Start what is installed: the daemon, or only listening for the first connection."""

    def stop(self) -> None:
        """Stop the daemon and listening, until the next login or `start`."""

    def restart(self) -> None:
        """Replace the daemon."""

    def state(self) -> State:
        """How it is."""

    def logs(self, lines: int, *, follow: bool) -> int:
        """Show the end of the log; an exit code."""


def this_system(
    quiesce: Callable[[], None], *, commands: Commands | None = None, platform: str = sys.platform
) -> Manager:
    """The service manager of this system.

    Args:
        quiesce: asks the running daemon to end, and waits for that as long as is reasonable. Never raises.

    Raises:
        NoManager: none runs for this user.
    """
    commands = commands or Shell()
    if platform == "darwin":
        from mlxbcd.service.launchd import Launchd

        return Launchd(commands, os.getuid(), quiesce)
    if platform.startswith("linux"):
        from mlxbcd.service.systemd import Systemd

        return Systemd(commands)
    raise NoManager(f"neither launchd nor systemd is to be expected on {platform}")


def refuse_stranger(path: Path, state: State) -> None:
    """Nobody but the service may serve `path`: a manager that starts to listen there would cut the other daemon off.

    Raises:
        ServiceError: a daemon that the manager doesn't know serves there.
    """
    other = holder(path)
    if other is not None and other != state.pid:
        raise ServiceError(f"a daemon that is not the service's (pid {other}) serves {path}; end it first: mlxbc stop")
