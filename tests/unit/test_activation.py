"""A socket that a service manager listens on is taken over, or refused with the reason."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxbc.errors import ConfigError
from mlxbcd.serve.activation import LISTENERS, inherited, launch_activate_socket


@pytest.fixture
def passed(tmp_path: Path) -> Iterator[socket.socket]:
    """A listening socket whose descriptor the code under test takes over."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        yield listening


def environment(count: int = 1, names: str | None = None) -> dict[str, str]:
    """What systemd sets."""
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), "HOME": "/h"}
    return environ if names is None else {**environ, "LISTEN_FDNAMES": names}


def take(listening: socket.socket, environ: dict[str, str] | None = None) -> socket.socket | None:
    return inherited(environment() if environ is None else environ, first=listening.detach())


# --------------------------------------------------------------------------------------------------------- systemd


@pytest.mark.parametrize("names", [None, "mlxbc.socket"])
def test_systemds_socket_is_taken_over_and_accepts(passed: socket.socket, names: str | None) -> None:
    path = passed.getsockname()
    os.set_inheritable(passed.fileno(), True)
    taken = take(passed, environment(names=names))
    assert taken is not None
    with taken, socket.socket(socket.AF_UNIX) as client:
        assert taken.getsockname() == path
        client.connect(path)
        taken.accept()[0].close()
        assert not taken.get_inheritable(), "a child must not keep the path listening"


def test_systemds_variables_are_taken_out_of_the_environment(passed: socket.socket) -> None:
    environ = environment(names="a")
    taken = take(passed, environ)
    assert taken is not None
    taken.close()
    assert environ == {"HOME": "/h"}


@pytest.mark.parametrize(
    "change", [{"LISTEN_PID": "1"}, {"LISTEN_PID": "x"}, {"LISTEN_FDS": "0"}, {"LISTEN_FDS": "-1"}, {"LISTEN_FDS": ""}]
)
def test_variables_for_another_process_or_for_nothing_are_no_socket(change: dict[str, str]) -> None:
    environ = environment() | change
    assert inherited(environ) is None
    assert environ == {"HOME": "/h"}


def test_without_a_service_manager_there_is_no_socket() -> None:
    assert inherited({}) is None


def test_of_two_sockets_none_is_picked_silently(passed: socket.socket) -> None:
    second = os.dup(passed.fileno())
    first = min(second, passed.detach())
    # Whatever lies between them, two descriptors that follow each other are passed.
    os.dup2(second, first + 1)
    with pytest.raises(ConfigError, match=r"passes 2 sockets \(one, two\): leave one"):
        inherited(environment(2, "one:two"), first=first)
    for descriptor in {first, first + 1, second}:
        os.close(descriptor)


def unix_datagram(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(str(path))
    return made


def unix_not_listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def unix_connected(_path: Path) -> socket.socket:
    made, other = socket.socketpair(socket.AF_UNIX)
    other.close()
    return made


def unix_without_a_path(_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind("\0mlxbc-test-activation")
    made.listen()
    return made


def tcp(_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_INET)
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


@pytest.mark.parametrize(
    "make",
    [
        unix_datagram,
        unix_not_listening,
        unix_connected,
        pytest.param(
            unix_without_a_path, marks=pytest.mark.skipif("sys.platform != 'linux'", reason="has no abstract sockets")
        ),
        tcp,
    ],
)
def test_any_other_kind_of_socket_is_refused(make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="passes web, which is not a listening Unix stream socket with a path"):
        take(make(tmp_path / "s"), environment(names="web"))


def test_a_descriptor_that_is_no_socket_is_refused() -> None:
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ConfigError, match=f"passes descriptor {read}: "):
        inherited(environment(), first=read)
    os.close(read)


def test_a_descriptor_that_is_not_open_is_refused(passed: socket.socket) -> None:
    closed = os.dup(passed.fileno())
    os.close(closed)
    with pytest.raises(ConfigError, match=f"promises descriptor {closed}: "):
        inherited(environment(), first=closed)


TAKES_AND_HAS_A_CHILD = """
import os, subprocess, sys
from mlxbcd.serve.activation import inherited
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
with inherited() as taken:
    look = "import os; print([n for n in os.environ if n.startswith('LISTEN')], flush=True); os.fstat(3)"
    child = subprocess.run([sys.executable, "-c", look], close_fds=False, stderr=subprocess.PIPE, text=True)
    print(taken.fileno(), "Bad file descriptor" in child.stderr)
"""


def test_descriptor_3_of_a_real_process_is_taken_and_no_child_gets_it(passed: socket.socket) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TAKES_AND_HAS_A_CHILD, str(passed.fileno())],
        pass_fds=[passed.fileno()],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert ended.stdout.split() == ["[]", "3", "True"]


# --------------------------------------------------------------------------------------------------------- launchd

_ACTIVATE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
    ctypes.POINTER(ctypes.c_size_t),
)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeLaunchd:
    """The two C functions, called through their pointers as the real ones are."""

    def __init__(self, descriptors: list[int], code: int = 0) -> None:
        self._array = (ctypes.c_int * max(1, len(descriptors)))(*descriptors)
        self._count = len(descriptors)
        self._code = code
        self.asked: list[bytes] = []
        self.freed: list[int] = []
        self.launch_activate_socket = _ACTIVATE(self._activate)
        self.free = _FREE(self.freed.append)

    def _activate(self, name, array, count) -> int:
        self.asked.append(name)
        if self._code == 0:
            array[0] = ctypes.cast(self._array, ctypes.POINTER(ctypes.c_int))
            count[0] = self._count
        return self._code

    @property
    def address(self) -> int:
        return ctypes.addressof(self._array)


def test_launchds_descriptors_are_returned_and_its_array_is_freed_once() -> None:
    library = FakeLaunchd([7, 9, 8])
    assert launch_activate_socket("Listeners", library) == [7, 9, 8]
    assert library.asked == [b"Listeners"]
    assert library.freed == [library.address]


@pytest.mark.parametrize("code", [errno.ESRCH, errno.ENOENT])
def test_a_process_that_launchd_did_not_start_gets_none(code: int) -> None:
    library = FakeLaunchd([], code)
    assert launch_activate_socket("Listeners", library) == []
    assert library.freed == []


def test_sockets_that_were_taken_before_are_an_error() -> None:
    with pytest.raises(ConfigError, match=f"'Listeners': {os.strerror(errno.EALREADY)}"):
        launch_activate_socket("Listeners", FakeLaunchd([], errno.EALREADY))


def test_launchds_socket_is_taken_over(passed: socket.socket) -> None:
    path = passed.getsockname()
    os.set_inheritable(passed.fileno(), True)
    library = FakeLaunchd([passed.detach()])
    taken = inherited({}, activate=lambda name: launch_activate_socket(name, library))
    assert taken is not None
    with taken:
        assert taken.getsockname() == path
        assert not taken.get_inheritable()
    assert library.asked == [LISTENERS.encode()]


def test_launchds_socket_has_to_be_of_the_right_kind_too(tmp_path: Path) -> None:
    descriptor = unix_datagram(tmp_path / "s").detach()
    with pytest.raises(ConfigError, match="passes Listeners, which is not a listening Unix stream socket"):
        inherited({}, activate=lambda _name: [descriptor])


@pytest.mark.skipif("sys.platform == 'darwin'", reason="launchd is asked there")
def test_other_systems_are_not_asked_for_launchds_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbcd.serve.activation.ctypes", SimpleNamespace())
    assert inherited({}) is None
