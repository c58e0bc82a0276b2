"""Owns real daemon processes with the default model, and what tests ask of them again and again."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "protocol"))

from fake_service import FakeClient

from mlxbc import Client, wire
from mlxbc.framing import Codec
from mlxbc.request import build

PATIENCE_S = 60.0
"""How long a test waits for what must happen before it fails."""

Fields: TypeAlias = Mapping[str, Any]
"""Of a `generate` message."""
Frames: TypeAlias = FakeClient
"""A client that sees the frames of all its requests in the order in which the daemon sent them."""


class Daemon:
    """A daemon process. Its log is read by `logged`, and to the end by `ended`."""

    def __init__(self, path: Path, model: Path, *arguments: str) -> None:
        self.path = path
        self.said = ""
        command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--socket", str(path), "--model", str(model)]
        self.popen = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def logged(self, text: str) -> None:
        """Wait until the log says `text`."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.said += line
            if text in line:
                return
        raise AssertionError(f"never logged {text!r}:\n{self.said}")

    def ended(self) -> int:
        """The exit code, once the process has ended."""
        _, rest = self.popen.communicate(timeout=PATIENCE_S)
        self.said += rest
        return self.popen.returncode

    def client(self) -> Client:
        return Client(self.path, client_name="test", timeout=PATIENCE_S)

    def frames(self) -> Frames:
        """A connection that has said hello."""
        client = Frames(self.path, Codec.MSGPACK)
        client.socket.settimeout(PATIENCE_S)
        client.say(wire.Hello(proto=wire.PROTOCOL, client="test"))
        assert isinstance(client.read(), wire.Welcome)
        return client

    def until(self, condition: Callable[[wire.StatusReport], bool]) -> wire.StatusReport:
        """Ask for the status until it is as wanted."""
        with self.client() as client:
            began = time.monotonic()
            while not condition(report := client.status()):
                assert time.monotonic() < began + PATIENCE_S, report
                time.sleep(0.01)
        return report


@contextlib.contextmanager
def socket_path() -> Iterator[Path]:
    """A path for a socket, in a directory of its own and short enough on every system."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


@contextlib.contextmanager
def daemon(path: Path, model: Path, *arguments: str, wait_for: str = "loaded") -> Iterator[Daemon]:
    """A running daemon; ready, unless told what else to wait for, once the model is loaded."""
    process = Daemon(path, model, *arguments)
    try:
        process.logged(wait_for)
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        _, rest = process.popen.communicate()
        print(process.said + rest)  # for whoever reads about a test that failed


class Solo:
    """What requests generate with the daemon to themselves; each is asked once, for the most tokens wanted so far."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._known: dict[str, list[int]] = {}

    def ids(self, fields: Fields, count: int) -> list[int]:
        """The first `count` token ids."""
        known = self._known.get(str(fields), [])
        if len(known) < count:
            self._daemon.until(lambda report: report.running + report.queued == 0)
            with self._daemon.client() as client:
                known = client.generate(**fields, max_tokens=count, resumable=True).wait().ids
            assert len(known) == count, "stories have no end"
            self._known[str(fields)] = known
        return known[:count]


def switches(pid: int) -> dict[str, int]:
    """How often each thread of a process has gone to sleep by itself: once per wake-up. Linux only."""
    counts = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            for line in (thread / "status").read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    name = (thread / "comm").read_text().strip()
                    counts[f"{name} {thread.name}"] = int(line.split()[1])
    return counts


def ask(request: int, fields: Fields, **more: Any) -> wire.Generate:
    """A `generate` message whose token frames carry ids."""
    return build(wire.Generate, request, **{"resumable": True, **fields, **more})


def tokens(journal: list[wire.Reply], request: int) -> list[int]:
    """The ids of one request's tokens in a list of frames."""
    return [token for frame in journal if isinstance(frame, wire.Token) and frame.id == request for token in frame.ids]
