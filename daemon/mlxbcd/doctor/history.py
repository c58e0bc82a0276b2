"""Owns examining the log: whether it can be written, is private, and what went wrong of late."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mlxbcd.doctor.findings import Finding, fault, make_usable, note, ok
from mlxbcd.doctor.patient import Patient

_TAIL_BYTES: Final = 64 * 1024
_SHOWN: Final = 3
_ERROR: Final = re.compile(r"^\S+ \S+ (ERROR|CRITICAL) \S+: (.*)$")
_CRASH: Final = re.compile(r"^Fatal Python error|^Segmentation fault|^\*\*\* ")


def history(patient: Patient) -> Iterator[Finding]:
    """The end of the log."""
    path = patient.log()
    directory = next((one for one in path.parents if one.exists()), Path("/"))
    if not os.access(directory, os.W_OK | os.X_OK):
        yield fault("log", f"{directory} can't be written by you", make_usable(path.parent, directory))
        return
    try:
        found = path.stat()
        with path.open("rb") as file:
            file.seek(max(0, found.st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        yield ok("log", f"nothing in {path} yet")
        return
    except OSError as error:
        yield fault("log", f"{path} can't be read: {error.strerror}", f"chown $(id -u) {path}")
        return
    if found.st_mode & 0o077:
        yield fault("log", f"others may read {path} (mode {stat.S_IMODE(found.st_mode):04o})", f"chmod 600 {path}")
    errors = [text for line in _since_the_last_start(lines) if (text := _error(line))]
    for text in errors[-_SHOWN:]:
        yield note("log", f"since the last start: {text}", f"tail {path}")
    if not errors:
        yield ok("log", f"no errors since the last start in {path}")


def _since_the_last_start(lines: list[str]) -> list[str]:
    starts = [place for place, line in enumerate(lines) if "listening on" in line]
    return lines[starts[-1] :] if starts else lines


def _error(line: str) -> str:
    """The message of a line that reports an error; empty if it doesn't."""
    if _CRASH.match(line):
        return line
    if line.startswith("{"):
        try:
            entry = json.loads(line)
        except ValueError:
            return ""
        bad = isinstance(entry, dict) and entry.get("level") in ("error", "critical")
        return str(entry.get("message")) if bad else ""
    found = _ERROR.match(line)
    return found[2] if found else ""
