"""Owns examining the machine: its memory and its limits, other servers that want the same, and what the device does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from mlxbc.errors import ConfigError
from mlxbcd.doctor.findings import Finding, fault, note, ok
from mlxbcd.doctor.patient import Patient
from mlxbcd.engine.budget import limits
from mlxbcd.machine.memory import Pressure

_SERVERS: Final = frozenset(
    {
        *("mlx_lm.server", "mlx_vlm.server", "mlx-openai-server", "mlx-omni-server", "vllm-mlx", "omlx", "rapid-mlx"),
        *("llama-server", "ollama", "LM Studio", "mlxbcd", "mlxbcd.serve.main"),
    }
)
"""Programs that keep models in memory too, by their names or by Python's modules."""
_SLOW: Final = 2.5
"""The same piece may take this many times longer in the daemon before something is wrong."""


def memory(patient: Patient) -> Iterator[Finding]:
    """How much there is, how much the daemon may take, and whether the system is short."""
    system = patient.machine.memory
    total, pressure = system.total(), system.pressure()
    try:
        settings = patient.config().settings
    except ConfigError:
        return
    wanted = settings.memory_limit
    if wanted is not None and total and wanted > 0.9 * total:
        yield fault(
            "memory",
            f"memory.limit is {wanted / 1e9:.1f} GB of the machine's {total / 1e9:.1f} GB: the system would run dry",
            "set memory.limit to auto, or to three quarters of the memory",
        )
        return
    allowed = limits(total, wanted=wanted, cache=settings.memory_cache)
    if pressure is not Pressure.NORMAL:
        words = "out of memory" if pressure is Pressure.CRITICAL else "short of memory"
        yield fault("memory", f"the system is {words}", "close other programs, or drop models: mlxbc ps, mlxbc unload")
        return
    footprint = patient.answer.status
    taken = f", {footprint.footprint / 1e9:.1f} GB taken ({footprint.footprint_measure})" if footprint else ""
    yield ok("memory", f"{total / 1e9:.0f} GB, of which models may take {allowed.budget / 1e9:.1f} GB{taken}")
    if settings.memory_wired == "weights" and patient.platform == "darwin":
        yield note(
            "memory",
            "the weights are wired; if the system's own limit is too low for them, an administrator can raise it",
            "sudo sysctl iogpu.wired_limit_mb=N",
        )


def others(patient: Patient) -> Iterator[Finding]:
    """Other programs that keep models in memory: together with them there may be too little."""
    own = {os.getpid(), patient.answer.welcome.pid if patient.answer.welcome else 0}
    found = [(pid, program(command)) for pid, command in patient.processes() if pid not in own]
    found = [(pid, name) for pid, name in found if name in _SERVERS]
    for pid, name in found:
        what = f"process {pid} ({name}) keeps models in memory beside this daemon"
        if name.startswith("mlxbcd"):
            # Whoever has set MLXBC_SOCKET wanted one more.
            yield note("others", f"{what}: it serves another socket")
        else:
            yield fault("others", what, f"stop it if it isn't needed: kill {pid}")
    if not found:
        yield ok("others", "no other model server runs")


def program(command: str) -> str:
    """What a command line runs: a program's name, or the module or script of a Python."""
    head = command.partition(" --")[0]
    words = head.split()
    name = os.path.basename(words[0]) if words else ""
    if "LM Studio" in head:
        return "LM Studio"
    if name.lower().startswith("python"):
        if "-m" in words and words.index("-m") + 1 < len(words):
            at = words.index("-m") + 1
            return ".".join(words[at : at + 2]) if words[at] in ("mlx_lm", "mlx_vlm") else words[at]
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        name, words = os.path.basename(script), words[1:]
    if name in ("mlx_lm", "mlx_vlm") and len(words) > 1:
        return f"{name}.{words[1]}"
    return name


def device(patient: Patient) -> Iterator[Finding]:
    """A test piece in the daemon and in this process: a service manager may throttle one and not the other."""
    if patient.probe_here is None or patient.probe_daemon is None:
        return
    if patient.answer.status is not None and patient.answer.status.running:
        yield note("device", "requests run, so the device was not tried")
        return
    there, here = patient.probe_daemon(), patient.probe_here()
    ratio = there / max(here, 1e-9)
    text = f"a test piece takes {there * 1e3:.1f} ms in the daemon and {here * 1e3:.1f} ms here"
    if ratio > _SLOW:
        yield fault(
            "device", f"{text}: the daemon is throttled, or something else takes the machine", "mlxbc service install"
        )
    else:
        yield ok("device", text)
