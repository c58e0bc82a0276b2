"""Owns the two servers under test as processes: our daemon on a Unix socket, the peer on a port of this machine.

Both are context managers. A server that dies, or never answers, ends the benchmark with the end of its log.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType
from typing import ClassVar, Self

from mlxbc.client import Client
from mlxbc.errors import MlxbcError
from mlxbcd.model.blas import enable

_PATIENCE_S = 120.0
_POLL_S = 0.002
_LOG_TAIL = 2000
_TESTS = Path(__file__).resolve().parents[1]


def script(name: str) -> str:
    """A console script of this Python's environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def module_environment() -> dict[str, str]:
    """The environment in which ``python -m bench.…`` works."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *([before] if before else [])])}


class Server:
    """A server process, with a directory of its own.

    Attributes:
        talks: it answers lines on its standard streams, see `say`.
        began: when it was started, in seconds of `perf_counter`.
    """

    talks: ClassVar[bool] = False

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="mlxbc-bench-")
        self.directory = Path(self._scratch.name)
        self.began = 0.0
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        with (self.directory / "log").open("wb") as log:
            self.began = perf_counter()
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.PIPE if self.talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.talks else log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._scratch.cleanup()

    def command(self) -> Sequence[str]:
        """What is run."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What it is run with."""
        return dict(os.environ)

    def answers(self) -> bool:
        """Ask once whether it is ready."""
        raise NotImplementedError

    def await_ready(self) -> float:
        """Wait until it answers; the seconds that took since it was started.

        Raises:
            RuntimeError: it died, or took far too long.
        """
        while not self.answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self} ended with code {self._process.returncode}; from its log:\n{self._tail()}")
            if perf_counter() - self.began > _PATIENCE_S:
                raise RuntimeError(f"{self} did not answer within {_PATIENCE_S:g} s; from its log:\n{self._tail()}")
            sleep(_POLL_S)
        return perf_counter() - self.began

    def say(self, line: bytes) -> bytes:
        """Write it a line and wait for the line that it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def _tail(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-_LOG_TAIL:]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' '.join(self.command())})"


class Daemon(Server):
    """Our daemon. Ready when it answers `hello`; the model loads behind that.

    Args:
        more: arguments.
        cache: where it keeps states on the disk; None keeps them in memory alone, and out of the user's cache.
    """

    def __init__(self, model: Path, *more: str, cache: Path | None = None) -> None:
        super().__init__()
        self._cache = cache
        self.model = model
        self.socket = self.directory / "socket"
        self._more = more

    def command(self) -> Sequence[str]:
        plain = [script("mlxbcd"), "--socket", str(self.socket), "--model", str(self.model), "--log-level", "warning"]
        disk = ["--no-cache-disk"] if self._cache is None else ["--set", f"cache.directory={self._cache}"]
        return [*plain, *disk, *self._more]

    def answers(self) -> bool:
        try:
            Client(self.socket, client_name="bench").close()
        except MlxbcError:
            # Nobody listens yet, or it died while we waited: then the process says so.
            return False
        return True


class Peer(Server):
    """mlx-lm's HTTP server. Ready when /health says so; the model loads behind that."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = model
        self.port = _free_port()

    def command(self) -> Sequence[str]:
        return [
            *[sys.executable, "-P", "-m", "bench.peer_server", "--model", str(self.model)],
            *["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "WARNING"],
        ]

    def environment(self) -> dict[str, str]:
        settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.directory / "hub")}
        if enable().kind != "native":
            # As in our daemon: on the CPU, compiling calls g++ at run time, for no gain.
            settings["MLX_DISABLE_COMPILE"] = "1"
        return module_environment() | settings

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


class LlamaCpp(Server):
    """llama.cpp's server. Ready when /health says so, with the model loaded."""

    def __init__(self, binary: Path, gguf: Path) -> None:
        super().__init__()
        self._binary = binary
        self._gguf = gguf
        self.port = _free_port()

    def command(self) -> Sequence[str]:
        slots, context = 8, 8 * 8192
        return [
            *[str(self._binary), "--model", str(self._gguf), "--host", "127.0.0.1", "--port", str(self.port)],
            *["--threads", str(os.cpu_count()), "--parallel", str(slots), "--ctx-size", str(context)],
        ]

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
