"""Owns the HTTP server's process: its socket, its token, its log, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import uvicorn
import uvloop
from msgspec import Struct

from mlxbc import paths
from mlxbc.errors import ConfigError
from mlxbc.files import create
from mlxbc.http.app import application

DRAIN_S: Final = 30
"""How long running answers may take once the server has been told to stop."""
CONNECTIONS: Final = 256
"""Open at once; more are told to come back."""
_TOKEN_BYTES: Final = 32


class Options(Struct, frozen=True, kw_only=True):
    """How to serve.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        token: what clients call their API key; None lets everybody in.
        hosts: names by which the server may be called.
        origins: of web pages that may ask.
        path: the daemon's socket; None finds the user's own.
    """

    host: str
    port: int
    token: str | None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    path: str | None = None


class _Server(uvicorn.Server):
    """Uvicorn, but for two things: it doesn't wake up ten times a second, and signals are the event loop's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._told.wait()

    def stop(self) -> None:
        """End after the answers that run; told again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._told.set()


Ready: TypeAlias = Callable[[str, Callable[[], None]], None]
"""Hears of the URL, and of what ends the server when it is called: gently, and at once when it is called again."""


async def serve(options: Options, ready: Ready) -> None:
    """Serve until told to stop.

    Raises:
        ConfigError: nothing can listen there.
    """
    app = application(path=options.path, token=options.token, hosts=options.hosts, origins=options.origins)
    with contextlib.closing(bind(options.host, options.port)) as listener:
        server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                limit_concurrency=CONNECTIONS,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        ready(url(listener), server.stop)
        await server.serve(sockets=[listener])


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the address is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        # Else a restart would have to wait for the kernel to forget old connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; --port N chooses another"
        ) from None
    return listener


def url(listener: socket.socket) -> str:
    """What clients call their base URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def token_path() -> Path:
    """Where the token is kept."""
    return paths.config_dir() / "http-token"


def token() -> str:
    """This user's token, made at its first use.

    Raises:
        ConfigError: it can't be read or written, or others can read it.
    """
    path = token_path()
    try:
        made = secrets.token_urlsafe(_TOKEN_BYTES)
        create(path, f"{made}\n")
        return made
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"cannot keep a token in {path}: {error.strerror or error}") from None


def _read(path: Path) -> str:
    with path.open(encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        kept = file.read(4096).strip()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others; make a new token: rm {path}")
    if not kept:
        raise ConfigError(f"{path} is empty; make a new token: rm {path}")
    return kept


def run(options: Options, ready: Callable[[str], None]) -> None:
    """Serve in this process until a signal ends it; `ready` hears of the URL.

    Raises:
        ConfigError: nothing can listen there.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Discreet("mlxbc: http: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def started(url: str, stop: Callable[[], None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        ready(url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options, started))


class _Discreet(logging.Formatter):
    """Tells where an exception was raised and of which type, not what it says: that may repeat a prompt."""

    def formatException(self, ei: Any) -> str:
        kind, _error, trace = ei
        return "".join(traceback.format_tb(trace)) + getattr(kind, "__name__", "")
