"""Owns what a service manager hears from a serving daemon: that it is ready, that it is alive, and that it ends."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Final, Protocol

from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.notify import Notifier

EXTENSION_S: Final = 30.0
"""How much more time for stopping is asked for, three times as often."""

log = logging.getLogger(__name__)


class Patient(Protocol):
    """What can be seen to hang while the event loop is well."""

    @property
    def stuck(self) -> bool:
        """It has been at one thing for so long that it may never return."""


class Herald:
    """Tells the manager, from entering to leaving; the manager may end a daemon that says nothing.

    Heartbeats come from the event loop, so they stop if it does, and they stop while `patient` is stuck. Where no
    heartbeat is expected no timer runs. A daemon that ends asks for more time as long as its requests move.
    """

    def __init__(self, notifier: Notifier, lifecycle: Lifecycle, patient: Patient, where: str) -> None:
        self._notifier = notifier
        self._lifecycle = lifecycle
        self._patient = patient
        self._serving = f"serving on {where}"
        self._worried = False
        self._said_stopping = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Herald({self._notifier}, {'worried' if self._worried else 'calm'})"

    async def __aenter__(self) -> Herald:
        if self._notifier.wanted:
            self._notifier.ready(self._serving)
            self._task = asyncio.create_task(self._tell())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._stopping()

    async def _tell(self) -> None:
        period = self._notifier.watchdog_s
        asked = asyncio.ensure_future(self._lifecycle.asked())
        try:
            while not asked.done():
                if period is not None:
                    self._beat()
                await asyncio.wait({asked}, timeout=None if period is None else period / 2)
        finally:
            asked.cancel()
        self._stopping()
        while True:
            if self._beat():
                self._notifier.extend(EXTENSION_S)
            await asyncio.sleep(min(period or EXTENSION_S, EXTENSION_S) / 3)

    def _beat(self) -> bool:
        """A heartbeat, if there is reason for one; whether there was."""
        stuck = self._patient.stuck
        if stuck != self._worried:
            self._worried = stuck
            if stuck:
                log.error("the device has been at one step for too long: no heartbeat until it moves")
            self._notifier.status("the device does not move" if stuck else self._serving)
        if not stuck and self._notifier.watchdog_s is not None:
            self._notifier.alive()
        return not stuck

    def _stopping(self) -> None:
        if not self._said_stopping:
            self._said_stopping = True
            self._notifier.stopping("stopping: running requests finish first")
