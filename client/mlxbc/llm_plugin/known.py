"""Owns which models `llm` is told of: those that the daemon lists, or listed last.

`llm` asks at every start, whatever it is started for. So the daemon gets a moment to answer, and a daemon that is not
there, or is only just starting, changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from mlxbc import paths
from mlxbc.client import Client
from mlxbc.errors import MlxbcError

PATIENCE_S: Final = 0.5


def names() -> list[str]:
    """The models' names."""
    try:
        with Client(client_name="mlxbc-llm", timeout=PATIENCE_S) as client:
            found = [entry.name for entry in client.models()]
    except MlxbcError:
        return _remembered()
    if found != _remembered():
        _remember(found)
    return found


def _path() -> Path:
    return paths.cache_dir() / "llm-models.json"


def _remembered() -> list[str]:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError):
        return []


def _remember(found: list[str]) -> None:
    path = _path()
    written = path.with_name(f"{path.name}.{os.getpid()}")
    # A list that can't be kept is asked for again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(msgspec.json.encode(found))
        written.replace(path)
