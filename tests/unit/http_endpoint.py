"""Owns the HTTP endpoint under test: the real server, in a thread of this process, before a scripted daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from mlxbc.http.server import Options, serve

PATIENCE = 10.0
TOKEN = "a token of the tests"


class Endpoint:
    """A server on a free port.

    Attributes:
        url: what OpenAI's clients call their base URL.
        socket: where it looks for its daemon.
    """

    def __init__(self, socket: Path, **options: Any) -> None:
        self.url = ""
        self.socket = socket
        self._options = Options(**{"host": "127.0.0.1", "port": 0, "token": TOKEN, "path": str(socket), **options})
        self._ready = threading.Event()
        self._stop: Callable[[], None]
        self._loop: asyncio.AbstractEventLoop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Endpoint:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    @property
    def root(self) -> str:
        """The URL of the server itself."""
        return self.url.removesuffix("/v1")

    def _run(self) -> None:
        try:
            asyncio.run(serve(self._options, self._began))
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def _began(self, url: str, stop: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self.url = url
        self._ready.set()
