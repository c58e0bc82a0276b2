"""Owns the thread that writes behind decode, and its pace: at full speed, a little at a time, or not at all."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from mlxbcd.errors import outline

log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], None]

_SHARE: Final = 0.01
"""Of the time, that slow writing takes. A step that needs all cores waits for the one that is taken from it."""


class Pace(enum.Enum):
    """How the writer may work."""

    FULL = "full"
    """Nothing decodes."""
    SLOW = "slow"
    """Something decodes that nobody watches as it comes."""
    PAUSED = "paused"
    """Somebody watches text as it comes."""


class Closing(Exception):
    """The writer has to end, whatever it is doing."""


class Writer:
    """Runs jobs one after the other on a thread of its own. Any thread may use it.

    A job calls `breathe` often. Jobs that fail are logged; nothing waits for one.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._pace = Pace.FULL
        self._deadline: float | None = None
        self._since = time.monotonic()
        self._busy = False
        self._thread = threading.Thread(target=self._main, name="cache-writer", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Writer({len(self._jobs)} jobs, {self._pace.value})"

    @property
    def waiting(self) -> int:
        """Jobs that aren't done."""
        with self._changed:
            return len(self._jobs) + self._busy

    def submit(self, job: Job) -> None:
        """Queue a job; ignored once the writer is closing."""
        with self._changed:
            if self._deadline is None:
                self._jobs.append(job)
                self._changed.notify_all()

    def set_pace(self, pace: Pace) -> None:
        """Change how fast it may work, from its next breath on."""
        if pace is not self._pace:
            with self._changed:
                self._pace = pace
                self._changed.notify_all()

    def breathe(self) -> None:
        """Inside a job: wait as the pace asks.

        Raises:
            Closing: there is no time left.
        """
        with self._changed:
            now = time.monotonic()
            resume = now + (now - self._since) * (1 / _SHARE - 1)
            while True:
                if self._deadline is not None:
                    if time.monotonic() >= self._deadline:
                        raise Closing
                    break
                if self._pace is Pace.FULL:
                    break
                if self._pace is Pace.SLOW:
                    if (left := resume - time.monotonic()) <= 0:
                        break
                    self._changed.wait(left)
                else:
                    self._changed.wait()
            self._since = time.monotonic()

    def settle(self, timeout: float) -> bool:
        """Wait until all jobs are done; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def close(self, patience: float) -> None:
        """Finish what is queued at full speed, for at most `patience` seconds, and end. Idempotent."""
        with self._changed:
            self._deadline = min(self._deadline or float("inf"), time.monotonic() + patience)
            self._changed.notify_all()
        self._thread.join()

    def _main(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Closing:
                return
            except Exception as error:
                log.error("writing to the cache failed: %s", outline(error))
            del job

    def _next(self) -> Job | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._jobs) or self._deadline is not None)
            if not self._jobs or (self._deadline is not None and time.monotonic() >= self._deadline):
                self._jobs.clear()
                return None
            self._busy = True
            self._since = time.monotonic()
            return self._jobs.popleft()
