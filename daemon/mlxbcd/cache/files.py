"""Owns one cached piece of state as a file: its format, and writing it so that it is there whole or not at all.

A file is a preamble, a header (msgpack, checked by itself), padding to a page, and the buffer of a `Payload` as it is
in memory. So reading one is one read into page-aligned memory, and a scan reads one page per file. It is named by the
hash of its namespace and tokens, written under another name, synchronised, renamed, and its directory synchronised:
whatever happens in between, a name that can be found belongs to a whole file. The checksum is for what happens to disks
later.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from mlxbcd.cache import keys
from mlxbcd.cache.payload import Leaf, Payload, allocate

VERSION: Final = 1
"""Of the format. Files of another one are collected."""
SUFFIX: Final = ".kv"
_MAGIC: Final = b"mlxbc-kv"
_PREAMBLE: Final = struct.Struct("<8sIII")
"""Magic, version, bytes of the header, its CRC-32."""
_PAGE: Final = 4096
_SLICE: Final = 1 << 20
_LONGEST_HEADER: Final = 16 << 20

_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""Errors that say nothing about the file."""

_KILL_AT: Final = os.environ.get("MLXBC_TEST_KILL_AT", "")
"""For tests: `POINT` or `POINT:N`, where (and the how manieth time there) the process kills itself."""
_passed: dict[str, int] = {}


class Unusable(Exception):
    """A file that isn't one of ours, or not any more; the message says why."""


class Unreadable(Unusable):
    """A file that can't be read at the moment, for want of something that has nothing to do with it."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a file holds.

    Attributes:
        namespace: identity of the model and of how its state is stored.
        trimmable: all of its layers store by position.
        parent: name of the piece before; that of the namespace's root for the first.
        begin: position of the first token.
        tokens: packed; empty for an anchor.
        crc: CRC-32 of the payload.
    """

    namespace: str
    trimmable: bool
    converted_at: int
    parent: str
    begin: int
    tokens: bytes
    anchor: bool
    pinned: bool
    session: str
    leaves: tuple[Leaf, ...]
    size: int
    crc: int = 0

    @property
    def name(self) -> str:
        """The hash that names the piece."""
        return keys.anchor_id(self.parent) if self.anchor else keys.block_id(self.parent, self.tokens)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Header)


def write(directory: Path, header: Header, payload: Payload, pace: Callable[[], None]) -> int:
    """Write a piece under its name; the bytes it takes. `pace` is called before each slice, and may wait or raise.

    Raises:
        OSError: the disk is full, or worse. Nothing is left behind that could be taken for a piece.
    """
    data = payload.bytes()
    crc = 0
    for at in range(0, len(data), _SLICE):
        pace()
        crc = zlib.crc32(data[at : at + _SLICE], crc)
    start = _beginning(msgspec.structs.replace(header, crc=crc))
    whole, part = directory / f"{header.name}{SUFFIX}", directory / f"{header.name}.part"
    point("begin")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            point("created")
            _write_all(handle, start)
            point("header")
            for at in range(0, len(data), _SLICE):
                pace()
                _write_all(handle, data[at : at + _SLICE])
                point("slice")
            os.fsync(handle)
        finally:
            os.close(handle)
        point("synced")
        part.rename(whole)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    point("renamed")
    sync(directory)
    point("done")
    return len(start) + len(data)


def read_header(path: Path) -> tuple[Header, int]:
    """What a file holds, and where its payload begins. The payload is not looked at, except that it is there.

    Raises:
        Unusable: it is not a piece, or can't be read now.
    """
    try:
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            return _header(file, path)
    except OSError as error:
        raise _why(error) from None


def read(path: Path) -> tuple[Header, Payload]:
    """A whole piece, checked.

    Raises:
        Unusable: it is not a piece, or not any more, or can't be read now.
    """
    try:
        with open(path, "rb", buffering=0, opener=_open_regular) as file:
            header, begin = _header(file, path)
            data = allocate(header.size)
            file.seek(begin)
            view = memoryview(data)[: header.size]
            while view:
                view = view[_some(file.readinto(view)) :]
    except OSError as error:
        raise _why(error) from None
    payload = Payload(header.leaves, data, header.size)
    if zlib.crc32(payload.bytes()) != header.crc:
        raise Unusable("its checksum is wrong")
    return header, payload


def sync(directory: Path) -> None:
    """Make what was renamed in a directory last."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def point(name: str) -> None:
    """A place where tests kill the process; see `MLXBC_TEST_KILL_AT` above."""
    if not _KILL_AT:
        return
    wanted, _, time = _KILL_AT.partition(":")
    if name == wanted:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] == int(time or 1):
            os.kill(os.getpid(), signal.SIGKILL)


def _beginning(header: Header) -> bytes:
    """Preamble, header, and padding to the page at which the payload begins."""
    body = _ENCODER.encode(header)
    start = _PREAMBLE.pack(_MAGIC, VERSION, len(body), zlib.crc32(body)) + body
    return start + bytes(-len(start) % _PAGE)


def _header(file: io.FileIO, path: Path) -> tuple[Header, int]:
    first, size = file.read(_PAGE), os.fstat(file.fileno()).st_size
    if len(first) < _PREAMBLE.size:
        raise Unusable("it is too short")
    magic, version, length, crc = _PREAMBLE.unpack_from(first)
    if magic != _MAGIC:
        raise Unusable("it is not a piece of state")
    if version != VERSION:
        raise Unusable(f"it has format version {version}, not {VERSION}")
    begin = -(-(_PREAMBLE.size + length) // _PAGE) * _PAGE
    if length > _LONGEST_HEADER or begin > size:
        raise Unusable("it was cut short")
    body = first[_PREAMBLE.size : _PREAMBLE.size + length]
    if len(body) < length:
        body += file.read(length - len(body))
    if zlib.crc32(body) != crc:
        raise Unusable("its header's checksum is wrong")
    try:
        header = _DECODER.decode(body)
    except msgspec.MsgspecError:
        raise Unusable("its header can't be read") from None
    if path.name != f"{header.name}{SUFFIX}":
        raise Unusable("its name is not that of what it holds")
    if size != begin + header.size:
        raise Unusable("it was cut short")
    return header, begin


def _why(error: OSError) -> Unusable:
    return (Unreadable if error.errno in _PASSING else Unusable)(error.strerror or str(error))


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _some(n: int | None) -> int:
    if not n:
        raise Unusable("it was cut short")
    return n


def _open_regular(path: str, flags: int) -> int:
    """Open a file for reading, unless it is a link, a FIFO or whatever else could hold us up or lead elsewhere."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a regular file")
    return handle
