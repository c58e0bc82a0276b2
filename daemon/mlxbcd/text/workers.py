"""Owns the threads that text work runs in, so that a long text never holds up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

from mlxbcd.errors import ServeError

P = ParamSpec("P")
R = TypeVar("R")

INLINE_CHARACTERS: Final = 2048
"""Text up to this length is worked on at once: it takes about a millisecond."""
LONG_CHARACTERS: Final = 128 * 1024
"""Text beyond this length may take seconds."""
TIDY_S: Final = 1.0


class TextWorkers:
    """Small pools for tokenising, counting and rendering. Used from one event loop.

    Very long texts have a pool of their own, and so has work that can't be stopped (compiling a grammar), so that
    nothing else waits behind them.

    Args:
        threads: of each pool; more work waits its turn.
        tidy: called in a thread when very long texts have been worked on, and for a moment none has followed; and when
            it is asked for.
    """

    def __init__(self, threads: int = 2, tidy: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mlxbcd-text")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="mlxbcd-long-text")
        self._stubborn = ThreadPoolExecutor(threads, thread_name_prefix="mlxbcd-grammar")
        self._running: set[asyncio.Future[Any]] = set()
        self._tidy = tidy
        self._tidying: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"TextWorkers({len(self._running)} running{', closed' if self._closed else ''})"

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function whose time follows from its strings' length: here if short, else in a thread.

        Raises:
            ServeError: shutting_down, after `close`.
        """
        length = sum(len(value) for value in (*args, *kwargs.values()) if isinstance(value, str))
        if length > INLINE_CHARACTERS:
            return await self.offload_text(length, lambda: function(*args, **kwargs))
        self._check_open()
        return function(*args, **kwargs)

    async def offload(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in a thread, whatever its arguments: rendering may take its whole time limit.

        Cancelling drops the result; a function that has already begun runs to its end.

        Raises:
            ServeError: shutting_down, after `close`.
        """
        return await self._call(self._pool, lambda: function(*args, **kwargs))

    async def offload_text(self, length: int, function: Callable[[], R]) -> R:
        """Call a function whose time follows from a text of `length` characters in a thread, see `offload`.

        Raises:
            ServeError: shutting_down, after `close`.
        """
        return await self._call(self._long if length > LONG_CHARACTERS else self._pool, function)

    async def offload_stubborn(self, function: Callable[[], R]) -> R:
        """Call a function that may take seconds in a thread, where only others of its kind wait behind it.

        Raises:
            ServeError: shutting_down, after `close`.
        """
        return await self._call(self._stubborn, function)

    async def tidy(self) -> None:
        """Tidy up now, in a thread: something large has been let go.

        Raises:
            ServeError: shutting_down, after `close`.
        """
        if self._tidy is not None:
            await self.offload(self._tidy)

    async def close(self) -> None:
        """Refuse new work, drop what hasn't begun, wait for what has."""
        self._closed = True
        if self._tidying is not None:
            self._tidying.cancel()
        pools = (self._pool, self._long, self._stubborn)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._running, return_exceptions=True)
        for pool in pools:
            pool.shutdown(wait=True)

    async def _call(self, pool: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        self._check_open()
        future = asyncio.get_running_loop().run_in_executor(pool, function)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await future
        finally:
            if pool is self._long and self._tidy is not None and not self._closed:
                self._tidy_soon(self._tidy)

    def _tidy_soon(self, tidy: Callable[[], None]) -> None:
        """A moment later: what came of the text is still in use."""
        if self._tidying is not None:
            self._tidying.cancel()
        loop = asyncio.get_running_loop()
        self._tidying = loop.call_later(TIDY_S, lambda: loop.run_in_executor(self._long, tidy))

    def _check_open(self) -> None:
        if self._closed:
            raise ServeError("shutting_down", "the daemon is shutting down; try again in a moment")
