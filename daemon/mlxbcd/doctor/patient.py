"""Owns everything that an examination looks at: gathered from this machine, or made up by a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxbc import paths, wire
from mlxbc.errors import ConfigError, MlxbcError
from mlxbcd.config.sources import Config, load
from mlxbcd.machine.system import Machine, this_machine
from mlxbcd.service.commands import Commands, NoManager, Shell
from mlxbcd.service.manager import Manager, this_system


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the daemon said, as far as it said anything.

    Attributes:
        error: why it said no more.
        absent: nobody listens.
    """

    welcome: wire.Welcome | None = None
    status: wire.StatusReport | None = None
    settings: wire.Settings | None = None
    error: str = ""
    absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is examined.

    Attributes:
        version: of this command.
        answer: of the daemon.
        probe_daemon: seconds of the device's test piece in the daemon; None where no daemon can do it.
        probe_here: the same in this process; None to leave it out.
        processes: pid and command line of every process.
    """

    version: str
    answer: Answer
    machine: Machine
    commands: Commands
    probe_daemon: Callable[[], float] | None = None
    probe_here: Callable[[], float] | None = None
    processes: Callable[[], Sequence[tuple[int, str]]] = lambda: ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    platform: str = sys.platform

    def socket(self) -> Path:
        """Where the daemon should listen.

        Raises:
            ConfigError: no path can work.
        """
        return paths.socket_path(self.platform)

    def config(self) -> Config:
        """The settings that a daemon started from here would take.

        Raises:
            ConfigError: they are wrong.
        """
        return load(environ=self.environ)

    def manager(self) -> Manager | None:
        """The service manager; None if there is none."""
        try:
            return this_system(lambda: None, commands=self.commands, platform=self.platform)
        except (NoManager, MlxbcError):
            return None

    def log(self) -> Path:
        """The log of a daemon that has no terminal, and isn't told otherwise."""
        try:
            chosen = self.config().settings.log_file
        except ConfigError:
            chosen = None
        return chosen or paths.log_dir(self.platform) / "mlxbcd.log"


def this_patient(
    version: str,
    answer: Answer,
    probe_daemon: Callable[[], float] | None,
    probe_here: Callable[[], float] | None,
) -> Patient:
    """This machine and this user."""
    shell = Shell()
    return Patient(
        version=version,
        answer=answer,
        machine=this_machine(),
        commands=shell,
        probe_daemon=probe_daemon,
        probe_here=probe_here,
        processes=lambda: running(shell),
    )


def running(commands: Commands) -> list[tuple[int, str]]:
    """Every process of this user, by the system's own command."""
    found = []
    for line in commands.run("ps", "-U", str(os.getuid()), "-o", "pid=,command=").out.splitlines():
        pid, _, command = line.strip().partition(" ")
        if pid.isdigit():
            found.append((int(pid), command.strip()))
    return found
