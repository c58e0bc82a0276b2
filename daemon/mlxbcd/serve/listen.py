"""Owns the listening socket's path: one daemon per path, in a private directory, and a stale socket replaced.

Binding by hand is needed because event loops unlink whatever socket they find at a path before they bind,
also one that a live daemon listens on. Here the path is touched only under an exclusive lock that the
kernel drops when its holder dies, however that happens. A socket that a service manager listens on is neither
replaced nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Final

from mlxbc.errors import ConfigError
from mlxbc.paths import checked_socket_path

BACKLOG: Final = 512
"""Connections the kernel keeps while the daemon starts or is busy."""

log = logging.getLogger(__name__)

_OURS: Final = "mlxbc"
"""A directory of this name is ours to make private."""


class AlreadyRunning(Exception):
    """Another daemon holds the lock of this path, or a service manager listens there for its own.

    Attributes:
        path: the socket.
        pid: the other daemon, where it could be read.
    """

    def __init__(self, path: Path, pid: int | None, *, managed: bool = False) -> None:
        whom = f" (pid {pid})" if pid else " as a service (see mlxbc service status)" if managed else ""
        super().__init__(f"already running on {path}{whom}")
        self.path = path
        self.pid = pid


class Listener:
    """A listening socket and the lock of its path. Closing it removes the socket, then frees the lock.

    Attributes:
        inherited: the path is a service manager's: the socket there stays.
    """

    def __init__(self, path: Path, sock: socket.socket, lock: int | None, *, inherited: bool = False) -> None:
        self.path = path
        self.socket = sock
        self.inherited = inherited
        self._lock = lock
        self._inode = _inode(path)
        self._closed = False

    def __repr__(self) -> str:
        how = "closed" if self._closed else "inherited" if self.inherited else "listening"
        return f"Listener({self.path}, {how})"

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and give the path up. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.socket.close()
        if self._lock is not None or self.inherited:
            if not self.inherited and _inode(self.path) == self._inode:
                self.path.unlink(missing_ok=True)
            self._unlock()

    def hand_over(self) -> bool:
        """Let another daemon take the path; False if it is a service manager's. Until then this one listens."""
        if self.inherited:
            return False
        self._unlock()
        return True

    @property
    def taken(self) -> bool:
        """Another daemon listens at the path now."""
        return _inode(self.path) != self._inode

    def _unlock(self) -> None:
        # The lock's file stays: removing it would let two daemons lock two files of one name.
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def listen(path: Path, *, replacing: bool = False) -> Listener:
    """Bind `path` (mode 0600, in a directory of mode 0700) and listen.

    Must run before other threads create files: it narrows the process's umask for a moment.

    Args:
        replacing: a daemon that has handed the path over may still listen there: put the new socket in its place, in
            one step.

    Raises:
        AlreadyRunning: a live daemon holds this path, or a service manager; that one has now started its daemon.
        ConfigError: the path is too long, taken by something else, or its directory is not private.
    """
    checked_socket_path(path)
    _private_directory(path)
    lock = _lock(path)
    try:
        if replacing:
            sock = _bind_in_place(path)
        else:
            _remove_stale(path)
            sock = _bind(path)
        try:
            return Listener(path, sock, lock)
        except BaseException:
            sock.close()
            raise
    except BaseException:
        os.close(lock)
        raise


def adopt(sock: socket.socket) -> Listener:
    """Listen on a socket that a service manager holds, under the lock of its path.

    Another daemon that holds the lock is no reason to end: whoever connects reaches this one alone, and while
    connections wait the manager would start it again and again.

    Raises:
        ConfigError: the lock can't be opened.
    """
    path = Path(sock.getsockname())
    lock = None
    try:
        lock = _lock(path)
    except AlreadyRunning as other:
        log.warning("another daemon (pid %s) has lost %s to the service manager: end it", other.pid, path)
    return Listener(path, sock, lock, inherited=True)


def holder(path: Path) -> int | None:
    """The process that holds the lock of this path; None if no daemon does, or it has not said yet who it is."""
    try:
        lock = os.open(_lock_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named_in(lock)
    finally:
        os.close(lock)
    return None


def _private_directory(path: Path) -> None:
    directory = path.parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        above = directory.parent.stat()
    except OSError as error:
        raise ConfigError(f"cannot make the socket's directory {directory}: {error.strerror}") from None
    user = os.geteuid()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
        raise ConfigError(f"{directory} is not a directory of user {user}: choose another socket path")
    if above.st_uid not in (0, user):
        raise ConfigError(f"{directory.parent} belongs to user {above.st_uid}: choose another socket path")
    if found.st_mode & 0o077:
        if shared(found) or not _may_tighten(path):
            raise ConfigError(
                f"others may enter {directory} (mode {stat.S_IMODE(found.st_mode):04o}): "
                + ("" if shared(found) else f"run `chmod 700 {directory}`, or ")
                + "choose a directory of its own for the socket, as MLXBC_SOCKET"
            )
        directory.chmod(0o700)


def shared(directory: os.stat_result) -> bool:
    """Whether a directory is there for everybody, as /tmp is: closing it to others would break their programs."""
    return bool(directory.st_mode & stat.S_ISVTX)


def _may_tighten(path: Path) -> bool:
    """A directory that holds something else (a home, /tmp) is not ours to close to others."""
    if path.parent.name == _OURS:
        return True
    return {entry.name for entry in path.parent.iterdir()} <= {path.name, _lock_path(path).name}


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(path: Path) -> int:
    try:
        lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open the lock {_lock_path(path)}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _named_in(lock)
        os.close(lock)
        raise AlreadyRunning(path, pid) from None
    except BaseException:
        os.close(lock)
        raise
    # Who holds it is for people: a disk that is full doesn't keep the daemon from serving.
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _named_in(lock: int) -> int | None:
    holder = os.pread(lock, 32, 0).strip()
    return int(holder) if holder.isdigit() else None


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that died: whoever holds the lock knows that no daemon listens there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is not a socket: move it away, or choose another path")
        if _answers(path):
            raise AlreadyRunning(path, None, managed=True)
        path.unlink()


def _answers(path: Path) -> bool:
    """Whether somebody listens there: a service manager needs no lock, and no daemon either as long as nobody asks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # Anything but a refusal (a full backlog, for one) is a sign of life.
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _bind(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        umask = os.umask(0o177)
        try:
            sock.bind(os.fspath(path))
        finally:
            os.umask(umask)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from None
    return sock


def _bind_in_place(path: Path) -> socket.socket:
    """Bind beside `path` and rename, so that at no moment nobody listens; where the longer name is too long, unlink."""
    beside = path.with_name(f"{path.name}~")
    try:
        checked_socket_path(beside)
    except ConfigError:
        path.unlink(missing_ok=True)
        return _bind(path)
    beside.unlink(missing_ok=True)
    sock = _bind(beside)
    try:
        beside.rename(path)
    except OSError as error:
        sock.close()
        beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from None
    return sock


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
