"""Owns the end of the daemon: who asked for it, how gently it comes, and with which exit code."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Lifecycle:
    """One decision, taken once and then only hurried: to stop.

    Belongs to one event loop and is used on its thread.

    Attributes:
        fault: what the device failed with; nothing that it holds can be trusted.
        stuck: something did not end when told to, so only the kernel can end the process.
    """

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self.stuck = False
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._failed = asyncio.Event()
        self._signals = 0

    def __repr__(self) -> str:
        return f"Lifecycle({self.state})"

    @property
    def state(self) -> str:
        """`failed`, `hurried`, `stopping` or `running`."""
        events = {"failed": self._failed, "hurried": self._hurried, "stopping": self._asked}
        return next((name for name, event in events.items() if event.is_set()), "running")

    @property
    def stopping(self) -> bool:
        """Somebody asked for the end."""
        return self._asked.is_set()

    @property
    def exit_code(self) -> int:
        """0, unless a service manager should start the daemon again."""
        return os.EX_SOFTWARE if self.fault else os.EX_OK

    def stop(self, *, drain: bool, patience: float | None = None) -> None:
        """Ask for the end. Without `drain`, or after `patience` seconds, running requests are not waited for.

        Asking again can only hurry it.
        """
        if not drain:
            self._hurried.set()
        elif patience is not None:
            asyncio.get_running_loop().call_later(patience, self._hurried.set)
        self._asked.set()

    def signalled(self, patience: float) -> None:
        """A person or a service manager asks: gently the first time."""
        self._signals += 1
        again = self._signals > 1
        log.info("signalled %s", "again: running requests end now" if again else "to stop")
        self.stop(drain=not again, patience=patience)

    def fail(self, error: BaseException) -> None:
        """The device failed: end now, and let nothing wait for it."""
        if self.fault is None:
            log.error("the device failed: %s", type(error).__name__)
            self.fault = error
        self._failed.set()
        self.stop(drain=False)

    async def asked(self) -> None:
        """Wait until somebody asks for the end."""
        await self._asked.wait()

    async def unless_asked(self, work: Awaitable[T], grace: float) -> T | None:
        """Do `work`; but when the end is asked for, cancel it and give it `grace` seconds.

        The result is None if it ended without one.

        Raises:
            Exception: whatever `work` raises before the end is asked for.
        """
        task = asyncio.ensure_future(work)
        if await _ends_before(task, self._asked, None):
            return task.result()
        task.cancel()
        if not await _ends_before(task, self._failed, grace):
            self.stuck = True
            return None
        if task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def unless_hurried(self, work: Awaitable[None]) -> bool:
        """Do `work`; False, and cancelled, if the hurry came first."""
        task = asyncio.ensure_future(work)
        if await _ends_before(task, self._hurried, None):
            task.result()
            return True
        task.cancel()
        return False

    async def unless_failed(self, work: Awaitable[None], grace: float) -> bool:
        """Do `work` for at most `grace` seconds; False, and `stuck`, if that or a fault cut it short."""
        task = asyncio.ensure_future(work)
        if await _ends_before(task, self._failed, grace):
            task.result()
            return True
        self.stuck = True
        return False


async def _ends_before(task: asyncio.Future[T], event: asyncio.Event, timeout: float | None) -> bool:
    """Wait for `task`, but no longer than until `event` is set or `timeout` is over; whether it ended."""
    other = asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[Any]] = {task, other}
    try:
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()
    return task.done()
