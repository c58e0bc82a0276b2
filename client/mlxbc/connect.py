"""Owns opening the connection: finding the socket, knowing whose it is, and saying what a refusal means."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from mlxbc.errors import ConfigError, DaemonUnavailable
from mlxbc.paths import checked_socket_path, socket_path

HELLO_TIMEOUT = 30.0
"""Seconds a daemon may take to say welcome: long only where this very connection has made it start."""

HELLO_SOON = 1.0
"""Seconds within which a daemon that runs says welcome."""


def connect(path: str | os.PathLike[str] | None) -> socket.socket:
    """A connected blocking socket; None means the user's own daemon.

    Raises:
        DaemonUnavailable: nobody listens there.
        ConfigError: the path cannot be a socket of ours.
    """
    where = socket_path() if path is None else checked_socket_path(Path(path))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(where))
        _check_peer(sock, where)
    except FileNotFoundError:
        sock.close()
        raise DaemonUnavailable(str(where), f"no daemon is running (no socket at {where})") from None
    except ConnectionRefusedError:
        sock.close()
        raise DaemonUnavailable(str(where), f"no daemon is running (nobody listens at {where})") from None
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot connect to {where}: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _check_peer(sock: socket.socket, where: Path) -> None:
    """Refuse to tell a prompt to somebody else: below /tmp, another user could listen at the path."""
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:
        return
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, credentials, struct.calcsize("3i")))
    if uid != os.geteuid():
        raise ConfigError(f"the daemon at {where} belongs to user {uid}, not to you; set MLXBC_SOCKET to your own")
