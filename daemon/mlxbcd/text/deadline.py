"""Owns running a function with a time limit that is enforced: an exception stops the thread it runs in.

CPython delivers such an exception between two bytecodes: loops end whatever they do, a single call into C
ends when it returns. The hard part is that none may arrive late, in code it isn't meant for. Therefore:

* each call has a thread of its own, which ends with it;
* one token decides how a call ends. Whoever pops it first, the function's thread on its way out or the caller
  who has waited long enough, has decided; exceptions are only sent after the caller has;
* a stopped thread then does nothing but wait until the caller has sent its last exception.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

R = TypeVar("R")

_INSIST_EVERY: Final = 0.05
"""Seconds between two exceptions: the odd one is lost in a destructor, where CPython ignores errors."""
_INSIST_TIMES: Final = 40

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_exception.restype = ctypes.c_int
_NO_EXCEPTION: Final = ctypes.py_object()
"""A null pointer, which takes back an exception that hasn't been delivered."""


class Overtime(Exception):
    """The function didn't finish in time and was stopped."""


class _Stop(BaseException):
    """Ends a call. Not an `Exception`, so that nothing on the way takes it for an error of its own."""


def run_within(seconds: float, function: Callable[[], R]) -> R:
    """Call `function` in a thread of its own; return its result or raise its exception.

    The thread has ended when this returns, except where a single call into C goes on for two seconds more:
    that is left behind, and its thread ends with it.

    Args:
        seconds: wall-clock limit.

    Raises:
        Overtime: the function was stopped.
    """
    call = _Call(function)
    thread = threading.Thread(target=call.serve, name="mlxbcd-deadline", daemon=True)
    thread.start()
    try:
        ended = call.ends_within(seconds)
    except BaseException:
        # The caller itself was interrupted (Ctrl-C).
        call.stop(thread)
        raise
    if not ended and call.stop(thread):
        raise Overtime
    thread.join()
    return call.outcome()


class _Call(Generic[R]):
    """One call, seen from two threads: what both of them change, they change by single atomic operations."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function
        self._result: tuple[R] | None = None
        self._error: Exception | None = None
        self._started = False
        self._decision = deque((None,))
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._last_exception_sent = False

    def serve(self) -> None:
        """In the function's thread."""
        while True:
            try:
                if not self._started:
                    self._started = True
                    self._run()
                if not self._decide():
                    self._wait_out_exceptions()
                self._ended.put(None)
                return
            except _Stop:
                continue

    def _run(self) -> None:
        try:
            self._result = (self._function(),)
        except Exception as error:
            self._error = error

    def _decide(self) -> bool:
        try:
            self._decision.pop()
        except IndexError:
            return False
        return True

    def _wait_out_exceptions(self) -> None:
        """Interrupted at any point, this can begin again."""
        self._ended.put(None)
        while not self._last_exception_sent:
            time.sleep(0.001)
        _set_exception(threading.get_ident(), _NO_EXCEPTION)

    def ends_within(self, seconds: float) -> bool:
        """In the caller's thread: whether the function has ended or been stopped."""
        try:
            self._ended.get(timeout=seconds)
        except Empty:
            return False
        return True

    def stop(self, thread: threading.Thread) -> bool:
        """In the caller's thread: stop the function, unless it has just ended by itself (False)."""
        if not self._decide():
            return False
        for _ in range(_INSIST_TIMES):
            _set_exception(thread.ident, _Stop)
            if self.ends_within(_INSIST_EVERY):
                self._last_exception_sent = True
                thread.join()
                return True
        self._last_exception_sent = True
        return True

    def outcome(self) -> R:
        """In the caller's thread, after the function has ended by itself."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result[0]
