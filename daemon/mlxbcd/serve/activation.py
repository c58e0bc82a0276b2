"""Owns taking over a listening socket from a service manager: systemd's protocol, and launchd's.

A manager that listens for the daemon keeps the path while there is no daemon, and starts one at the first connection.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeAlias

from mlxbc.errors import ConfigError

LISTENERS: Final = "Listeners"
"""What the launchd agent calls the socket."""

Activate: TypeAlias = Callable[[str], list[int]]
"""Gives the descriptors that launchd holds for this process under a name; none where launchd didn't start it."""

_FIRST: Final = 3
"""Where systemd's descriptors begin: after the standard streams."""


def inherited(
    environ: MutableMapping[str, str] = os.environ, *, activate: Activate | None = None, first: int = _FIRST
) -> socket.socket | None:
    """The listening socket that a service manager passed to this process; None if none did.

    May be called once: systemd's variables are taken out of `environ`, so that no child takes them for its own, and
    launchd gives its sockets away only once. The socket is not passed on to child processes.

    Args:
        activate: asks launchd; None does on macOS.
        first: the number of systemd's first descriptor.

    Raises:
        ConfigError: what was passed isn't one listening Unix stream socket with a path.
    """
    passed = _from_systemd(environ, first)
    if not passed:
        if activate is None:
            activate = launch_activate_socket if sys.platform == "darwin" else _never
        passed = dict.fromkeys(activate(LISTENERS), LISTENERS)
    for descriptor in passed:
        _keep_from_children(descriptor)
    if len(passed) > 1:
        names = ", ".join(passed.values())
        raise ConfigError(f"the service manager passes {len(passed)} sockets ({names}): leave one in the unit")
    for descriptor, name in passed.items():
        return _checked(descriptor, name)
    return None


def launch_activate_socket(name: str, library: Any = None) -> list[int]:
    """The descriptors that launchd holds under `name` in this process's agent; none if it isn't such a process.

    Args:
        library: a loaded library with the two C functions; None is what is in the process already.

    Raises:
        ConfigError: launchd refuses, for instance because they have been taken before.
    """
    library = library or ctypes.CDLL(None)
    call, free = library.launch_activate_socket, library.free
    call.restype = ctypes.c_int
    call.argtypes = [
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
        ctypes.POINTER(ctypes.c_size_t),
    ]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    array, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
    code = call(name.encode(), ctypes.byref(array), ctypes.byref(count))
    if code in (errno.ESRCH, errno.ENOENT):  # not started by launchd; or by an agent without this socket
        return []
    if code:
        raise ConfigError(f"launchd does not hand over the socket {name!r}: {os.strerror(code)}")
    try:
        return array[: count.value]
    finally:
        free(array)


def _never(_name: str) -> list[int]:
    return []


def _from_systemd(environ: MutableMapping[str, str], first: int) -> dict[int, str]:
    """Descriptors and their names. The variables may be meant for another process: an ancestor of this one."""
    process, count, names = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if process != str(os.getpid()) or not count.isdigit():
        return {}
    named = names.split(":") if names else []
    return {
        first + index: named[index] if index < len(named) else f"descriptor {first + index}"
        for index in range(int(count))
    }


def _keep_from_children(descriptor: int) -> None:
    try:
        os.set_inheritable(descriptor, False)
    except OSError as error:
        raise ConfigError(f"the service manager promises descriptor {descriptor}: {error.strerror}") from None


def _checked(descriptor: int, name: str) -> socket.socket:
    """A socket object for `descriptor`, if clients of ours can have connected to it."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"the service manager passes {name}: {error.strerror}") from None
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM and listens:
        path = found.getsockname()
        if isinstance(path, str) and path:  # bytes are the name of an abstract one, which has no owner and no mode
            return found
    found.close()
    raise ConfigError(
        f"the service manager passes {name}, which is not a listening Unix stream socket with a path: "
        f"the unit needs ListenStream=/… and no Accept=yes, the agent a SockPathName"
    )
