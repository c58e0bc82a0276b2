"""Owns service managers for tests: systemctl and launchctl as they answer, with the real ones' state and moods."""

from __future__ import annotations

import plistlib
from dataclasses import dataclass, field
from pathlib import Path

from mlxbcd.service.commands import Outcome
from mlxbcd.service.program import Program

LABEL = "org.mlxbc.daemon"


def a_program(tmp_path: Path, *, on_demand: bool = False, model: str = "smollm2") -> Program:
    """A daemon to keep running."""
    return Program(
        command=("/opt/python/bin/python3", "-P", "-m", "mlxbcd.serve.main", f"--model={model}"),
        socket=tmp_path / "run" / "mlxbc.sock",
        log_dir=tmp_path / "logs",
        environment={"MLXBC_SOCKET": str(tmp_path / "run" / "mlxbc.sock")},
        on_demand=on_demand,
    )


@dataclass
class Fake:
    """What both have: everything that was asked, and the answers to come instead of the usual ones.

    Attributes:
        said: the verb and arguments of every command that may change something.
        broken: for a verb, its next outcomes.
        shown: commands whose output went to the terminal.
        waited: seconds.
    """

    said: list[str] = field(default_factory=list)
    broken: dict[str, list[Outcome]] = field(default_factory=dict)
    shown: list[tuple[str, ...]] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def show(self, *command: str) -> int:
        self.shown.append(command)
        return 0

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)

    def _broken(self, verb: str) -> Outcome | None:
        outcomes = self.broken.get(verb)
        return outcomes.pop(0) if outcomes else None


@dataclass
class FakeSystemd(Fake):
    """The user's systemd. A started service runs at once, and a started socket listens."""

    enabled: set[str] = field(default_factory=set)
    active: set[str] = field(default_factory=set)
    read: dict[str, bytes] = field(default_factory=dict)
    directory: Path = Path("/nowhere")
    failed: str = ""

    def run(self, *command: str) -> Outcome:
        assert command[:2] == ("systemctl", "--user")
        verb, *arguments = command[2:]
        if verb != "show":
            self.said.append(" ".join((verb, *arguments)))
        if (outcome := self._broken(verb)) is not None:
            return outcome
        units = {argument for argument in arguments if not argument.startswith("-")}
        match verb:
            case "show" if arguments == ["--property=Version"]:
                return Outcome(0, "Version=252\n")
            case "show":
                return Outcome(0, "\n\n".join(self._show(unit) for unit in arguments if unit in units))
            case "daemon-reload":
                self.read = {path.name: path.read_bytes() for path in self.directory.glob("mlxbc.*")}
            case "enable" | "start" | "restart" if not units <= self.read.keys():
                return Outcome(5, err=f"Failed to {verb} unit: Unit file mlxbc.service does not exist.\n")
            case "enable":
                self.enabled |= units
            case "disable":
                self.enabled -= units
                if "--now" in arguments:
                    self.active -= units
            case "start" | "restart":
                self.active |= units
            case "stop":
                self.active -= units
            case "reset-failed" if not self.failed:
                return Outcome(1, err="Failed to reset failed state of unit mlxbc.socket: Unit not loaded.\n")
            case "reset-failed":
                self.failed = ""
            case _:
                raise AssertionError(f"systemctl has no verb {verb}")
        return Outcome(0)

    def _show(self, unit: str) -> str:
        running = unit in self.active and unit.endswith(".service")
        on_disk = self.directory / unit
        changed = unit in self.read and (not on_disk.exists() or on_disk.read_bytes() != self.read[unit])
        lines = {
            "Id": unit,
            "ActiveState": "failed" if unit == self.failed else "active" if unit in self.active else "inactive",
            "UnitFileState": "enabled" if unit in self.enabled else "disabled" if unit in self.read else "",
            "NeedDaemonReload": "yes" if changed else "no",
        }
        if unit.endswith(".service"):
            lines["MainPID"] = "4711" if running else "0"
            lines["ExecMainStatus"] = "78" if unit == self.failed else "0"
        lines["Result"] = "exit-code" if unit == self.failed else "success"
        return "\n".join(f"{name}={value}" for name, value in lines.items())


_PRINTED = """\
{target} = {{
\tactive count = 1
\tpath = /Users/someone/Library/LaunchAgents/org.mlxbc.daemon.plist
\ttype = LaunchAgent
\tstate = {state}

\tprogram = /opt/python/bin/python3
\tdefault environment = {{
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}}

\tdomain = gui/501 [100004]
\tminimum runtime = 10
\texit timeout = {window}
\truns = 1
{pid}\tlast exit code = {ended}

\tsockets = {{
\t\t"Listeners" = {{
\t\t\tsockets = 4
\t\t\tactive count = 1
\t\t\tpid = 1
\t\t}}
\t}}
}}
"""


@dataclass
class FakeLaunchd(Fake):
    """launchd for user 501. An agent that is booted out lingers for some looks, and longer for loading another one.

    Attributes:
        domains: the sessions that exist.
        loaded: the property list that each domain's agent was loaded from.
        lingers: how many looks an agent that was booted out is still there for.
        reluctant: how many loads after a bootout fail.
        window: seconds between a signal and killing, by the agent that is loaded.
        ended: how the last daemon ended, as launchd words it.
        modern: whether it says `disabled` or, as it did before, `true`.
        deaf: the daemon does not end when it is asked to.
        quiesced: how often it was asked to end.
        disabled: switched off; `enable` helps only if `stubborn` is not set, as with Login Items.
    """

    domains: set[str] = field(default_factory=lambda: {"gui/501", "user/501"})
    loaded: dict[str, dict[str, object]] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    lingers: int = 0
    reluctant: int = 0
    disabled: bool = False
    stubborn: bool = False
    window: int = 90
    ended: str = "(never exited)"
    modern: bool = True
    quiesced: int = 0
    deaf: bool = False
    _leaving: dict[str, int] = field(default_factory=dict)
    _refusals: int = 0

    def quiesce(self) -> None:
        self.quiesced += 1
        if not self.deaf:
            self.running.clear()

    def run(self, *command: str) -> Outcome:
        assert command[0] == "launchctl"
        verb, *arguments = command[1:]
        if verb not in ("print", "print-disabled"):
            self.said.append(" ".join((verb, *arguments)))
        if (outcome := self._broken(verb)) is not None:
            return outcome
        match verb, arguments:
            case "print", [target] if target in ("gui/501", "user/501"):
                there = target in self.domains
                return Outcome(0, f"{target} = {{\n}}\n") if there else Outcome(113, err="Could not find domain\n")
            case "print", [target]:
                return self._print(target.removesuffix(f"/{LABEL}"), target)
            case "print-disabled", [_domain]:
                word = (
                    ("disabled" if self.modern else "true") if self.disabled else "enabled" if self.modern else "false"
                )
                return Outcome(0, f'\tdisabled services = {{\n\t\t"{LABEL}" => {word}\n\t}}\n')
            case "enable", [_target]:
                self.disabled = self.disabled and self.stubborn
                return Outcome(0)
            case "bootstrap", [domain, plist]:
                return self._bootstrap(domain, Path(plist))
            case "bootout", [target]:
                return self._bootout(target.removesuffix(f"/{LABEL}"))
            case "kickstart", [target] if (domain := target.removesuffix(f"/{LABEL}")) in self.loaded:
                self.running.add(domain)
                return Outcome(0)
            case "kickstart", [target]:
                return Outcome(113, err=f'Could not find service "{LABEL}" in domain for {target}\n')
        raise AssertionError(f"launchctl has no such verb: {command}")

    def _print(self, domain: str, target: str) -> Outcome:
        if domain in self._leaving:
            self._leaving[domain] -= 1
            if self._leaving[domain] < 0:
                del self._leaving[domain], self.loaded[domain]
        if domain not in self.loaded:
            return Outcome(113, err=f'Could not find service "{LABEL}" in domain for user gui: 501\n')
        runs = domain in self.running
        printed = _PRINTED.format(
            target=target,
            state="running" if runs else "not running",
            pid="\tpid = 4711\n" if runs else "",
            window=self.window,
            ended=self.ended,
        )
        return Outcome(0, printed)

    def _bootstrap(self, domain: str, plist: Path) -> Outcome:
        if domain not in self.domains:
            return Outcome(125, err="Bootstrap failed: 125: Domain does not support specified action\n")
        if domain in self.loaded or self._refusals > 0:
            self._refusals -= 1
            return Outcome(5, err="Bootstrap failed: 5: Input/output error\nTry re-running the command as root.\n")
        if self.disabled:
            return Outcome(0)  # and nothing happens
        assert plist.stat().st_mode & 0o022 == 0, "launchd refuses what others may write"
        agent = plistlib.loads(plist.read_bytes())
        assert Path(agent["Sockets"]["Listeners"]["SockPathName"]).parent.is_dir(), "launchd makes no directory"
        assert Path(agent["StandardErrorPath"]).parent.is_dir()
        self.loaded[domain] = agent
        self.window = agent["ExitTimeOut"]
        if agent["RunAtLoad"]:
            self.running.add(domain)
        return Outcome(0)

    def _bootout(self, domain: str) -> Outcome:
        if domain not in self.loaded:
            return Outcome(3, err="Boot-out failed: 3: No such process\n")
        assert self.quiesced or domain not in self.running, "an old agent may kill it within seconds: ask it first"
        self.running.discard(domain)
        self._refusals = self.reluctant
        self._leaving[domain] = self.lingers
        return Outcome(36, err="Boot-out failed: 36: Operation now in progress\n") if self.lingers else Outcome(0)
