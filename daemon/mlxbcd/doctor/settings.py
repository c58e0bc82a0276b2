"""Owns examining the settings: the file, the variables, and what a running daemon has not taken over."""

from __future__ import annotations

from collections.abc import Iterator

from mlxbc import variables
from mlxbc.errors import ConfigError
from mlxbcd.doctor.findings import Finding, fault, note, ok
from mlxbcd.doctor.patient import Patient


def settings(patient: Patient) -> Iterator[Finding]:
    """What a daemon would take, and what the running one has."""
    try:
        config = patient.config()
    except ConfigError as error:
        yield fault("settings", str(error), "mlxbc config check, once it is corrected")
    else:
        assert config.file is not None
        yield ok("settings", f"{config.file}{'' if config.file.exists() else ' (not there: all defaults)'}")
    for name in sorted(patient.environ):
        if name.startswith(variables.PREFIX) and name not in variables.OWN | variables.SETTINGS:
            near = variables.near(name)
            hint = f"did you mean {near}?" if near else "unset it, unless another program reads it"
            yield note("settings", f"nothing reads the variable {name}", hint)
    running = patient.answer.settings
    if running is None:
        return
    if running.error:
        yield fault(
            "settings", f"the daemon goes on with older settings: {running.error}", "mlxbc config check, then reload"
        )
    if running.waiting:
        yield note("settings", f"a new value waits for a restart: {', '.join(running.waiting)}", "restart the daemon")
