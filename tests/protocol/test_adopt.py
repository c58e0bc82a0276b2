"""A path that a service manager listens on: neither stolen nor removed, and the daemon there is found by its lock."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxbcd.serve.listen import AlreadyRunning, adopt, holder, listen


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory / "mlxbc.sock"


@pytest.fixture
def managed(path: Path) -> Iterator[socket.socket]:
    """The manager's own socket; a daemon gets a duplicate."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield listening


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_closing_leaves_the_managers_socket_listening(path: Path, managed: socket.socket) -> None:
    inode = path.stat().st_ino
    with adopt(managed.dup()) as listener:
        assert listener.inherited
        assert listener.path == path
        assert "inherited" in repr(listener)
    assert path.stat().st_ino == inode
    assert connects(path)


def test_an_adopted_socket_is_locked_like_any_other(path: Path, managed: socket.socket) -> None:
    assert holder(path) is None
    with adopt(managed.dup()):
        assert holder(path) == os.getpid()
        with pytest.raises(AlreadyRunning, match=f"already running on {path} .pid {os.getpid()}"):
            listen(path)
    assert holder(path) is None


def test_a_lock_that_another_daemon_holds_does_not_keep_a_started_one_from_serving(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listen(path) as by_hand, socket.socket(socket.AF_UNIX) as managed:
        # What systemd does when it starts to listen at a path that is taken.
        path.unlink()
        managed.bind(str(path))
        managed.listen()
        with caplog.at_level(logging.WARNING), adopt(managed.dup()):
            assert f"another daemon (pid {os.getpid()}) has lost {path} to the service manager" in caplog.text
        by_hand.close()
        assert connects(path), "the one that lost the path doesn't remove what isn't its own"


def test_a_path_that_a_manager_listens_on_is_not_stolen_while_no_daemon_runs(
    path: Path, managed: socket.socket
) -> None:
    inode = path.stat().st_ino
    for _ in range(2):
        with pytest.raises(AlreadyRunning, match=r"as a service \(see mlxbc service status\)") as told:
            listen(path)
        assert told.value.pid is None
    assert path.stat().st_ino == inode
    assert holder(path) is None, "who gave up holds no lock"


def test_a_full_backlog_is_a_sign_of_life(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(AlreadyRunning):
            listen(path)
        for client in waiting:
            client.close()


def test_a_path_without_a_lock_is_nobodys(path: Path) -> None:
    assert holder(path) is None
    with listen(path):
        assert holder(path) == os.getpid()
    assert holder(path) is None


def test_looking_for_the_holder_takes_nothing_from_the_next_daemon(path: Path) -> None:
    listen(path).close()
    assert holder(path) is None
    with listen(path):
        assert connects(path)
