"""Owns the SSD tier's directory: its lock, what a restart finds in it, its room, and the files one by one.

One daemon at a time uses a directory. Whatever lies in it and isn't a whole piece of state is said once and removed.
Everything here blocks: it is for the writer's and the readers' threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mlxbcd.cache import keys
from mlxbcd.cache.files import SUFFIX, Header, Unreadable, Unusable, read, read_header, sync, write
from mlxbcd.cache.payload import Payload

log = logging.getLogger(__name__)

_TAG: Final = """\
Signature: 8a477f597d28d172789f06886806bc55
# The prefix cache of mlxbc: states of language models, which reveal the prompts they come from.
# Everything here can be made again. `mlxbc cache clear` empties it.
"""
_LOCK: Final = "lock"
_OURS: Final = {"CACHEDIR.TAG", _LOCK}


class Taken(Exception):
    """Another daemon uses the directory."""


@dataclass(frozen=True, slots=True)
class Found:
    """A piece that an earlier daemon wrote.

    Attributes:
        bytes: of its file.
        unused_s: seconds since it was wanted.
    """

    header: Header
    bytes: int
    unused_s: float


class Directory:
    """The files of one cache.

    Args:
        path: made if it isn't there, for its owner alone.

    Raises:
        Taken: another process has it.
        OSError: it can't be made or locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _take(path)
        self._locked = _identity(os.fstat(self._lock))

    def __repr__(self) -> str:
        return f"Directory({self.path})"

    def close(self) -> None:
        """Let another daemon have it."""
        os.close(self._lock)

    @property
    def lost(self) -> bool:
        """It is gone, or something else is in its place: another daemon could have that. On any thread."""
        try:
            return _identity(os.stat(self.path / _LOCK, follow_symlinks=False)) != self._locked
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR)

    def renew(self) -> None:
        """Take what is in its place; it is made if there is nothing.

        Raises:
            Taken, OSError: as at first; it stays lost.
        """
        before, self._lock = self._lock, _take(self.path)
        self._locked = _identity(os.fstat(self._lock))
        os.close(before)

    def free(self) -> int:
        """Bytes that the file system has left for us."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def held(self) -> int:
        """Bytes of all files here."""
        with os.scandir(self.path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)

    def scan(self) -> list[Found]:
        """All usable pieces, each after the one it follows. What isn't usable is removed."""
        found: dict[str, Found] = {}
        unusable: dict[str, str] = {}
        now = time.time()
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name in _OURS:
                    continue
                try:
                    header, size, used = _look(entry)
                    found[header.name] = Found(header, size, max(0.0, now - used))
                except Unreadable as error:
                    log.warning("a file in the cache directory can't be read now: %s", error)
                except (Unusable, OSError) as error:
                    unusable[entry.name] = str(error)
        usable = _connected(found)
        orphans = {f"{name}{SUFFIX}": "what comes before it is gone" for name in found.keys() - {*usable}}
        self._collect(unusable | orphans)
        return list(usable.values())

    def put(self, header: Header, payload: Payload, pace: Callable[[], None]) -> int:
        """Write a piece; the bytes of its file. See `files.write`."""
        return write(self.path, header, payload, pace)

    def get(self, name: str) -> Payload:
        """Read a piece.

        Raises:
            Unusable: it is gone, or damaged.
        """
        _, payload = read(self._file(name))
        return payload

    def remove(self, name: str) -> None:
        """Remove a piece, if it is there."""
        with contextlib.suppress(OSError):
            self._file(name).unlink()

    def touch(self, name: str) -> None:
        """Remember beyond this process that a piece was wanted now."""
        with contextlib.suppress(OSError):
            os.utime(self._file(name))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def _collect(self, unusable: dict[str, str]) -> None:
        # A directory is nobody's mistake of ours, and may hold anything.
        unusable = {name: why for name, why in unusable.items() if not _is_directory(self.path / name)}
        if not unusable:
            return
        name, why = next(iter(unusable.items()))
        log.warning(
            "%d files in the cache directory are of no use and are removed; %a, for one: %s", len(unusable), name, why
        )
        for each in unusable:
            with contextlib.suppress(OSError):
                (self.path / each).unlink()
        with contextlib.suppress(OSError):
            sync(self.path)


def _take(path: Path) -> int:
    """Make a directory if need be, lock it, and mark it as a cache; the descriptor that holds the lock."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _mark(path)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise Taken(f"another daemon uses {path}") from None
        raise
    return lock


def _mark(path: Path) -> None:
    tag = path / "CACHEDIR.TAG"
    if not tag.exists():
        try:
            tag.write_text(_TAG, encoding="utf-8")
            leave_out_of_backups(path)
        except OSError:
            # A disk that is full now may have room later, and the next start tries again.
            tag.unlink(missing_ok=True)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _look(entry: os.DirEntry[str]) -> tuple[Header, int, float]:
    if not entry.name.endswith(SUFFIX):
        raise Unusable("it is not a finished piece of state")
    header, begin = read_header(Path(entry.path))
    return header, begin + header.size, entry.stat(follow_symlinks=False).st_mtime


def _connected(found: dict[str, Found]) -> dict[str, Found]:
    """The pieces that can be reached from the beginning of their namespace, in that order."""
    usable: dict[str, Found] = {}
    for name, each in sorted(found.items(), key=lambda item: (item[1].header.begin, item[1].header.anchor)):
        header = each.header
        above = usable.get(header.parent)
        if header.begin == 0 and not header.anchor:
            fits = header.parent == keys.root_id(header.namespace, header.converted_at)
        else:
            fits = above is not None and not above.header.anchor and _end(above.header) == header.begin
        if fits:
            usable[name] = each
    return usable


def _end(header: Header) -> int:
    return header.begin + keys.count(header.tokens)


def leave_out_of_backups(path: Path, platform: str = sys.platform, run: Callable[..., object] = subprocess.run) -> None:
    """Ask Time Machine to skip a directory. Other systems' tools look for CACHEDIR.TAG."""
    if platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run(["/usr/bin/tmutil", "addexclusion", str(path)], capture_output=True, check=False, timeout=10)
