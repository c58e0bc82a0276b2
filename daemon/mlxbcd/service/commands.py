"""Owns running a service manager's own command line, and saying what went wrong with it."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from typing import Final, Protocol

from mlxbc.errors import ConfigError, MlxbcError

PATIENCE_S: Final = 180.0
"""How long one command may take: starting and stopping wait for the daemon."""

NOT_FOUND: Final = 127
TIMED_OUT: Final = 124
"""Exit codes of commands that did not run to their end, as shells have them."""


class ServiceError(MlxbcError):
    """The service manager could not do it."""


class NoManager(ConfigError):
    """There is no service manager for this user.

    Attributes:
        reason: how that showed.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}; without a service manager start the daemon with: mlxbc serve --detach --wait")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        """It succeeded."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """What it complained of, on one line."""
        return " ".join((self.err or self.out).split()) or f"exit code {self.code}"


class Commands(Protocol):
    """Runs commands. Everything that the service commands do to a manager goes through here."""

    def run(self, *command: str) -> Outcome:
        """Run to the end, without input. A command that is missing or hangs is an outcome too."""

    def show(self, *command: str) -> int:
        """Run with its output where ours goes, until it ends or the user interrupts it; the exit code."""

    def wait(self, seconds: float) -> None:
        """Let some time pass."""


class Shell:
    """Runs commands for real."""

    def run(self, *command: str) -> Outcome:
        """See `Commands.run`."""
        environment = {**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
        try:
            ended = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                timeout=PATIENCE_S,
                check=False,
            )
        except FileNotFoundError:
            return Outcome(NOT_FOUND, err=f"there is no command {command[0]}")
        except subprocess.TimeoutExpired:
            return Outcome(TIMED_OUT, err=f"{' '.join(command)} has not ended within {PATIENCE_S:.0f} s")
        return Outcome(ended.returncode, ended.stdout, ended.stderr)

    def show(self, *command: str) -> int:
        """See `Commands.show`."""
        try:
            return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        except FileNotFoundError:
            raise ServiceError(f"there is no command {command[0]} to show the log with") from None

    def wait(self, seconds: float) -> None:
        """See `Commands.wait`."""
        time.sleep(seconds)


def succeed(commands: Commands, *command: str, hint: str = "") -> Outcome:
    """Run a command that has to succeed.

    Args:
        hint: what the user may do if it doesn't.

    Raises:
        ServiceError: it failed.
    """
    outcome = commands.run(*command)
    if not outcome.ok:
        raise ServiceError(f"{' '.join(command)} failed: {outcome.reason}" + (f"; {hint}" if hint else ""))
    return outcome
