"""Owns the running server: its connections as a whole, and the order in which everything ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Final

from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Service
from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.limits import Ledger, Limits
from mlxbcd.serve.listen import BACKLOG
from mlxbcd.serve.logs import where
from mlxbcd.serve.session import Session

log = logging.getLogger(__name__)

_REFUSALS: Final = 64
"""Connections over the limit that are told so; more are closed without a word."""


class Server:
    """Serves connections until the lifecycle ends.

    Args:
        service: does the work; closed by `serve`.
        lifecycle: says when to stop, and how.
        user: the uid whose processes may connect; None is this process's.
    """

    def __init__(
        self, service: Service, lifecycle: Lifecycle, *, limits: Limits | None = None, user: int | None = None
    ) -> None:
        self.service = service
        self.limits = limits or Limits()
        self.ledger = Ledger(self.limits.buffered)
        self.user = os.geteuid() if user is None else user
        self._lifecycle = lifecycle
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
