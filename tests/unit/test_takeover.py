"""What a daemon that is to replace another one makes of how that one answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mlxbc import wire
from mlxbc.errors import ConfigError
from mlxbc.framing import Codec, frame
from mlxbcd.serve import takeover


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


@contextmanager
def daemon(path: Path, answers: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something that takes one connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answers(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_where_nobody_listens_there_is_nothing_to_replace(path: Path) -> None:
    assert takeover.ask_for(path) is None
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert takeover.ask_for(path) is None


def test_one_that_hands_over_tells_its_process(path: Path) -> None:
    welcome = wire.Welcome(proto=wire.PROTOCOL, server="mlxbcd", version="0", pid=42, models=[], max_frame=1 << 20)

    def answers(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(frame(welcome, Codec.MSGPACK) + frame(wire.Bye(id=1), Codec.MSGPACK))

    with daemon(path, answers):
        assert takeover.ask_for(path) == 42


def test_one_that_dies_while_it_is_asked_has_left_its_place(path: Path) -> None:
    with daemon(path, lambda connection: connection.recv(65536) and None):
        assert takeover.ask_for(path) is None


def test_one_that_dies_with_the_question_unread_has_too(path: Path) -> None:
    with daemon(path, lambda connection: connection.recv(1) and None):
        assert takeover.ask_for(path) is None


def test_one_that_says_nothing_is_not_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_PATIENCE_S", 0.05)
    over = threading.Event()
    with daemon(path, lambda connection: over.wait(10) and None):
        with pytest.raises(ConfigError, match="does not answer"):
            takeover.ask_for(path)
        over.set()


def test_one_that_answers_with_something_else_is_not_replaced(path: Path) -> None:
    def answers(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"\xff" * 64)

    with daemon(path, answers), pytest.raises(ConfigError, match="does not answer"):
        takeover.ask_for(path)
