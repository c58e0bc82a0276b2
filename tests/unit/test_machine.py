"""What the system says about memory and power: Linux from made-up files, macOS from made-up calls."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxbcd.machine import memory, power
from mlxbcd.machine.memory import Footprint, Pressure
from mlxbcd.machine.power import Condition

GIB = 1 << 30
MEMINFO = "MemTotal:       {total} kB\nMemFree:  1 kB\nMemAvailable:   {available} kB\nHugePages_Total:   0\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def machine(root: Path, *, total_gib: float, available_gib: float = 4) -> memory.Linux:
    info = MEMINFO.format(total=int(total_gib * 2**20), available=int(available_gib * 2**20))
    write(root, {"proc/meminfo": info, "proc/self/statm": "900 250 100 1 0 700 0\n"})
    return memory.Linux(root)


# -- memory on Linux


@pytest.mark.parametrize("gib", [8, 16, 24, 64])
def test_linux_tells_how_much_memory_there_is(tmp_path: Path, gib: int) -> None:
    system = machine(tmp_path, total_gib=gib)
    assert (system.total(), system.available()) == (gib * GIB, 4 * GIB)
    assert system.footprint() == Footprint(250 * os.sysconf("SC_PAGE_SIZE"), "rss")


def test_shared_pages_are_divided_where_it_is_asked_exactly(tmp_path: Path) -> None:
    system = machine(tmp_path, total_gib=8)
    assert system.footprint(exact=True).measure == "rss", "an old kernel doesn't say"
    write(tmp_path, {"proc/self/smaps_rollup": "00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss: 7 kB\n"})
    assert system.footprint(exact=True) == Footprint(7 * 1024, "pss")


def test_a_control_groups_limit_is_the_machine(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/x.scope\n",
            "sys/fs/cgroup/user.slice/x.scope/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/user.slice/x.scope/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/user.slice/x.scope/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        },
    )
    system = machine(tmp_path, total_gib=64, available_gib=50)
    assert (system.total(), system.available()) == (2 * GIB, GIB + GIB // 2)


def test_an_older_control_group_is_found_and_no_limit_is_none(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {"proc/self/cgroup": "4:memory:/outside/only\n0::/\n", f"{group}/memory.limit_in_bytes": f"{2**63 - 4096}\n"},
    )
    assert machine(tmp_path, total_gib=64).total() == 64 * GIB
    write(tmp_path, {f"{group}/memory.limit_in_bytes": f"{GIB}\n", f"{group}/memory.usage_in_bytes": f"{GIB}\n"})
    limited = memory.Linux(tmp_path)
    assert (limited.total(), limited.available()) == (GIB, 0)


@pytest.mark.parametrize(
    ("available", "pressure"), [(8, Pressure.NORMAL), (0.9, Pressure.WARN), (0.3, Pressure.CRITICAL)]
)
def test_linux_is_short_of_memory_when_little_is_available(
    tmp_path: Path, available: float, pressure: Pressure
) -> None:
    assert machine(tmp_path, total_gib=16, available_gib=available).pressure() is pressure


def test_a_system_that_tells_nothing_is_not_short(tmp_path: Path) -> None:
    system = memory.Linux(tmp_path)
    assert (system.total(), system.available(), system.footprint().bytes) == (0, 0, 0)
    assert system.pressure() is Pressure.NORMAL


@pytest.mark.skipif(sys.platform != "linux", reason="this machine's own files")
def test_this_machine_tells_something_sensible() -> None:
    system = memory.this_system()
    assert 0 < system.footprint().bytes < system.total()
    assert 0 < system.footprint(exact=True).bytes < system.total()
    assert 0 < system.available() <= system.total()


# -- memory on macOS


class FakeLibrary:
    """The C functions, which answer as they are told."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = {name.replace("_", ".", 1): value for name, value in numbers.items()}
        self.footprint = 3 * GIB
        self.fails = False

    def sysctlbyname(self, name: bytes, out: Any, size: Any, new: None, length: int) -> int:
        value = out._obj
        assert (size._obj.value, new, length) == (ctypes.sizeof(value), None, 0)
        if name.decode() not in self.numbers:
            return -1
        value.value = self.numbers[name.decode()]
        return 0

    def proc_pid_rusage(self, pid: int, flavor: int, out: Any) -> int:
        assert (pid, flavor) == (os.getpid(), 0)
        # struct rusage_info_v0: a uuid of 16 bytes, then 10 numbers, of which the eighth is the footprint.
        assert ctypes.sizeof(out._obj) == 16 + 10 * 8
        numbers = (ctypes.c_uint64 * 10).from_buffer(out._obj, 16)
        numbers[7] = self.footprint
        return -1 if self.fails else 0


def test_macos_tells_its_memory_and_the_physical_footprint() -> None:
    library = FakeLibrary(hw_memsize=24 * GIB, kern_memorystatus_level=50, kern_memorystatus_vm_pressure_level=2)
    system = memory.Darwin(library)
    assert (system.total(), system.available()) == (24 * GIB, 12 * GIB)
    assert system.footprint() == Footprint(3 * GIB, "phys_footprint")
    assert system.pressure() is Pressure.WARN
    library.numbers["kern.memorystatus_vm_pressure_level"] = 4
    assert system.pressure() is Pressure.CRITICAL


def test_macos_that_tells_nothing_is_not_short() -> None:
    library = FakeLibrary()
    library.fails = True
    system = memory.Darwin(library)
    assert (system.total(), system.available(), system.footprint().bytes) == (0, 0, 0)
    assert system.pressure() is Pressure.NORMAL


# -- power on Linux

BATTERY = {"type": "Battery", "status": "Discharging"}
MAINS = {"type": "Mains", "online": "1"}


def supplies(root: Path, *found: dict[str, str]) -> power.Linux:
    for n, supply in enumerate(found):
        write(root, {f"sys/class/power_supply/S{n}/{name}": f"{text}\n" for name, text in supply.items()})
    return power.Linux(root)


@pytest.mark.parametrize(
    ("found", "on_battery"),
    [
        ([], False),
        ([MAINS], False),
        ([BATTERY], True),
        ([BATTERY, MAINS], False),
        ([BATTERY, MAINS | {"online": "0"}], True),
        ([BATTERY, {"type": "USB", "online": "1"}], False),
        ([BATTERY | {"status": "Full"}], False),
        ([BATTERY | {"scope": "Device"}, MAINS | {"online": "0"}], False),
    ],
)
def test_linux_runs_on_battery_if_one_discharges_and_nothing_supplies(
    tmp_path: Path, found: list[dict[str, str]], on_battery: bool
) -> None:
    assert supplies(tmp_path, *found).condition() == Condition(on_battery=on_battery)


@pytest.mark.parametrize(("profile", "low"), [("low-power", True), ("balanced", False), ("quiet", True)])
def test_linux_tells_its_profile(tmp_path: Path, profile: str, low: bool) -> None:
    write(tmp_path, {"sys/firmware/acpi/platform_profile": f"{profile}\n"})
    assert power.Linux(tmp_path).condition().low_power is low


@pytest.mark.parametrize(("temp", "hot"), [(60_000, False), (91_000, True), (99_000, True)])
def test_linux_is_hot_near_the_point_where_it_slows_down(tmp_path: Path, temp: int, hot: bool) -> None:
    zone = "sys/class/thermal/thermal_zone0"
    write(
        tmp_path,
        {
            f"{zone}/temp": f"{temp}\n",
            f"{zone}/trip_point_0_type": "critical\n",
            f"{zone}/trip_point_0_temp": "105000\n",
            f"{zone}/trip_point_1_type": "passive\n",
            f"{zone}/trip_point_1_temp": "95000\n",
            "sys/class/thermal/thermal_zone1/temp": "30000\n",
        },
    )
    assert power.Linux(tmp_path).condition().hot is hot


# -- power on macOS


class Function:
    """A C function with a signature to set."""

    restype: Any = None
    argtypes: Any = None

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def __call__(self, *arguments: Any) -> Any:
        return self._body(*arguments)


class FakeMac:
    """The three frameworks in one, with the numbers that an Objective-C message returns."""

    def __init__(self, source: bytes, answers: dict[bytes, int]) -> None:
        self.released: list[int] = []
        selectors = dict(enumerate(answers))
        by_name = {name: n for n, name in selectors.items()}
        self.IOPSCopyPowerSourcesInfo = Function(lambda: 11)
        self.IOPSGetProvidingPowerSourceType = Function(lambda snapshot: 22 if snapshot == 11 and source else 0)
        self.CFRelease = Function(self.released.append)
        self.CFStringGetCString = Function(lambda text, buffer, size, encoding: self._copy(buffer, source))
        self.objc_getClass = Function(lambda name: 33 if name == b"NSProcessInfo" else 0)
        self.sel_registerName = Function(by_name.__getitem__)
        self.objc_msgSend = Function(lambda receiver, selector: answers[selectors[selector]])

    @staticmethod
    def _copy(buffer: Any, source: bytes) -> bool:
        buffer.value = source
        return True


@pytest.mark.parametrize(
    ("source", "low", "thermal", "condition"),
    [
        (b"AC Power", 0, 0, Condition()),
        (b"Battery Power", 0, 1, Condition(on_battery=True)),
        (b"", 1, 3, Condition(low_power=True, hot=True)),
        (b"AC Power", 0xFF00, 2, Condition(hot=True)),
    ],
)
def test_macos_tells_its_supply_its_mode_and_its_heat(
    source: bytes, low: int, thermal: int, condition: Condition
) -> None:
    mac = FakeMac(source, {b"processInfo": 44, b"isLowPowerModeEnabled": low, b"thermalState": thermal})
    assert power.Darwin(lambda path: mac).condition() == condition
    assert mac.released == [11]
