"""Owns the machine as a whole: who tells about its memory and who about its power."""

from __future__ import annotations

from dataclasses import dataclass

from mlxbcd.machine import memory, power
from mlxbcd.machine.memory import Memory
from mlxbcd.machine.power import Power


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be asked about a machine."""

    memory: Memory
    power: Power


def this_machine() -> Machine:
    """The one that this process runs on."""
    return Machine(memory.this_system(), power.this_system())
