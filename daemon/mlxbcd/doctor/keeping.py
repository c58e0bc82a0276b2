"""Owns examining the service: its unit is there, as this version writes it, and loaded, and how it last ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from mlxbc.errors import MlxbcError
from mlxbcd.doctor.findings import Finding, fault, note, ok
from mlxbcd.doctor.patient import Patient
from mlxbcd.service import agent, units
from mlxbcd.service.manager import State

_INSTALL: Final = "mlxbc service install"
_ENDS: Final = (
    (
        re.compile(r"oom-kill|jetsam|signal 9|SIGKILL|Killed", re.IGNORECASE),
        "the system has killed it, most likely for memory",
        "lower memory.limit, or take a smaller model: mlxbc config",
    ),
    (re.compile(r"watchdog"), "its device hung", "mlxbc service logs; a smaller model or context may help"),
    (re.compile(r"(status|code)\D*78\b"), "a setting could not work", "mlxbc config check, and mlxbc service logs"),
    (re.compile(r"(status|code)\D*70\b"), "its device failed", "mlxbc service logs"),
)
"""How daemons end, by what managers say of it: what that means, and what to do."""


def service(patient: Patient) -> Iterator[Finding]:
    """The unit and its manager."""
    manager = patient.manager()
    if manager is None:
        yield note("service", "no service manager runs for you; the daemon is started by hand")
        return
    try:
        state = manager.state()
    except (MlxbcError, OSError) as error:
        yield note("service", f"the service manager doesn't tell: {error}")
        return
    if not state.installed:
        yield note("service", "not installed: the daemon is started by hand", _INSTALL)
        return
    stale = _stale(state)
    if stale:
        yield fault("service", f"{state.unit} is not what this version would write: {stale}", _INSTALL)
    for each in state.notes:
        yield fault("service", each, _INSTALL if "service install" in each else "mlxbc service restart")
    if not state.up:
        yield fault("service", "installed, but nobody listens", "mlxbc service start")
    elif not stale:
        when = "at login" if state.at_login else "at the first connection"
        yield ok("service", f"{state.manager}, starts {when}")
    if state.ended:
        meaning, fix = next(
            ((meaning, fix) for sign, meaning, fix in _ENDS if sign.search(state.ended)),
            ("it failed", "mlxbc service logs"),
        )
        yield fault("service", f"the last daemon ended badly ({state.ended}): {meaning}", fix)


def _stale(state: State) -> str:
    """What of an installed unit differs from what this version writes, whatever was chosen at the installation."""
    try:
        content = state.unit.read_bytes()
    except OSError as error:
        return f"it can't be read ({error.strerror})"
    return agent.stale(content) if state.unit.suffix == ".plist" else units.stale(content.decode(errors="replace"))
