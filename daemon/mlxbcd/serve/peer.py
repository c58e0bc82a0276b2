"""Owns what the kernel knows of the process at the other end: its user, its id, and whether it hung up."""

from __future__ import annotations

import select
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Final, Protocol

_UCRED: Final = struct.Struct("iII")
"""Linux `struct ucred`: pid, uid, gid."""

_SOL_LOCAL: Final = 0
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED: Final = struct.Struct("IIh2x16I")
"""Darwin `struct xucred`: version, uid, number of groups, groups."""
_XUCRED_VERSION: Final = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, as it was when it did."""

    uid: int
    pid: int


class Options(Protocol):
    """The part of a socket that tells about its peer; a transport's socket has it too."""

    def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes: ...


def peer_of(connection: Options, platform: str = sys.platform) -> Peer:
    """Who is connected.

    Raises:
        OSError: the kernel does not say.
    """
    if platform == "darwin":
        uid = parse_xucred(connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
        pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4)
        return Peer(uid, int.from_bytes(pid, sys.byteorder))
    return parse_ucred(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))


def parse_ucred(raw: bytes) -> Peer:
    """The peer in Linux's `struct ucred`.

    Raises:
        OSError: it is not one.
    """
    if len(raw) != _UCRED.size:
        raise OSError(f"the kernel described the peer in {len(raw)} bytes instead of {_UCRED.size}")
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(uid, pid)


def parse_xucred(raw: bytes) -> int:
    """The user id in Darwin's `struct xucred`. The kernel may leave out the groups that are not used.

    Raises:
        OSError: it is not one of the known version.
    """
    if len(raw) < 8:
        raise OSError(f"the kernel described the peer in {len(raw)} bytes")
    version, uid = struct.unpack_from("II", raw)
    if version != _XUCRED_VERSION:
        raise OSError(f"the kernel described the peer in version {version} instead of {_XUCRED_VERSION}")
    return int(uid)


def hung_up(fd: int) -> bool:
    """Whether the peer can't read any more either, so that its end of input means that it is gone.

    Linux tells a closed socket (POLLHUP) from one whose peer only finished writing. Other systems may not,
    so there the answer is no, and the next write finds out.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))
