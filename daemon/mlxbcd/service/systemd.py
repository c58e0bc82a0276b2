"""Owns the service under systemd: a socket and a service unit of the user's own manager.

Both units are the same in both modes. With the service enabled the daemon starts at login; with only the socket
enabled, at the first connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mlxbcd.service import units
from mlxbcd.service.commands import NOT_FOUND, Commands, NoManager, Outcome, ServiceError, succeed
from mlxbcd.service.files import is_current, replace
from mlxbcd.service.manager import State
from mlxbcd.service.program import Program
from mlxbcd.service.units import SERVICE, SOCKET

_HINT: Final = "see: mlxbc service logs"
_PROPERTIES: Final = "Id,ActiveState,UnitFileState,MainPID,Result,ExecMainStatus,NeedDaemonReload"


class Systemd:
    """The user's systemd.

    Raises:
        NoManager: it doesn't run.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._directory = units.directory()
        running = self._run("show", "--property=Version")
        if running.code == NOT_FOUND:
            raise NoManager("this system has no systemd")
        if not running.ok:
            raise NoManager(f"systemd does not run for this user ({running.reason})")

    def __repr__(self) -> str:
        return f"Systemd({self._directory})"

    def install(self, program: Program) -> None:
        """See `Manager.install`."""
        wanted = {self._directory / name: unit for name, unit in units.render(program).items()}
        if not all(is_current(path, unit) for path, unit in wanted.items()):
            # Before the change: an old socket is removed only by the unit that made it.
            if self.state().up:
                self._do("stop", SOCKET, SERVICE, hint=_HINT)
            for path, unit in wanted.items():
                replace(path, unit)
            self._do("daemon-reload")
        self._do("enable", SOCKET)
        self._do("disable" if program.on_demand else "enable", SERVICE)
        self._start(at_login=not program.on_demand)

    def uninstall(self) -> bool:
        """See `Manager.uninstall`."""
        files = [path for name in (SOCKET, SERVICE) if (path := self._directory / name).exists()]
        if not files:
            return False
        self._do("disable", "--now", *(path.name for path in files), hint=_HINT)
        for path in files:
            path.unlink()
        self._do("daemon-reload")
        self._forgive()
        return True

    def start(self) -> None:
        """See `Manager.start`."""
        self._start(at_login=self._installed().at_login)

    def stop(self) -> None:
        """See `Manager.stop`."""
        self._installed()
        # The socket too, or the next connection would undo it.
        self._do("stop", SOCKET, SERVICE, hint=_HINT)

    def restart(self) -> None:
        """See `Manager.restart`. The socket goes on listening, so that clients wait instead of failing."""
        state = self._installed()
        self._start(at_login=False)
        if state.at_login or state.pid is not None:
            self._do("restart", SERVICE, hint=_HINT)

    def state(self) -> State:
        """See `Manager.state`."""
        shown = self._do("show", SOCKET, SERVICE, f"--property={_PROPERTIES}").out
        about = {block["Id"]: block for block in map(_properties, shown.split("\n\n")) if "Id" in block}
        socket, service = about.get(SOCKET, {}), about.get(SERVICE, {})
        pid = service.get("MainPID", "0")
        return State(
            manager="systemd",
            unit=self._directory / SERVICE,
            installed=all((self._directory / name).exists() for name in (SOCKET, SERVICE)),
            at_login=service.get("UnitFileState") == "enabled",
            listening=socket.get("ActiveState") == "active",
            pid=int(pid) if pid.isdigit() and int(pid) else None,
            ended=_ended(service),
            notes=tuple(_notes(socket, service)),
        )

    def logs(self, lines: int, *, follow: bool) -> int:
        """See `Manager.logs`."""
        more = ["--follow"] if follow else ["--no-pager"]
        return self._commands.show("journalctl", f"--user-unit={SERVICE}", f"--lines={lines}", *more)

    def _installed(self) -> State:
        state = self.state()
        if not state.installed:
            raise ServiceError("the service is not installed; install it with: mlxbc service install")
        return state

    def _start(self, *, at_login: bool) -> None:
        self._forgive()
        self._do("start", SOCKET, *([SERVICE] if at_login else []), hint=_HINT)

    def _forgive(self) -> None:
        """Let a person start again what has failed too often for systemd. Fails where nothing has."""
        self._run("reset-failed", SOCKET, SERVICE)

    def _run(self, *arguments: str) -> Outcome:
        return self._commands.run("systemctl", "--user", *arguments)

    def _do(self, *arguments: str, hint: str = "") -> Outcome:
        return succeed(self._commands, "systemctl", "--user", *arguments, hint=hint)


def _properties(block: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in block.splitlines() if "=" in line)


def _ended(service: Mapping[str, str]) -> str | None:
    """How the last daemon ended; None if none has since systemd read the unit, or it was well."""
    result = service.get("Result", "success")
    if result == "success":
        return None
    code = service.get("ExecMainStatus", "0")
    return f"{result}, status {code}" if code != "0" else result


def _notes(socket: Mapping[str, str], service: Mapping[str, str]) -> list[str]:
    notes = []
    if "yes" in (socket.get("NeedDaemonReload"), service.get("NeedDaemonReload")):
        notes.append("the units have changed since systemd read them; run: mlxbc service install")
    if "failed" in (socket.get("ActiveState"), service.get("ActiveState")):
        notes.append("it failed too often or for good, and is not started again; see: mlxbc service logs")
    return notes
