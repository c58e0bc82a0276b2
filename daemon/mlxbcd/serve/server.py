"""Owns the running server: its connections as a whole, and the order in which everything ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import Final, Protocol

from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Service
from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.limits import Ledger, Limits
from mlxbcd.serve.listen import BACKLOG
from mlxbcd.serve.logs import where
from mlxbcd.serve.session import Session

log = logging.getLogger(__name__)

_TAKING_S: Final = 5.0
"""How long a daemon that asked for the path may take to listen there."""
_POLL_S: Final = 0.01
_REFUSALS: Final = 64
"""Connections over the limit that are told so; more are closed without a word."""


class Path(Protocol):
    """The place where the server listens."""

    def hand_over(self) -> bool:
        """Let another daemon take it; False if it isn't ours to give."""

    @property
    def taken(self) -> bool:
        """Another daemon listens there now."""


class Server:
    """Serves connections until the lifecycle ends.

    Args:
        service: does the work; closed by `serve`.
        lifecycle: says when to stop, and how.
        user: the uid whose processes may connect; None is this process's.
        path: what can be handed over to another daemon; None if that isn't possible.
    """

    def __init__(
        self,
        service: Service,
        lifecycle: Lifecycle,
        *,
        limits: Limits | None = None,
        user: int | None = None,
        path: Path | None = None,
    ) -> None:
        self.service = service
        self.limits = limits or Limits()
        self.ledger = Ledger(self.limits.buffered)
        self.user = os.geteuid() if user is None else user
        self._lifecycle = lifecycle
        self._path = path
        self._handing_over: asyncio.Task[None] | None = None
        self._sessions: set[Session] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"Server({self.connections} connections, {self._lifecycle.state}, {self.ledger})"

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._sessions)

    def enter(self, session: Session) -> bool:
        """A connection began; False if there are too many already."""
        self._sessions.add(session)
        self._empty.clear()
        if self.connections > self.limits.connections + _REFUSALS:
            session.drop()
        return self.connections <= self.limits.connections

    def leave(self, session: Session) -> None:
        """A connection ended."""
        self._sessions.discard(session)
        if not self._sessions:
            self._empty.set()

    def stop(self, *, drain: bool) -> None:
        """A client asks the daemon to stop."""
        self._lifecycle.stop(drain=drain)

    def hand_over(self) -> bool:
        """Another daemon takes the path. What runs may finish, but whoever comes to the other one waits for that."""
        if self._path is None or not self._path.hand_over():
            return False
        if self._handing_over is None:
            self._handing_over = asyncio.get_running_loop().create_task(self._hand_over(self._path))
        return True

    async def _hand_over(self, path: Path) -> None:
        # Whoever connects before the other one listens must find somebody.
        given_up = time.monotonic() + _TAKING_S
        while not path.taken and time.monotonic() < given_up:
            await asyncio.sleep(_POLL_S)
        self._lifecycle.stop(drain=True, patience=self.limits.drain_s)

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on `listener`, a listening Unix socket, until the end.

        While running requests finish, connections are still accepted, so that a client learns why it can't
        be served.
        """
        loop = asyncio.get_running_loop()
        # The path is not the loop's: whoever bound it removes it.
        accepting = await loop.create_unix_server(
            lambda: Session(self),
            sock=listener,
            backlog=BACKLOG,
            cleanup_socket=False,  # type: ignore[call-arg]  # uvloop takes it on every Python
        )
        try:
            await self._lifecycle.asked()
            await self._end_work()
        finally:
            accepting.close()
            await self._end_connections()

    async def _end_work(self) -> None:
        try:
            if not await self._lifecycle.unless_hurried(self.service.drain()):
                log.info("not all running requests finished")
        except Exception as error:
            log.error("draining failed: %s", where(error))
        if self._lifecycle.fault is not None:
            return
        try:
            if not await self._lifecycle.unless_failed(self.service.close(), self.limits.close_s):
                log.error("the service did not close within %g s", self.limits.close_s)
        except Exception as error:
            log.error("closing the service failed: %s", where(error))

    async def _end_connections(self) -> None:
        fault = self._lifecycle.fault
        for session in list(self._sessions):
            if fault is None:
                session.finish()
            else:
                session.fail(ServeError("device_error", "the device failed; the daemon restarts: try again"))
        try:
            await asyncio.wait_for(self._empty.wait(), self.limits.linger_s)
        except TimeoutError:
            for session in list(self._sessions):
                session.drop()
            await self._empty.wait()
