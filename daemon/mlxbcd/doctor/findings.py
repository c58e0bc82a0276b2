"""Owns what an examination finds: one line a finding, how bad it is, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from mlxbcd.doctor.patient import Patient

Check: TypeAlias = Callable[["Patient"], Iterator["Finding"]]
"""Looks at one thing. What it can't look at isn't a fault."""


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    FAULT = "fault"
    """Something doesn't work, or won't."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        about: what was looked at.
        text: what was found.
        fix: a command or a step that mends it; every fault has one.
    """

    about: str
    level: Level
    text: str
    fix: str = ""


def ok(about: str, text: str) -> Finding:
    """All is well."""
    return Finding(about, Level.OK, text)


def note(about: str, text: str, fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(about, Level.NOTE, text, fix)


def fault(about: str, text: str, fix: str) -> Finding:
    """Something is wrong, and `fix` mends it."""
    return Finding(about, Level.FAULT, text, fix)


def make_usable(wanted: Path, there: Path) -> str:
    """What gives this user a directory. Never to take over what may be anybody's, such as the root of the file system.

    Args:
        wanted: the directory.
        there: the innermost part of its path that exists.
    """
    home = Path(os.path.expanduser("~"))
    if there.is_dir() and (there == wanted or (home in there.parents and home != Path("/"))):
        return f"chown -R $(id -u) {there}"
    return f"let HOME be a directory of yours, or make {wanted} one"
