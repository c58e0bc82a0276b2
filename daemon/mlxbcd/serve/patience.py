"""Owns timers that measure how long somebody else is silent: a machine that sleeps, or a stopped process, isn't that.

Clocks differ in whether they go on while a machine sleeps, and they do while a process is stopped. Then all timers are
due at once, before anything that has arrived meanwhile could be read. So one that is far too late waits once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LATE_S: Final = 1.0
"""A timer is late by this much only if the process did not run."""


class Patience:
    """Calls `action` after `seconds` in which the process ran; `cancel` ends that."""

    __slots__ = ("_action", "_due", "_handle", "_loop", "_seconds")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._action = action
        self._start()

    def __repr__(self) -> str:
        return f"Patience({self._seconds:g} s)"

    def cancel(self) -> None:
        """Don't call. Idempotent."""
        self._handle.cancel()

    def _start(self) -> None:
        self._due = self._loop.time() + self._seconds
        self._handle = self._loop.call_later(self._seconds, self._fire)

    def _fire(self) -> None:
        if self._loop.time() - self._due > LATE_S:
            self._start()
        else:
            self._action()
