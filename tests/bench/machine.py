"""Owns the description of where a benchmark ran: processor, load, and the versions of all that was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("mlxbc", "mlx", "mlx-lm", "numpy", "tokenizers", "uvloop")


def peer_version() -> str:
    """Name and version of the peer."""
    return f"mlx-lm {version('mlx-lm')}"


def describe() -> str:
    """One line about the machine and its load right now."""
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, load {load}"


def versions() -> str:
    """One line with the version of everything whose speed shows."""
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    return ", ".join(found)


def _processor() -> str:
    if sys.platform == "darwin":
        found = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return found.stdout.strip() or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )
