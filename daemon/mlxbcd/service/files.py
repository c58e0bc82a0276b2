"""Owns the files of a service: its templates, and replacing what is installed in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mlxbcd.service.commands import ServiceError

_SHIPPED: Final = Path(__file__).with_name("templates")
_CHECKOUT: Final = Path(__file__).parents[3] / "launchd"


def template(name: str) -> bytes:
    """A file of the project's folder `launchd`, which a built package carries below this one."""
    return (_SHIPPED if _SHIPPED.is_dir() else _CHECKOUT).joinpath(name).read_bytes()


def is_current(path: Path, content: bytes) -> bool:
    """Whether `path` has this content."""
    try:
        return path.read_bytes() == content
    except OSError:  # writing it will say what is wrong
        return False


def replace(path: Path, content: bytes) -> None:
    """Make `content` the content of `path`, at once or not at all.

    Others may read it and only its owner may write, whatever the umask: launchd refuses less.

    Raises:
        ServiceError: it can't be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            new.write_bytes(content)
            new.chmod(0o644)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror}") from None


def private_directory(path: Path) -> None:
    """Make sure that this directory exists; a new one is for this user alone.

    Raises:
        ServiceError: it can't be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"cannot make the directory {path}: {error.strerror}") from None
