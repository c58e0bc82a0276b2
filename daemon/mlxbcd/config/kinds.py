"""Owns the kinds of values that a setting can have: how each is read from TOML or from text, and shown again."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

FOREVER: Final = math.inf
"""A duration without end."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?B|B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{binary}b": (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for binary in ("", "i")
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_WORDS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value.

    Attributes:
        expects: what a value looks like, for a person.
        read: makes the value of what TOML gives; ValueError if that isn't one.
        of_text: what TOML would give for the text of a variable or of an option.
        show: the value as it is written in TOML.
    """

    expects: str
    read: Callable[[object], T]
    of_text: Callable[[str], object]
    show: Callable[[T], str]


def flag() -> Kind[bool]:
    """True or false."""

    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise ValueError

    def of_text(text: str) -> object:
        return _WORDS.get(text.strip().lower(), text)

    return Kind("true or false", read, of_text, lambda value: "true" if value else "false")


def choice(*names: str) -> Kind[str]:
    """One of a few words."""

    def read(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        raise ValueError

    return Kind(" or ".join(f'"{name}"' for name in names), read, _itself, quoted)


def text(expects: str, *, longest: int = 1024) -> Kind[str | None]:
    """A printable text; an empty one is None."""

    def read(value: object) -> str | None:
        if isinstance(value, str) and value.isprintable() and len(value) <= longest:
            return value or None
        raise ValueError

    return Kind(expects, read, _itself, lambda value: quoted(value or ""))


def layout(*names: str) -> Kind[str]:
    """One of a few words, or a text with the blanks {prefix} and {suffix}."""

    def read(value: object) -> str:
        if isinstance(value, str) and (value in names or _is_layout(value)):
            return value
        raise ValueError

    listed = " or ".join(f'"{name}"' for name in names)
    return Kind(f'{listed}, or tokens around "{{prefix}}" and "{{suffix}}"', read, _itself, quoted)


def _is_layout(value: str) -> bool:
    return value.isprintable() and len(value) <= 1024 and value.count("{prefix}") == value.count("{suffix}") == 1


def path() -> Kind[Path | None]:
    """An absolute path; an empty one is None."""

    def read(value: object) -> Path | None:
        if isinstance(value, str) and (not value or (value.startswith(("/", "~/")) and value.isprintable())):
            return Path(os.path.expanduser(value)) if value else None
        raise ValueError

    return Kind("an absolute path", read, _itself, lambda value: quoted(str(value or "")))


def count(least: int, most: int) -> Kind[int]:
    """A whole number within bounds."""

    def read(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        raise ValueError

    return Kind(f"a whole number from {least} to {most}", read, _whole, str)


def size(*, auto: bool = False, zero: bool = False) -> Kind[int | None]:
    """A number of bytes; with `auto`, None leaves it to the daemon, and without `zero` it is above that."""

    def read(value: object) -> int | None:
        if auto and value == "auto":
            return None
        if isinstance(value, int) and not isinstance(value, bool) and (0 if zero else 1) <= value < 2**63:
            return value
        found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        bytes_ = float(found[1]) * _UNITS[(found[2] or "").lower()] if found else 0.0
        if not 1 <= bytes_ < 2**63:
            raise ValueError
        return int(bytes_)

    expects = 'bytes, as a number or a text such as "8GB" or "512MiB"' + (', or "auto"' if auto else "")
    return Kind(expects, read, _whole, show_size)


def duration() -> Kind[float]:
    """Seconds; `FOREVER` has no end."""

    def read(value: object) -> float:
        if value == "forever":
            return FOREVER
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
            return float(value)
        found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None or (seconds := float(found[1]) * _SECONDS[found[2] or ""]) >= 1e9:
            raise ValueError
        return seconds

    return Kind('seconds, or a text such as "30s", "5m", "2h" or "forever"', read, _itself, show_duration)


def show_size(value: int | None) -> str:
    """A size as it is written in TOML: with the largest unit that leaves no fraction."""
    if value is None:
        return '"auto"'
    units = ((factor, name) for name, factor in _UNITS.items() if name)
    factor, name = max((factor, name) for factor, name in units if value % factor == 0)
    # "kib" is KiB, and "kb" kB: as people write them.
    name = {"b": "B", "kb": "kB"}.get(name) or name[0].upper() + name[1:-1] + "B"
    return str(value) if factor == 1 else f'"{value // factor}{name}"'


def show_duration(value: float) -> str:
    """A duration as it is written in TOML."""
    if value == FOREVER:
        return '"forever"'
    for unit in ("d", "h", "m"):
        if value and value % _SECONDS[unit] == 0:
            return f'"{value / _SECONDS[unit]:.0f}{unit}"'
    return f'"{value:.0f}s"' if value == int(value) else f'"{value}s"'


def quoted(value: str) -> str:
    """A basic string of TOML. Settings hold no control characters."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _itself(value: str) -> object:
    return value


def _whole(value: str) -> object:
    stripped = value.strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() and len(stripped) < 20 else value
