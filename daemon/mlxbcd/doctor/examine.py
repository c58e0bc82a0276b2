"""Owns the examination: every check in the order in which their faults explain each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mlxbcd.doctor import history, keeping, machine, models, reach, settings
from mlxbcd.doctor.findings import Check, Finding, note
from mlxbcd.doctor.patient import Patient

CHECKS: Final[tuple[Check, ...]] = (
    reach.versions,
    settings.settings,
    reach.socket,
    reach.daemon,
    keeping.service,
    models.models,
    machine.memory,
    machine.others,
    machine.device,
    history.history,
)


def examine(patient: Patient) -> Iterator[Finding]:
    """Everything that is found, as it is found. A check that fails is a finding, and the others go on."""
    for check in CHECKS:
        try:
            yield from check(patient)
        except Exception as error:
            yield note(check.__name__, f"could not be looked at: {type(error).__name__}: {error}")
