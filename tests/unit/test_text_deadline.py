"""A time limit that is enforced, and leaves nothing behind."""

from __future__ import annotations

import threading
import time

import pytest

from mlxbcd.text import deadline
from mlxbcd.text.deadline import Overtime, run_within

# The exception that stops a thread can hit it inside a callback of the garbage collector, where it is dropped with a
# warning; the deadline insists until the thread has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")


def spin() -> None:
    for _ in iter(int, 1):
        pass


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "mlxbcd-deadline"]


def test_a_function_in_time_returns_its_result_from_another_thread() -> None:
    assert run_within(10, lambda: (6 * 7, threading.get_ident()))[0] == 42
    assert run_within(10, threading.get_ident) != threading.get_ident()
    assert threads() == []


def test_its_exception_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run_within(10, fail)
    assert threads() == []


def test_an_endless_loop_is_stopped_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(Overtime):
        run_within(0.05, spin)
    assert time.monotonic() - begun < 10
    assert threads() == []


def test_a_function_that_survives_the_first_exception_is_stopped_by_a_later_one() -> None:
    survived = []

    def stubborn() -> None:
        while True:
            try:
                spin()
            except BaseException:
                survived.append(1)
                if len(survived) == 3:
                    raise

    with pytest.raises(Overtime):
        run_within(0.05, stubborn)
    assert len(survived) == 3
    assert threads() == []


def test_clean_up_in_the_function_runs() -> None:
    cleaned = []

    def careful() -> None:
        try:
            spin()
        finally:
            cleaned.append(1)

    with pytest.raises(Overtime):
        run_within(0.05, careful)
    assert cleaned == [1]


def test_a_function_that_ends_as_the_limit_falls_ends_one_way_or_the_other() -> None:
    # The function takes about as long as its limit: the race is run many times, and any exception out of place (in the
    # thread's last steps, or in a later call) fails the test.
    def busy() -> str:
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass
        return "done"

    outcomes = set()
    for attempt in range(150):
        try:
            outcomes.add(run_within(0.0014 + attempt % 10 * 0.0001, busy))
        except Overtime:
            outcomes.add("stopped")
    assert outcomes <= {"done", "stopped"}
    assert threads() == []


def test_a_function_that_ends_while_the_caller_makes_up_its_mind_counts_as_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gives_up_too_late(call: deadline._Call[int], seconds: float) -> bool:
        call._ended.get(timeout=seconds)
        return False

    monkeypatch.setattr(deadline._Call, "ends_within", gives_up_too_late)
    assert run_within(10, lambda: 42) == 42
    assert threads() == []


def test_an_interrupted_caller_stops_the_function_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([KeyboardInterrupt])
    original = deadline._Call.ends_within

    def interrupted(call: deadline._Call[None], seconds: float) -> bool:
        for error in waits:
            raise error
        return original(call, seconds)

    monkeypatch.setattr(deadline._Call, "ends_within", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_within(10, spin)
    assert threads() == []
