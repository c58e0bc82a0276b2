"""What systemd hears, and that nothing depends on its listening."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxbcd.serve.notify import Notifier


@pytest.fixture(params=["a path", "an abstract name"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end; its name is what systemd would put into NOTIFY_SOCKET."""
    if request.param == "an abstract name" and sys.platform != "linux":
        pytest.skip("this system has no abstract sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "n") if request.param == "a path" else f"\0mlxbc-test-{os.getpid()}")
        end.settimeout(5)
        yield end


def address(end: socket.socket) -> str:
    name = end.getsockname()
    return "@" + name[1:].decode() if isinstance(name, bytes) else str(name)


def test_each_message_is_one_datagram_of_assignments(heard: socket.socket) -> None:
    notifier = Notifier(address(heard))
    assert notifier.wanted
    notifier.ready("serving on /run/s")
    notifier.alive()
    notifier.status("well")
    notifier.extend(1.5)
    notifier.stopping("bye")
    assert [heard.recv(1000).decode() for _ in range(5)] == [
        "READY=1\nSTATUS=serving on /run/s",
        "WATCHDOG=1",
        "STATUS=well",
        "EXTEND_TIMEOUT_USEC=1500000",
        "STOPPING=1\nSTATUS=bye",
    ]


def test_a_status_cannot_say_anything_but_itself(heard: socket.socket) -> None:
    Notifier(address(heard)).status("on /run/a\nREADY=1\r\nb")
    assert heard.recv(1000) == b"STATUS=on /run/a READY=1 b"


def test_the_environment_names_socket_and_period_once(heard: socket.socket) -> None:
    environ = {
        "NOTIFY_SOCKET": address(heard),
        "WATCHDOG_USEC": "60000000",
        "WATCHDOG_PID": str(os.getpid()),
        "HOME": "/h",
    }
    notifier = Notifier.from_environment(environ)
    assert notifier.wanted
    assert notifier.watchdog_s == 60
    assert environ == {"HOME": "/h"}, "no child takes it for its own"
    assert "60 s" in repr(notifier)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_heartbeats_are_wanted_only_from_this_process_and_at_a_period(
    extra: dict[str, str], expected: float | None
) -> None:
    assert Notifier.from_environment({"NOTIFY_SOCKET": "/n", **extra}).watchdog_s == expected


def test_where_nobody_listens_nothing_happens() -> None:
    notifier = Notifier.from_environment({"WATCHDOG_USEC": "60000000"})
    assert not notifier.wanted
    assert notifier.watchdog_s is None, "no timer for nobody"
    notifier.ready("serving")
    notifier.stopping("bye")


def test_a_manager_that_has_gone_is_one_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Notifier(str(tmp_path / "gone")).ready("serving")
    assert [record.getMessage() for record in caplog.records] == [
        "the service manager was not told READY=1: No such file or directory"
    ]


def test_an_address_that_is_no_unix_socket_is_said_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notifier = Notifier("vsock:2:1234", watchdog_s=1.0)
    assert not notifier.wanted
    assert notifier.watchdog_s is None
    assert "vsock:2:1234 is no Unix socket" in caplog.text
