"""Owns one running request of a connection: that it ends exactly once, whatever its job does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from mlxbc import wire
from mlxbc.framing import FrameError
from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Cause, Job, Send
from mlxbcd.serve.logs import where
from mlxbcd.serve.replies import error_reply

log = logging.getLogger(__name__)

_TERMINAL: Final = frozenset(wire.TERMINAL)


class Call:
    """Passes the replies to one request on, up to and including the first terminal one.

    Args:
        request: the request's id.
        send: writes a reply; may raise if it can't be written.
        ended: called once, after the terminal reply.
        supersede: a later request with the same key ends this one.
    """

    __slots__ = ("_cancelled", "_ended", "_job", "_send", "_when_ended", "id", "supersede")

    def __init__(self, request: int, send: Send, ended: Callable[[Call], None], supersede: str | None = None) -> None:
        self.id = request
        self.supersede = supersede
        self._send = send
        self._when_ended = ended
        self._job: Job | None = None
        self._cancelled: Cause | None = None
        self._ended = False

    def __repr__(self) -> str:
        state = "ended" if self._ended else "cancelled" if self._cancelled else "running"
        return f"Call({self.id}, {state})"

    def start(self, job: Job) -> None:
        """`job` does the work. It may have ended, or been cancelled, while it was being submitted."""
        self._job = job
        if self._cancelled and not self._ended:
            self.cancel(self._cancelled)

    def cancel(self, reason: Cause = "cancelled") -> None:
        """End the request early; its terminal reply still comes from the job."""
        self._cancelled = reason
        if self._job is None:
            return
        try:
            self._job.cancel(reason)
        except Exception as error:
            log.error("request %d could not be cancelled: %s", self.id, where(error))

    def reply(self, message: wire.Reply) -> None:
        """Pass a reply of the job on. One that can't be written ends the request with an error."""
        if self._ended:
            log.error("request %d sent %s after its end", self.id, type(message).__name__)
            return
        try:
            self._send(message)
        except Exception as error:
            log.error("a reply to request %d can't be written: %s", self.id, where(error))
            if isinstance(error, FrameError):
                self.end(ServeError(error.code, "the answer is too long for a frame: ask for less at once"))
            else:
                self.end(ServeError("internal", "the answer can't be written; see the daemon's log"))
            self.cancel()
            return
        if type(message) in _TERMINAL and not self._ended:
            self._ended = True
            self._when_ended(self)

    def end(self, error: ServeError) -> None:
        """End the request with `error`, whatever its job says later."""
        if not self._ended:
            self._send(error_reply(error, self.id))
            self._ended = True
            self._when_ended(self)
