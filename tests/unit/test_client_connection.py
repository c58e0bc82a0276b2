"""How the blocking client's connection begins and ends, and what silence on it means."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon, Session, accepted, done

import mlxbc
from mlxbc import Client, wire
from mlxbc.errors import (
    ConfigError,
    ConnectionLost,
    DaemonUnavailable,
    MlxbcError,
    ProtocolMismatch,
    RequestTimeout,
    Unauthorized,
)

SILENCE_S = 0.5
"""Longer than anybody takes to answer, on a busy machine too."""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


def test_without_a_daemon_the_error_says_how_to_start_one(path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="mlxbc serve --detach") as raised:
        Client(path)
    assert raised.value.path == str(path)


def test_a_socket_that_a_dead_daemon_left_is_no_daemon(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(DaemonUnavailable, match="nobody listens"):
        Client(path)


def test_a_path_that_cannot_be_a_socket_is_a_configuration_error(path: Path) -> None:
    with pytest.raises(ConfigError, match="bytes"):
        Client(path.parent / ("x" * 120))
    path.touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        Client(path / "deeper")


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs SO_PEERCRED")
def test_a_prompt_is_never_told_to_another_users_daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(session: Session) -> None:
        raise AssertionError("the client spoke")

    with FakeDaemon(path, script):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="belongs to user"):
            Client(path)


def test_the_handshake_tells_both_sides_who_the_other_is(path: Path) -> None:
    greetings: list[wire.Hello | None] = []
    daemon = FakeDaemon(path, lambda session: greetings.append(session.hello), pid=4242)
    with daemon, Client(path, client_name="tester") as client:
        assert client.welcome.pid == 4242
        assert client.welcome.models == ["tiny"]
    assert greetings == [
        wire.Hello(
            proto=wire.PROTOCOL,
            client="tester",
            version=mlxbc.__version__,
            max_frame=wire.FRAME_CEILING,
        )
    ]


@pytest.mark.parametrize(("code", "kind"), [("proto_mismatch", ProtocolMismatch), ("unauthorized", Unauthorized)])
def test_a_refused_handshake_says_why(path: Path, code: wire.ErrorCode, kind: type[MlxbcError]) -> None:
    def script(session: Session) -> None:
        session.send(wire.Error(code=code, message="speak version 2"))

    with FakeDaemon(path, script, greet=False), pytest.raises(kind, match="speak version 2"):
        Client(path)


def test_a_daemon_that_hangs_up_instead_of_greeting_is_a_lost_connection(path: Path) -> None:
    with FakeDaemon(path, lambda _session: None, greet=False), pytest.raises(ConnectionLost):
        Client(path)


def test_a_daemon_that_never_greets_is_given_up(path: Path) -> None:
    with FakeDaemon(path, Session.until_gone, greet=False), pytest.raises(RequestTimeout, match=r"0\.05 s"):
        Client(path, timeout=0.05)


def test_silence_is_given_up_and_the_connection_survives_it(path: Path) -> None:
    def script(session: Session) -> None:
        silent = session.receive(wire.Ping)
        assert session.receive(wire.Cancel).id == silent.id
        session.send(wire.Pong(id=silent.id))  # too late for anybody
        session.send(wire.Pong(id=session.receive(wire.Ping).id))

    with FakeDaemon(path, script), Client(path, timeout=SILENCE_S) as client:
        with pytest.raises(RequestTimeout) as raised:
            client.ping()
        assert isinstance(raised.value, TimeoutError)
        assert client.ping() > 0


def test_a_silent_stream_can_be_waited_for_again(path: Path) -> None:
    patient = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="A"))
        assert patient.wait(10)
        session.send(wire.Token(id=request.id, text="B"), done(request))

    with FakeDaemon(path, script), Client(path, timeout=SILENCE_S) as client, client.generate("x") as stream:
        with pytest.raises(RequestTimeout):
            stream.wait()
        patient.set()
        assert stream.wait().text == "AB"


def test_a_connection_that_ends_early_is_a_retryable_device_error(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="half"))

    with FakeDaemon(path, script), Client(path) as client:
        stream = client.generate("x")
        pieces = stream.text
        assert next(pieces) == "half"
        with pytest.raises(ConnectionLost) as raised:
            next(pieces)
        assert raised.value.code == "device_error"
        assert raised.value.retryable
        with pytest.raises(ConnectionLost):
            client.ping()


def test_closing_wakes_a_thread_that_waits(path: Path) -> None:
    waiting = threading.Event()
    errors: list[BaseException] = []

    def script(session: Session) -> None:
        session.receive(wire.Ping)
        waiting.set()
        session.until_gone()

    def work(client: Client) -> None:
        try:
            client.ping()
        except MlxbcError as error:
            errors.append(error)

    with FakeDaemon(path, script):
        client = Client(path)
        thread = threading.Thread(target=work, args=(client,))
        thread.start()
        assert waiting.wait(10)
        client.close()
        thread.join(10)
    assert [type(error) for error in errors] == [ConnectionLost]


def test_a_closed_client_says_so(path: Path) -> None:
    with FakeDaemon(path, Session.until_gone):
        client = Client(path)
        client.close()
        client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            client.ping()
