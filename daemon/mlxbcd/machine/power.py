"""Owns what the system says about its power and its heat: whether background work should wait.

Nothing here is told by the system on its own: it is asked, and only while something runs.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol


@dataclass(frozen=True, slots=True)
class Condition:
    """How the machine is; what it doesn't tell counts as well."""

    on_battery: bool = False
    low_power: bool = False
    hot: bool = False


class Power(Protocol):
    """What a system can tell."""

    def condition(self) -> Condition:
        """How it is now. May wait for the hardware; never raises."""


def this_system() -> Power:
    """The one that this process runs on."""
    return Darwin() if sys.platform == "darwin" else Linux()


_HOT_BELOW: Final = 5_000
"""Thousandths of a degree below the temperature at which the kernel slows the machine down."""
_SAVING: Final = frozenset({"low-power", "quiet", "cool"})


class Linux:
    """Linux's files.

    Args:
        root: where `sys` is.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._sys = root / "sys"

    def __repr__(self) -> str:
        return f"Linux({self._sys})"

    def condition(self) -> Condition:
        """See `Power.condition`."""
        return Condition(
            on_battery=self._on_battery(),
            low_power=_text(self._sys / "firmware/acpi/platform_profile") in _SAVING,
            hot=any(_is_hot(zone) for zone in _under(self._sys / "class/thermal", "thermal_zone*")),
        )

    def _on_battery(self) -> bool:
        """A battery of the system discharges, and no supply is on line. A mouse's battery is not the system's."""
        discharging = False
        for supply in _under(self._sys / "class/power_supply", "*"):
            kind = _text(supply / "type")
            if kind == "Battery" and _text(supply / "scope") != "Device":
                discharging = discharging or _text(supply / "status") == "Discharging"
            elif kind in ("Mains", "USB") and _text(supply / "online") == "1":
                return False
        return discharging


def _is_hot(zone: Path) -> bool:
    """A zone is near or over its first passive trip point, where the kernel begins to slow the machine down."""
    limits = [
        _number(kind.with_name(kind.name.replace("_type", "_temp")))
        for kind in _under(zone, "trip_point_*_type")
        if _text(kind) in ("passive", "hot")
    ]
    limit = min((limit for limit in limits if limit > 0), default=0)
    return bool(limit) and _number(zone / "temp") >= limit - _HOT_BELOW


def _under(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else 0


_BATTERY: Final = b"Battery Power"
"""`kIOPSBatteryPowerValue` of <IOKit/ps/IOPSKeys.h>; the other kinds are AC and an uninterruptible supply."""
_UTF8: Final = 0x08000100
_SERIOUS: Final = 2
"""`NSProcessInfoThermalStateSerious`; nominal and fair are below it, critical above."""


class Darwin:
    """macOS's calls: IOKit's power sources, and `NSProcessInfo` through the Objective-C runtime.

    Args:
        load: loads a library by its path; None is ctypes' own way.
    """

    def __init__(self, load: Any = None) -> None:
        load = load or ctypes.CDLL
        frameworks = "/System/Library/Frameworks"
        self._iokit = load(f"{frameworks}/IOKit.framework/IOKit")
        self._cf = load(f"{frameworks}/CoreFoundation.framework/CoreFoundation")
        load(f"{frameworks}/Foundation.framework/Foundation")
        self._objc = load("/usr/lib/libobjc.A.dylib")
        for function, result, arguments in (
            (self._iokit.IOPSCopyPowerSourcesInfo, ctypes.c_void_p, []),
            (self._iokit.IOPSGetProvidingPowerSourceType, ctypes.c_void_p, [ctypes.c_void_p]),
            (self._cf.CFRelease, None, [ctypes.c_void_p]),
            (
                self._cf.CFStringGetCString,
                ctypes.c_bool,
                [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_uint32],
            ),
            (self._objc.objc_getClass, ctypes.c_void_p, [ctypes.c_char_p]),
            (self._objc.sel_registerName, ctypes.c_void_p, [ctypes.c_char_p]),
            (self._objc.objc_msgSend, ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
        ):
            function.restype, function.argtypes = result, arguments

    def __repr__(self) -> str:
        return "Darwin()"

    def condition(self) -> Condition:
        """See `Power.condition`."""
        process = self._send(self._objc.objc_getClass(b"NSProcessInfo"), b"processInfo")
        return Condition(
            on_battery=self._source() == _BATTERY,
            # A BOOL fills one byte of what is returned; the rest is undefined.
            low_power=bool((self._send(process, b"isLowPowerModeEnabled") or 0) & 0xFF),
            hot=(self._send(process, b"thermalState") or 0) >= _SERIOUS,
        )

    def _source(self) -> bytes:
        """The kind of supply that the machine runs on; empty if the system doesn't say."""
        snapshot = self._iokit.IOPSCopyPowerSourcesInfo()
        if not snapshot:
            return b""
        try:
            kind = self._iokit.IOPSGetProvidingPowerSourceType(snapshot)
            text = ctypes.create_string_buffer(64)
            known = kind and self._cf.CFStringGetCString(kind, text, len(text), _UTF8)
            return text.value if known else b""
        finally:
            self._cf.CFRelease(snapshot)

    def _send(self, receiver: Any, selector: bytes) -> Any:
        return self._objc.objc_msgSend(receiver, self._objc.sel_registerName(selector))
