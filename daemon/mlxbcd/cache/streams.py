"""Owns what is remembered of generations in progress beyond this process: the tokens they have drawn.

With its seed a request draws the same tokens again, and the states it has published come back from the cache. So a
record need only say what was drawn: whoever asks for the rest of a stream is told at once what it lacks, and the
generation goes on from there. Records are small files, replaced whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from mlxbcd.cache import keys
from mlxbcd.cache.files import point

log = logging.getLogger(__name__)

_STREAM: Final = re.compile(r"[0-9a-f]{32}")
_SUFFIX: Final = ".stream"
_VERSION: Final = 1
_KEPT_S: Final = 24 * 3600.0
"""Nobody asks for the rest of an answer a day later."""
_MOST: Final = 1000
_LONGEST: Final = 16 << 20


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A generation.

    Attributes:
        request: digest of what was asked; the rest of another request is not its rest.
        tokens: packed ids drawn so far.
        reason: why it ended; empty while it runs.
        stop: the stop string that ended it.
    """

    version: int
    stream: str
    request: str
    tokens: bytes
    reason: str = ""
    stop: str | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens."""
        return tuple(keys.unpack(self.tokens))

    @property
    def whole(self) -> Literal["stop", "length"] | None:
        """Why it ended, if it has."""
        return "stop" if self.reason == "stop" else "length" if self.reason == "length" else None


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Record)


def digest(*parts: object) -> str:
    """Names what was asked."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class Streams:
    """The records of one daemon. Everything blocks for the time of a small file.

    Args:
        path: their directory, made at the first record.

    Attributes:
        trouble: why the last record could not be written; empty while writing works.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""

    def __repr__(self) -> str:
        return f"Streams({self.path})"

    def save(self, stream: str, request: str, tokens: Sequence[int], reason: str = "", stop: str | None = None) -> None:
        """Write a record, or replace it. A disk that refuses is logged once; the generation goes on."""
        if not _STREAM.fullmatch(stream):
            return
        record = Record(_VERSION, stream, request, keys.pack(tokens), reason, stop)
        part = self.path / f"{stream}.part"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(handle, "wb") as file:
                file.write(_ENCODER.encode(record))
                file.flush()
                point("record")
                os.fsync(handle)
            part.rename(self._file(stream))
            point("recorded")
            if self.trouble:
                self.trouble = ""
                log.info("generations are recorded again")
        except OSError as error:
            why = error.strerror or str(error)
            if why != self.trouble:
                self.trouble = why
                log.warning("generations can't be recorded (%s); they go on all the same", why)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def load(self, stream: str, request: str) -> Record | None:
        """The record of a stream, if it is one of this request."""
        if not _STREAM.fullmatch(stream):
            return None
        try:
            handle = os.open(self._file(stream), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(handle, "rb") as file:
                record = _DECODER.decode(file.read(_LONGEST))
        except (OSError, msgspec.MsgspecError):
            return None
        same = (record.version, record.stream, record.request) == (_VERSION, stream, request)
        return record if same and len(record.tokens) % keys.WIDTH == 0 else None

    def drop(self, stream: str) -> None:
        """Forget a stream: it has ended, or nobody may have it."""
        if _STREAM.fullmatch(stream):
            with contextlib.suppress(OSError):
                self._file(stream).unlink()

    def clear(self) -> int:
        """Forget all; how many."""
        return self._remove(float("inf"))

    def collect(self) -> None:
        """Remove what is too old to be asked for, and what a crash left."""
        self._remove(time.time() - _KEPT_S)

    def _remove(self, before: float) -> int:
        removed = 0
        with contextlib.suppress(OSError), os.scandir(self.path) as entries:
            found = sorted(entries, key=_changed, reverse=True)
            for i, entry in enumerate(found):
                if i >= _MOST or _changed(entry) < before or not entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def _file(self, stream: str) -> Path:
        return self.path / f"{stream}{_SUFFIX}"


def _changed(entry: os.DirEntry[str]) -> float:
    try:
        return entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
