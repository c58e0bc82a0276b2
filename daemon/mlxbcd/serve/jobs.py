"""Owns the requests that are one coroutine with one answer; generations have a module of their own."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable

from mlxbc import wire
from mlxbcd.errors import ServeError, outline
from mlxbcd.serve.contract import Cause, Send
from mlxbcd.serve.replies import error_reply

log = logging.getLogger(__name__)


class TaskJob:
    """A request whose work is a coroutine. It ends with what the work answers, its error, or a cancel.

    Args:
        work: gets the job, and must `answer` it unless it raises.
        forget: called once, when the terminal frame has been sent.
    """

    def __init__(
        self,
        request_id: int,
        reply: Send,
        work: Callable[[TaskJob], Awaitable[None]],
        forget: Callable[[TaskJob], None],
    ) -> None:
        self.id = request_id
        self._reply = reply
        self._forget = forget
        self._over = False
        self.task = asyncio.get_running_loop().create_task(self._run(work))

    def __repr__(self) -> str:
        return f"TaskJob({self.id}, {'over' if self._over else 'running'})"

    def say(self, reply: wire.Reply) -> None:
        """Send a frame on the way, unless the job has ended."""
        if not self._over:
            self._reply(reply)

    def answer(self, reply: wire.Reply) -> None:
        """Send the terminal frame, unless the job has ended."""
        if not self._over:
            self._over = True
            self._reply(reply)
            self._forget(self)

    def failed(self, error: ServeError) -> None:
        """End with an error, and stop the work. Idempotent."""
        if not self._over:
            self.answer(error_reply(error, self.id))
            self.task.cancel()

    def cancel(self, reason: Cause = "cancelled") -> None:
        """See `contract.Job.cancel`."""
        by = "superseded by a newer request" if reason == "superseded" else "cancelled by the client"
        self.failed(ServeError("bad_request", by))

    async def _run(self, work: Callable[[TaskJob], Awaitable[None]]) -> None:
        try:
            await work(self)
        except ServeError as error:
            self.answer(error_reply(error, self.id))
        except Exception as error:
            self.answer(error_reply(internal(error), self.id))


class FinishedJob:
    """A request that was answered while it was submitted."""

    def cancel(self, reason: Cause = "cancelled") -> None:
        """Nothing is left to end."""


def internal(error: Exception) -> ServeError:
    """What to tell a client about an exception nobody expected; it is logged here."""
    log.error("a request failed: %s", outline(error))
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        message = "the daemon may open no more files; allow it more (ulimit -n), or close connections, and retry"
        return ServeError("internal", message)
    return ServeError("internal", f"the daemon failed at this request ({type(error).__name__}); its log says where")
