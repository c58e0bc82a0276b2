"""Owns examining the settings: the file, the variables, and what a running daemon has not taken over."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from mlxbc.errors import ConfigError
from mlxbcd.config.settings import KEYS
from mlxbcd.doctor.findings import Finding, fault, note, ok
from mlxbcd.doctor.patient import Patient

_OTHERS: Final = {"MLXBC_SOCKET", "MLXBC_DATA", "MLXBC_CONFIG", "MLXBC_HTTP_TOKEN"}
"""Variables that are no settings of the daemon."""


def settings(patient: Patient) -> Iterator[Finding]:
    """What a daemon would take, and what the running one has."""
    try:
        config = patient.config()
    except ConfigError as error:
        yield fault("settings", str(error), "mlxbc config check, once it is corrected")
    else:
        assert config.file is not None
        yield ok("settings", f"{config.file}{'' if config.file.exists() else ' (not there: all defaults)'}")
    known = {key.variable for key in KEYS.values()} | _OTHERS
    for name in sorted(patient.environ):
        if name.startswith("MLXBC_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "unset it"
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
