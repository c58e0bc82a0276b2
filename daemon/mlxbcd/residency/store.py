"""Owns the directory of imported models: what is in it, and adding to it whole, once, and by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

from mlxbc import paths
from mlxbcd.errors import ServeError
from mlxbcd.model.gguf import PARTIAL, import_gguf

_LOCK: Final = ".lock"
_DIGEST_LENGTH: Final = 12
_TEXTS: Final = frozenset({".json", ".jinja", ".txt"})
_LONGEST_TEXT: Final = 512 * 1024 * 1024
"""Bytes. The largest vocabularies there are take a tenth of it."""


def models_directory() -> Path:
    """Where imported models are; it may not exist yet."""
    return paths.data_dir() / "models"


def is_model(directory: Path) -> bool:
    """Whether a directory looks like a model that can be loaded."""
    weights = list(directory.glob("model*.safetensors"))
    return bool(weights) and all(path.is_file() for path in (directory / "config.json", *weights))


def check_files(directory: Path) -> None:
    """Refuse a model's directory before anything in it is opened, if that could wait for ever or fill the memory.

    Raises:
        ServeError: `load_failed`: it holds a pipe, a socket or a device, or a text file of absurd size.
    """
    try:
        for path in sorted(directory.iterdir()):
            if not path.exists():  # a link into nowhere is noticed by whoever needs the file
                continue
            if not path.is_file() and not path.is_dir():
                raise ServeError("load_failed", f"{path} is no file; fetch the model again")
            if path.suffix in _TEXTS and path.stat().st_size > _LONGEST_TEXT:
                raise ServeError("load_failed", f"{path} is far too large for what it should be; fetch the model again")
    except OSError as error:
        raise ServeError("load_failed", f"{directory} cannot be read: {error.strerror}") from error


def imported() -> list[Path]:
    """The model directories of the store, by name."""
    try:
        return sorted(path for path in models_directory().iterdir() if not path.name.startswith(".") and is_model(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def locked() -> Iterator[Path]:
    """The store's directory, made if need be, with no other process adding to it.

    Waits for whoever does. Leftovers of an import that was killed are removed.

    Raises:
        ServeError: `load_failed` where the directory cannot be written.
    """
    directory = models_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServeError("load_failed", f"{directory} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield directory
    finally:
        os.close(lock)


def import_file(source: Path) -> Path:
    """The model directory made from a GGUF file; the first call imports it, which takes seconds.

    The directory is named after the file's name and content: a changed file is another model.

    Raises:
        ServeError: `load_failed`, see `import_gguf`.
    """
    try:
        found = source.stat()
        digest = _digest(source, found.st_ino, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise ServeError("load_failed", f"{source} cannot be read: {error.strerror}") from error
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip(".-")[:64] or "model"
    target = models_directory() / f"{stem}-{digest}"
    if not is_model(target):
        with locked():
            import_gguf(source, target)
    return target


@lru_cache(maxsize=64)
def _digest(source: Path, inode: int, size: int, modified_ns: int) -> str:
    """Hash of a file's content, computed again only when the file looks different."""
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_LENGTH]
