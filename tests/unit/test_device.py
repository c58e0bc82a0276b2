"""The device thread: one thread, one job at a time, and nothing that a job does can hang or end its caller's loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from mlxbcd.device import Device, DeviceClosed


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    device = Device()
    device.start()
    yield device
    await device.close()


class Thing:
    """Something whose life can be watched."""


def fail(error: BaseException) -> NoReturn:
    raise error


async def test_every_job_runs_on_one_thread_that_is_not_the_loops(device: Device) -> None:
    threads = {await device.run(threading.get_ident) for _ in range(5)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


async def test_jobs_run_in_the_order_submitted(device: Device) -> None:
    order: list[int] = []
    futures = [device.submit(lambda i=i: order.append(i)) for i in range(20)]
    await asyncio.gather(*futures)
    assert order == list(range(20))


async def test_a_jobs_result_and_arguments_pass_through(device: Device) -> None:
    assert await device.run(divmod, 7, 2) == (3, 1)


async def test_a_jobs_exception_reaches_its_caller_and_the_next_job_runs(device: Device) -> None:
    with pytest.raises(KeyError, match="lost"):
        await device.run(fail, KeyError("lost"))
    assert await device.run(int, "4") == 4


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
async def test_exceptions_that_would_end_more_than_a_job_are_made_harmless(
    device: Device, error: BaseException
) -> None:
    with pytest.raises(RuntimeError, match=type(error).__name__):
        await device.run(fail, error)
    assert await device.run(int, "4") == 4


async def test_an_exception_keeps_its_lines_but_none_of_the_values_of_its_frames(device: Device) -> None:
    things: list[weakref.ref[Thing]] = []

    def inner() -> NoReturn:
        thing = Thing()
        things.append(weakref.ref(thing))
        raise ValueError("inner")

    def outer() -> NoReturn:
        thing = Thing()
        things.append(weakref.ref(thing))
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RuntimeError) as caught:
        await device.run(outer)
    gc.collect()
    assert [thing() for thing in things] == [None, None]
    assert caught.traceback[-1].name == "outer"


async def test_a_finished_job_keeps_nothing_alive(device: Device) -> None:
    thing = Thing()
    watch = weakref.ref(thing)

    def job(held: Any = thing) -> None:
        """Holds its thing as long as it lives."""

    await device.run(job)
    del thing, job
    # The thread lets go just after it has told the result, and doesn't wait for another job to do so.
    async with asyncio.timeout(10):
        while watch() is not None:
            await asyncio.sleep(0)


async def test_a_cancelled_waiter_leaves_its_job_to_finish(device: Device) -> None:
    go, done = threading.Event(), threading.Event()

    def job() -> None:
        go.wait()
        done.set()

    waiter = asyncio.ensure_future(device.run(job))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    go.set()
    assert await device.run(done.is_set)


async def test_how_long_the_running_job_has_taken_can_be_read_meanwhile(device: Device) -> None:
    started, go = threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        go.wait()

    assert device.busy_s == 0
    running = device.submit(job)
    await asyncio.to_thread(started.wait)
    assert device.busy_s > 0
    assert "busy" in repr(device)
    go.set()
    await running
    await device.run(int)
    assert await asyncio.to_thread(lambda: device.busy_s) >= 0


async def test_messages_reach_the_loop_in_order(device: Device) -> None:
    heard: list[int] = []

    def job() -> None:
        for i in range(10):
            device.tell(heard.append, i)

    await device.run(job)
    assert heard == list(range(10))


async def test_closing_lets_queued_jobs_finish_and_refuses_new_ones() -> None:
    device = Device()
    device.start()
    futures = [device.submit(lambda i=i: i) for i in range(5)]
    await asyncio.gather(device.close(), device.close())
    assert [future.result() for future in futures] == list(range(5))
    with pytest.raises(DeviceClosed):
        device.submit(int)
    await device.close()
    assert "closed" in repr(device)


async def test_a_device_that_was_never_started_refuses_jobs_and_closes() -> None:
    device = Device()
    with pytest.raises(DeviceClosed):
        device.submit(int)
    await device.close()
    assert "new" in repr(device)


async def test_a_closed_device_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    device = Device()
    device.start()
    await device.close()
    assert set(threading.enumerate()) == before
