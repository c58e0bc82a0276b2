"""Owns the service under launchd: one agent that holds the socket and starts the daemon.

launchd is told what to do by `launchctl`, most of whose verbs return before they are done, and whose error 5 means many
things. So what was asked for is looked at afterwards. Nothing here kills: a daemon that is killed can leave the memory
of its models wired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from mlxbcd.service import agent
from mlxbcd.service.commands import NOT_FOUND, Commands, NoManager, Outcome, ServiceError, succeed
from mlxbcd.service.files import is_current, private_directory, replace
from mlxbcd.service.manager import State
from mlxbcd.service.program import Program

EXIT_TIMEOUT_S: Final = 90
"""`ExitTimeOut` of the agent."""

_POLL_S: Final = 0.5
_POLLS: Final = int((EXIT_TIMEOUT_S + 10) / _POLL_S)
_RETRIES_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""How long to wait before trying again to load an agent that launchd is still letting go."""

_GONE: Final = frozenset({0, 3, 36, 113})
"""Of `bootout`: done, no such process, in progress, no such service. Only looking tells when it is over."""
_NOT_YET: Final = frozenset({5, 37})
"""Of `bootstrap`: input/output error, in progress."""

_FIELD: Final = re.compile(r"^\t(\w[\w ]*) = (.*)$", re.MULTILINE)
"""A field of the service itself in what `print` shows; those of its parts are indented further."""

_LOGIN_ITEMS: Final = (
    "it is switched off in System Settings > General > Login Items; allow it there, then run: mlxbc service start"
)


class Launchd:
    """The user's launchd.

    Args:
        uid: the user.
        quiesce: asks the running daemon to end, and waits for that as long as is reasonable. An agent that an older
            version has loaded may allow only seconds between a signal and killing, so the daemon is asked first.

    Raises:
        NoManager: there is no launchctl.
    """

    def __init__(self, commands: Commands, uid: int, quiesce: Callable[[], None]) -> None:
        self._commands = commands
        self._quiesce = quiesce
        self._plist = agent.directory() / agent.FILE
        # The session on the screen if there is one, also when asked over ssh; else the one that ssh itself makes.
        self._gui, self._user = f"gui/{uid}", f"user/{uid}"
        found = self._run("print", self._gui)
        if found.code == NOT_FOUND:
            raise NoManager("this system has no launchctl")
        self._domain = self._gui if found.ok else self._user

    def __repr__(self) -> str:
        return f"Launchd({self._domain}, {self._plist})"

    def install(self, program: Program) -> None:
        """See `Manager.install`."""
        # launchd makes neither, and fails without saying so.
        private_directory(program.socket.parent)
        private_directory(program.log_dir)
        session = agent.AQUA if self._domain == self._gui else agent.BACKGROUND
        wanted = agent.render(program, session)
        changed = not is_current(self._plist, wanted)
        loaded = self._loaded()
        # An agent that is loaded goes on as it was read; only loading it again reads the file.
        if loaded is not None and (changed or loaded != self._domain):
            self._bootout(loaded)
        if changed:
            replace(self._plist, wanted)
        self._start()

    def uninstall(self) -> bool:
        """See `Manager.uninstall`."""
        loaded = self._loaded()
        if loaded is not None:
            self._bootout(loaded)
        elif not self._plist.exists():
            return False
        self._plist.unlink(missing_ok=True)
        return True

    def start(self) -> None:
        """See `Manager.start`."""
        self._installed()
        self._start()

    def stop(self) -> None:
        """See `Manager.stop`."""
        self._installed()
        loaded = self._loaded()
        if loaded is not None:
            self._bootout(loaded)

    def restart(self) -> None:
        """See `Manager.restart`."""
        self.stop()
        self._start()

    def state(self) -> State:
        """See `Manager.state`."""
        loaded = self._loaded()
        installed = self._plist.exists()
        fields = {} if loaded is None else self._fields(loaded)
        return State(
            manager=f"launchd ({loaded or self._domain})",
            unit=self._plist,
            installed=installed,
            at_login=installed and agent.starts_at_login(self._plist.read_bytes()),
            listening=loaded is not None,
            pid=_pid(fields),
            ended=_ended(fields),
            notes=tuple(self._notes(fields)),
        )

    def logs(self, lines: int, *, follow: bool) -> int:
        """See `Manager.logs`."""
        self._installed()
        files = [str(path) for path in agent.logs(self._plist.read_bytes()) if path.exists()]
        if not files:
            raise ServiceError("the service has not logged anything yet")
        return self._commands.show("tail", "-n", str(lines), *(["-F"] if follow else []), *files)

    # -- one step each

    def _installed(self) -> None:
        if not self._plist.exists():
            raise ServiceError("the service is not installed; install it with: mlxbc service install")

    def _start(self) -> None:
        """Load the agent if it isn't, and start the daemon if the agent is one that runs from login on."""
        loaded = self._loaded()
        if loaded is None:
            self._bootstrap()
        elif agent.starts_at_login(self._plist.read_bytes()) and _pid(self._fields(loaded)) is None:
            succeed(self._commands, "launchctl", "kickstart", _target(loaded), hint="see: mlxbc service logs")

    def _bootstrap(self) -> None:
        # Undoes `launchctl disable`. What was switched off in the settings stays off; loading would fail or do nothing.
        self._run("enable", _target(self._domain))
        if self._disabled():
            raise ServiceError(_LOGIN_ITEMS)
        for delay in (*_RETRIES_S, None):
            outcome = self._run("bootstrap", self._domain, str(self._plist))
            if self._is_loaded(self._domain):
                return
            if delay is None or not (outcome.ok or outcome.code in _NOT_YET):
                raise ServiceError(f"launchd does not load {self._plist}: {self._why(outcome)}")
            self._commands.wait(delay)

    def _why(self, outcome: Outcome) -> str:
        if outcome.ok:
            return "it says that it did, but the agent is not there"
        if self._domain == self._user:
            return f"{outcome.reason}; nobody is logged in on the screen, and without that launchd may refuse agents"
        return outcome.reason

    def _bootout(self, domain: str) -> None:
        if _pid(self._fields(domain)) is not None:
            self._quiesce()
        outcome = self._run("bootout", _target(domain))
        if outcome.code not in _GONE:
            raise ServiceError(f"launchd does not let go of the service: {outcome.reason}")
        for _ in range(_POLLS):
            if not self._is_loaded(domain):
                return
            self._commands.wait(_POLL_S)
        raise ServiceError(f"the daemon is still ending after {_POLLS * _POLL_S:.0f} s; try again later")

    def _loaded(self) -> str | None:
        """The domain that the agent is loaded in."""
        return next((domain for domain in (self._gui, self._user) if self._is_loaded(domain)), None)

    def _is_loaded(self, domain: str) -> bool:
        return self._run("print", _target(domain)).ok

    def _fields(self, domain: str) -> dict[str, str]:
        return dict(_FIELD.findall(self._run("print", _target(domain)).out))

    def _disabled(self) -> bool:
        listed = self._run("print-disabled", self._domain).out
        return re.search(rf'"{re.escape(agent.LABEL)}" => (disabled|true)\b', listed) is not None

    def _notes(self, fields: Mapping[str, str]) -> list[str]:
        notes = []
        if self._disabled():
            notes.append(_LOGIN_ITEMS)
        window = fields.get("exit timeout", "")
        if window.isdigit() and int(window) < EXIT_TIMEOUT_S:
            notes.append(
                f"launchd has loaded an older agent, which kills the daemon after {window} s; "
                f"run: mlxbc service restart"
            )
        return notes

    def _run(self, *arguments: str) -> Outcome:
        return self._commands.run("launchctl", *arguments)


def _target(domain: str) -> str:
    return f"{domain}/{agent.LABEL}"


def _pid(fields: Mapping[str, str]) -> int | None:
    pid = fields.get("pid", "")
    return int(pid) if pid.isdigit() else None


def _ended(fields: Mapping[str, str]) -> str | None:
    """How the last daemon ended, if that was neither well nor never."""
    for name in ("last terminating signal", "last exit code"):
        value = fields.get(name, "0")
        if value not in ("0", "(never exited)"):
            return f"{name.removeprefix('last ')} {value}"
    return None
