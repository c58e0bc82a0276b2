"""A daemon that a service manager starts at the first connection, on the manager's socket, with systemd's own tool."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mlxbc import Client, wire
from mlxbc.framing import Codec

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "protocol"), str(HERE.parent / "unit")]

from fake_service import PATIENCE_S, FakeClient, settled
from real_daemon import switches
from tiny_directory import write_model

SCRIPTED = [sys.executable, str(HERE / "scripted_daemon.py")]
REAL = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--no-preload"]


def tool() -> str:
    """The program that listens as systemd does."""
    found = shutil.which("systemd-socket-activate")
    if found is None:
        pytest.skip("systemd-socket-activate is not here (Debian: package systemd)")
    return found


class Manager:
    """That tool, which becomes the daemon at the first connection, and the socket that the daemon notifies."""

    def __init__(self, directory: Path, command: list[str], *arguments: str, watchdog_s: float | None = None) -> None:
        self.path = directory / "mlxbc.sock"
        self.said = ""
        listener = tool()
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(str(directory / "notify"))
        self.notified.settimeout(PATIENCE_S)
        environment = {
            "MLXBC_SOCKET": str(self.path),
            "NOTIFY_SOCKET": str(directory / "notify"),
            **{name: os.environ[name] for name in ("PATH", "HOME", "XDG_RUNTIME_DIR") if name in os.environ},
        }
        if watchdog_s is not None:
            environment["WATCHDOG_USEC"] = str(round(watchdog_s * 1e6))
        passed = [option for name, value in environment.items() for option in ("-E", f"{name}={value}")]
        self.popen = subprocess.Popen(
            [listener, "--listen", str(self.path), "--fdname=mlxbc.socket", *passed, *command, *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logged("Listening on")

    def logged(self, text: str) -> None:
        """Wait until the tool or the daemon says `text`."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.said += line
            if text in line:
                return
        raise AssertionError(f"never logged {text!r}:\n{self.said}")

    def heard(self) -> str:
        """The next notification."""
        return self.notified.recv(1000).decode()

    def ended(self) -> int:
        """The daemon's exit code, once it has ended."""
        _, rest = self.popen.communicate(timeout=PATIENCE_S)
        self.said += rest
        return self.popen.returncode


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private one for the sockets, short enough on every system."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as made:
        yield Path(made)


@contextlib.contextmanager
def manager(directory: Path, command: list[str], *arguments: str, watchdog_s: float | None = None) -> Iterator[Manager]:
    made = Manager(directory, command, *arguments, watchdog_s=watchdog_s)
    try:
        yield made
    finally:
        if made.popen.poll() is None:
            made.popen.kill()
        made.popen.communicate()
        made.notified.close()


def connected(path: Path) -> FakeClient:
    client = FakeClient(path, Codec.MSGPACK)
    client.say(wire.Hello(proto=wire.PROTOCOL, client="test"))
    assert isinstance(client.read(), wire.Welcome)
    return client


def test_the_first_request_starts_the_daemon_and_is_answered_and_the_path_survives_it(directory: Path) -> None:
    with manager(directory, SCRIPTED) as started:
        inode = started.path.stat().st_ino
        with FakeClient(started.path, Codec.JSON) as client:
            client.say(wire.Generate(id=1, prompt="count 3"))
            assert isinstance(client.until_terminal(1)[-1], wire.Done)
            client.say(wire.Shutdown(id=2))
            client.rest()
        assert started.ended() == 0
        assert f"listening on {started.path} (pid {started.popen.pid})" in started.said
        assert "WARNING" not in started.said
        assert started.path.stat().st_ino == inode, "the manager listens there for the next client"
        assert started.heard() == f"READY=1\nSTATUS=serving on {started.path}"
        assert started.heard().startswith("STOPPING=1\n")


def test_the_real_daemon_starts_and_answers_without_a_model(directory: Path) -> None:
    with manager(directory, REAL) as started:
        with Client(started.path, timeout=PATIENCE_S * 3) as client:
            assert client.welcome.pid == started.popen.pid
            assert client.status().models == []
            client.shutdown()
        assert started.ended() == 0
        assert started.path.is_socket()


def test_the_first_ask_starts_the_real_daemon_and_is_answered_and_so_is_the_next(
    directory: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "tiny")
    environment = {**os.environ, "MLXBC_SOCKET": str(directory / "mlxbc.sock")}
    ask = [
        sys.executable,
        "-m",
        "mlxbc",
        "ask",
        "--raw",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "8",
        "the story",
    ]
    with manager(directory, [*REAL, "--model", str(model)]) as started:
        inode = started.path.stat().st_ino
        first, second = (
            subprocess.run(
                ask, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S * 4, check=False
            )
            for _ in range(2)
        )
        assert (first.returncode, first.stderr) == (0, b"")
        assert len(first.stdout) >= 8
        assert (second.returncode, second.stdout) == (0, first.stdout)
        assert started.heard() == f"READY=1\nSTATUS=serving on {started.path}"
        stopped = subprocess.run(
            [sys.executable, "-m", "mlxbc", "stop"],
            env=environment,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert stopped.returncode == 0
        assert started.ended() == 0
        assert started.path.stat().st_ino == inode


def test_a_daemon_started_by_hand_leaves_the_managers_socket_alone(directory: Path) -> None:
    with manager(directory, SCRIPTED) as started:
        by_hand = [*SCRIPTED, "--socket", str(started.path)]
        for pid in ("as a service (see mlxbc service status)", f"(pid {started.popen.pid})"):
            second = subprocess.run(by_hand, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
            assert (second.returncode, second.stderr) == (0, f"mlxbcd: already running on {started.path} {pid}\n")
            # The first one has made the manager start its daemon, which then holds the lock as any other.
            with connected(started.path) as client:
                assert client.pinged()


def test_a_service_is_not_replaced_behind_its_managers_back(directory: Path) -> None:
    with manager(directory, SCRIPTED) as started:
        with FakeClient(started.path, Codec.JSON) as first:
            assert first.pinged()
        line = [*SCRIPTED, "--socket", str(started.path), "--replace"]
        second = subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
        assert second.returncode == os.EX_CONFIG
        assert "mlxbc service restart" in second.stderr
        with connected(started.path) as client:
            assert client.pinged()


def test_heartbeats_come_while_the_daemon_serves_and_while_it_drains(directory: Path) -> None:
    with manager(directory, SCRIPTED, watchdog_s=0.1) as started, connected(started.path) as client:
        assert started.heard().startswith("READY=1")
        assert [started.heard() for _ in range(3)] == ["WATCHDOG=1"] * 3
        client.say(wire.Generate(id=1, prompt="wait"))
        assert client.pinged()
        started.popen.terminate()
        while (heard := started.heard()) == "WATCHDOG=1":
            pass
        assert heard.startswith("STOPPING=1\n")
        assert [started.heard() for _ in range(4)] == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=30000000"] * 2
        with FakeClient(started.path, Codec.JSON) as other:
            other.say(wire.Count(id=2, text="release"))
            client.until_terminal(1)
        assert started.ended() == 0


def test_no_heartbeat_comes_from_a_daemon_whose_device_hangs(directory: Path) -> None:
    with manager(directory, SCRIPTED, "--model", "hangs", watchdog_s=0.1) as started, connected(started.path) as client:
        assert started.heard().startswith("READY=1")
        assert started.heard() == "STATUS=the device does not move"
        assert client.pinged(), "the loop is well, only the device isn't"
        client.say(wire.Shutdown(id=1))
        client.rest()
        assert started.heard().startswith("STOPPING=1"), "nothing came in between"


@pytest.mark.skipif(sys.platform != "linux", reason="counts wake-ups as Linux shows them")
def test_without_heartbeats_an_idle_daemon_does_not_wake_up(directory: Path) -> None:
    with manager(directory, SCRIPTED) as started, connected(started.path) as client:
        assert client.pinged()
        before = settled(lambda: list(switches(started.popen.pid).items()))
        time.sleep(0.5)  # what is measured is a time in which nothing happens
        assert list(switches(started.popen.pid).items()) == before


def test_a_daemon_that_finds_another_one_has_not_failed(directory: Path) -> None:
    """To systemd, a service that ends before it was ready has, and it would be started again and again."""
    path = directory / "mlxbc.sock"
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with notified:
        notified.bind(str(directory / "notify"))
        notified.settimeout(PATIENCE_S)
        first = subprocess.Popen([*SCRIPTED, "--socket", str(path)], stderr=subprocess.PIPE, text=True)
        assert first.stderr
        assert any("ready after" in line for line in first.stderr)
        environment = {**os.environ, "NOTIFY_SOCKET": str(directory / "notify")}
        second = subprocess.run(
            [*SCRIPTED, "--socket", str(path)], env=environment, stderr=subprocess.DEVNULL, check=False
        )
        assert second.returncode == 0
        assert notified.recv(1000).decode() == f"READY=1\nSTATUS=already running on {path} (pid {first.pid})"
        first.terminate()
        first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 0


def test_a_socket_of_the_wrong_kind_ends_the_daemon_with_the_reason(directory: Path) -> None:
    path = directory / "mlxbc.sock"
    command = [tool(), "--datagram", "--listen", str(path), *SCRIPTED]
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert started.stderr
    assert any("Listening on" in line for line in started.stderr)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"{}", str(path))
    _, said = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == os.EX_CONFIG
    assert "not a listening Unix stream socket with a path: the unit needs ListenStream=" in said
