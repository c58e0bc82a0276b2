"""Owns what the system says about memory: how much there is, how much this process takes, and how short it is.

Each system counts in its own way. Linux tells resident and proportional pages; macOS's figure is the physical
footprint, which counts what Metal holds and is what the system judges a process by.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Protocol


class Pressure(IntEnum):
    """How short of memory the system is."""

    NORMAL = 0
    WARN = 1
    """Let go of what can be made again."""
    CRITICAL = 2
    """Take nothing more."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What this process takes, in bytes.

    Attributes:
        bytes: as the system accounts it.
        measure: the name of that measure: "rss", "pss" or "phys_footprint".
    """

    bytes: int
    measure: str


class Memory(Protocol):
    """What a system can tell. No method raises or waits."""

    def total(self) -> int:
        """Bytes that this process and all others may use together; 0 if the system doesn't say."""

    def available(self) -> int:
        """Bytes that could be had without swapping; 0 if the system doesn't say."""

    def footprint(self, *, exact: bool = False) -> Footprint:
        """What this process takes. `exact` may cost milliseconds per gigabyte."""

    def pressure(self) -> Pressure:
        """How short of memory the system is."""


def this_system() -> Memory:
    """The one that this process runs on."""
    return Darwin() if sys.platform == "darwin" else Linux()


_WARN_SHARE: Final = 0.06
_CRITICAL_SHARE: Final = 0.025
"""Of all memory, what must be available before Linux is short of it. It has no levels of its own that are always on."""
_UNLIMITED: Final = 1 << 60
"""What a control group's limit is at least if there is none."""


class Linux:
    """Linux's files. A control group's limit counts as the machine's memory where it is smaller.

    Args:
        root: where `proc` and `sys` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._group = _control_group(root)

    def __repr__(self) -> str:
        return f"Linux({self._proc}, {self._group})"

    def total(self) -> int:
        """See `Memory.total`."""
        machine, group = self._meminfo("MemTotal"), self._limit()
        return min(machine, group) if machine and group else machine or group

    def available(self) -> int:
        """See `Memory.available`."""
        machine, limit = self._meminfo("MemAvailable"), self._limit()
        if not limit or self._group is None:
            return machine
        # The pages of files that a group has read are counted, and given back when needed.
        spare = sum(_fields(self._group / "memory.stat").get(name, 0) for name in ("inactive_file", "active_file"))
        used = max(_number(self._group / "memory.current"), _number(self._group / "memory.usage_in_bytes"))
        return min(machine, max(0, limit - used + spare))

    def footprint(self, *, exact: bool = False) -> Footprint:
        """See `Memory.footprint`: resident pages; exact, with shared ones divided among who shares them."""
        if exact:
            proportional = _fields(self._proc / "self/smaps_rollup").get("Pss:", 0)
            if proportional:
                return Footprint(proportional * 1024, "pss")
        try:
            pages = int((self._proc / "self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            pages = 0
        return Footprint(pages * os.sysconf("SC_PAGE_SIZE"), "rss")

    def pressure(self) -> Pressure:
        """See `Memory.pressure`."""
        total, available = self.total(), self.available()
        if not total or available >= total * _WARN_SHARE:
            return Pressure.NORMAL
        return Pressure.CRITICAL if available < total * _CRITICAL_SHARE else Pressure.WARN

    def _meminfo(self, name: str) -> int:
        return _fields(self._proc / "meminfo").get(f"{name}:", 0) * 1024

    def _limit(self) -> int:
        """Of the control group; 0 if there is none."""
        if self._group is None:
            return 0
        limit = _number(self._group / "memory.max") or _number(self._group / "memory.limit_in_bytes")
        return limit if limit < _UNLIMITED else 0


def _control_group(root: Path) -> Path | None:
    """The directory of this process's own group, in either version of the interface."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if number == "0" and not controllers:
            candidates = [base / place.lstrip("/"), base]
        elif "memory" in controllers.split(","):
            candidates = [base / "memory" / place.lstrip("/"), base / "memory"]
        else:
            continue
        for directory in candidates:  # inside a container the path is that of the outside
            if any((directory / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                return directory
    return None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit."""
    found: dict[str, int] = {}
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    except OSError:
        pass
    return found


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of <sys/resource.h>; only one field is of interest."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in ("ri_user_time", "ri_system_time", "ri_pkg_idle_wkups")),
        *((name, ctypes.c_uint64) for name in ("ri_interrupt_wkups", "ri_pageins", "ri_wired_size")),
        *((name, ctypes.c_uint64) for name in ("ri_resident_size", "ri_phys_footprint")),
        *((name, ctypes.c_uint64) for name in ("ri_proc_start_abstime", "ri_proc_exit_abstime")),
    )


_RUSAGE_INFO_V0: Final = 0
_LEVELS: Final = {1: Pressure.NORMAL, 2: Pressure.WARN, 4: Pressure.CRITICAL}
"""Of `kern.memorystatus_vm_pressure_level`: what the dispatch source of memory pressure reports too."""


class Darwin:
    """macOS's calls.

    Args:
        library: a loaded library with the C functions; None is what is in the process already.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(None)

    def __repr__(self) -> str:
        return "Darwin()"

    def total(self) -> int:
        """See `Memory.total`."""
        return self._sysctl("hw.memsize", ctypes.c_uint64())

    def available(self) -> int:
        """See `Memory.available`. The system tells a share of the whole, of what is free or can be purged."""
        return self.total() * self._sysctl("kern.memorystatus_level", ctypes.c_uint32()) // 100

    def footprint(self, *, exact: bool = False) -> Footprint:
        """See `Memory.footprint`: always exact."""
        usage = _Usage()
        if self._library.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage)) != 0:
            return Footprint(0, "phys_footprint")
        return Footprint(int(usage.ri_phys_footprint), "phys_footprint")

    def pressure(self) -> Pressure:
        """See `Memory.pressure`."""
        level = self._sysctl("kern.memorystatus_vm_pressure_level", ctypes.c_uint32())
        return _LEVELS.get(level, Pressure.NORMAL)

    def _sysctl(self, name: str, value: Any) -> int:
        """A number that the kernel tells by name; 0 if it doesn't."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        failed = self._library.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        return 0 if failed else int(value.value)
