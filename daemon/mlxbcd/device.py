"""Owns the device thread: the one thread of the process that touches MLX.

MLX streams are thread-local, and a lazy array evaluated on another thread raises. So loading, forwards, sampling and
freeing all run here, one job at a time in the order submitted, and only plain Python values leave.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class DeviceClosed(RuntimeError):
    """A job was submitted to a device thread that isn't running."""


class Device:
    """Runs jobs on a thread of its own, for one event loop.

    Use as ``device = Device(); device.start(); await device.run(job); await device.close()``.
    """

    def __init__(self, name: str = "device") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._busy_since: float | None = None

    def __repr__(self) -> str:
        if self._loop is None or self._ended is not None:
            state = "new" if self._loop is None else "closed"
        else:
            state = "idle" if self._busy_since is None else f"busy {self.busy_s:.1f} s"
        return f"Device({self._thread.name}, {state})"

    @property
    def busy_s(self) -> float:
        """Seconds the running job has taken so far; 0 when idle. Readable from any thread."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Bind to the running event loop and start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `job`; the future gets its result or exception on the loop. Call on the loop's thread.

        Raises:
            DeviceClosed: the thread isn't running.
        """
        if self._loop is None or self._ended is not None:
            raise DeviceClosed("the device thread is not running")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, future))
        return future

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """Run ``job(*args)`` on the device thread and wait for it.

        The job can't be interrupted: a cancelled waiter leaves it to finish, and its result is dropped.
        """
        return await self.submit(lambda: job(*args))

    def tell(self, callback: Callable[..., None], *args: Any) -> None:
        """From the device thread: call ``callback(*args)`` on the loop soon. Dropped once the loop is closed."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the event loop is closed; a message from the device thread was dropped")

    async def close(self) -> None:
        """Let queued jobs finish, then stop the thread. Idempotent."""
        if self._loop is None:
            return
        if self._ended is None:
            self._ended = self._loop.create_future()
            self._jobs.put(None)
        await asyncio.shield(self._ended)
        self._thread.join()

    def _main(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            self._busy_since = time.monotonic()
            try:
                result = job()
            except BaseException as error:
                self.tell(_settle, future, None, _portable(error))
            else:
                self.tell(_settle, future, result, None)
                del result
            finally:
                self._busy_since = None
            # A job's arrays must not live until the next job comes.
            del item, job, future
        self.tell(_settle, self._ended, None, None)


def _portable(error: BaseException) -> Exception:
    """`error`, fit to be raised on the loop's thread: its traceback keeps the lines but lets go of the arrays."""
    chained: BaseException | None = error
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    # A future refuses StopIteration, and the others would end the loop instead of one job.
    return RuntimeError(f"a job on the device thread raised {error!r}")


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
