"""Owns requests that are told of things until they are cancelled, `watch` and `trace`: they are no work of the daemon.

A draining daemon doesn't wait for them, and nothing of theirs runs while nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Cause, Send
from mlxbcd.serve.replies import error_reply
from mlxbcd.trace import Span, Tracer

BATCH_S: Final = 0.1
"""Spans are sent this often."""
MOST_SPANS: Final = 5000
"""Of one batch; more are counted and dropped."""


class Changes:
    """Tells everybody who waits that something may be different."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def poke(self) -> None:
        """Something may be different."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Until it may."""
        await self._event.wait()


class Subscription:
    """A request that goes on until its client cancels it, or the daemon ends.

    Args:
        forget: called once, before the terminal frame.
    """

    def __init__(self, request: int, reply: Send, forget: Callable[[Subscription], None]) -> None:
        self.id = request
        self._reply = reply
        self._forget = forget
        self._over = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id}, {'over' if self._over else 'running'})"

    def begin(self) -> None:
        """Go on in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=type(self).__name__)

    def cancel(self, reason: Cause = "cancelled") -> None:
        """See `contract.Job.cancel`."""
        self._end(self._last())

    def failed(self, error: ServeError) -> None:
        """End with an error. Idempotent."""
        self._end(error_reply(error, self.id))

    def _last(self) -> wire.Reply:
        return wire.Ended(id=self.id)

    def _end(self, last: wire.Reply) -> None:
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()
        self._forget(self)
        self._reply(last)

    async def _run(self) -> None:
        raise NotImplementedError


class Watch(Subscription):
    """Sends the daemon's status, at once and whenever it has changed, but not more often than asked for.

    Args:
        report: makes it, with the request's id.
    """

    def __init__(
        self,
        request: wire.Watch,
        reply: Send,
        forget: Callable[[Subscription], None],
        report: Callable[[int], wire.StatusReport],
        changes: Changes,
    ) -> None:
        super().__init__(request.id, reply, forget)
        self._interval = request.interval_ms / 1e3
        self._report = report
        self._changes = changes

    async def _run(self) -> None:
        told: wire.StatusReport | None = None
        while True:
            report = self._report(self.id)
            if told is None or _essence(report) != _essence(told):
                told = report
                self._reply(wire.Change(id=self.id, status=report))
            # What runs goes on by itself; what rests says when it begins.
            await (asyncio.sleep(self._interval) if _moves(report) else self._changes.wait())
            if not _moves(report):
                await asyncio.sleep(self._interval)


def _moves(report: wire.StatusReport) -> bool:
    return bool(report.running or report.queued or report.loading)


def _essence(report: wire.StatusReport) -> wire.StatusReport:
    """What counts as a change: not that time goes by, or that the system counts pages otherwise."""
    models = [msgspec.structs.replace(model, idle_s=0.0, expires_s=None) for model in report.models]
    return msgspec.structs.replace(report, uptime_s=0.0, footprint=0, connections=0, models=models)


class Trace(Subscription):
    """Sends spans in batches while they come."""

    def __init__(self, request: int, reply: Send, forget: Callable[[Subscription], None], tracer: Tracer) -> None:
        super().__init__(request, reply, forget)
        self._spans: list[wire.Span] = []
        self._dropped = 0
        self._flushing: asyncio.TimerHandle | None = None
        self._unlisten = tracer.listen(self._take)

    def _last(self) -> wire.Reply:
        self._flush()
        return wire.Ended(id=self.id, dropped=self._dropped)

    def _end(self, last: wire.Reply) -> None:
        if not self._over:
            self._unlisten()
            if self._flushing is not None:
                self._flushing.cancel()
        super()._end(last)

    def _take(self, span: Span) -> None:
        if len(self._spans) >= MOST_SPANS:
            self._dropped += 1
            return
        begin, micros = round(span.begin * 1e6), round(span.seconds * 1e6)
        self._spans.append(wire.Span(span.name, span.track, begin, micros, span.facts))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(BATCH_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        if self._spans and not self._over:
            spans, self._spans = self._spans, []
            self._reply(wire.Spans(id=self.id, spans=spans))
