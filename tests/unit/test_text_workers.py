"""Text work off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from mlxbcd.errors import ServeError
from mlxbcd.text.workers import INLINE_CHARACTERS, LONG_CHARACTERS, TextWorkers


@pytest.fixture
async def workers() -> AsyncIterator[TextWorkers]:
    pool = TextWorkers()
    yield pool
    await pool.close()


def thread_of(text: str, *, note: str = "") -> int:
    return threading.get_ident()


async def test_a_short_text_is_worked_on_at_once(workers: TextWorkers) -> None:
    assert await workers.run(thread_of, "x" * INLINE_CHARACTERS) == threading.get_ident()


async def test_a_long_text_is_worked_on_in_a_thread(workers: TextWorkers) -> None:
    assert await workers.run(thread_of, "x" * (INLINE_CHARACTERS + 1)) != threading.get_ident()
    assert await workers.run(thread_of, "x", note="x" * INLINE_CHARACTERS) != threading.get_ident()


async def test_what_may_take_long_in_any_case_is_never_inline(workers: TextWorkers) -> None:
    assert await workers.offload(thread_of, "x") != threading.get_ident()


async def test_the_loop_goes_on_while_long_texts_are_worked_on(workers: TextWorkers) -> None:
    gate = threading.Event()
    long = "x" * (INLINE_CHARACTERS + 1)
    tasks = [asyncio.ensure_future(workers.run(lambda text: gate.wait(30), long)) for _ in range(3)]
    await asyncio.sleep(0)
    assert "3 running" in repr(workers)
    gate.set()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert "0 running" in repr(workers)


async def test_nothing_waits_behind_very_long_texts(workers: TextWorkers) -> None:
    gate = threading.Event()
    long = "x" * (LONG_CHARACTERS + 1)
    waiting = [asyncio.ensure_future(workers.run(lambda text: gate.wait(30), long)) for _ in range(4)]
    waiting += [asyncio.ensure_future(workers.offload_text(len(long), lambda: gate.wait(30))) for _ in range(4)]
    try:
        async with asyncio.timeout(20):
            assert await workers.offload(len, "short") == 5
            assert await workers.run(len, "x" * LONG_CHARACTERS) == LONG_CHARACTERS
            assert await workers.offload_text(LONG_CHARACTERS, lambda: "done") == "done"
    finally:
        gate.set()
    assert await asyncio.gather(*waiting) == [True] * 8


async def test_an_exception_comes_back(workers: TextWorkers) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await workers.offload(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        await workers.run(int, "x")


async def test_closing_waits_for_what_has_begun_drops_the_rest_and_refuses_more() -> None:
    workers = TextWorkers(threads=1)
    begun, gate, later = threading.Event(), threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        gate.wait(30)
        return "finished"

    running = asyncio.ensure_future(workers.offload(first))
    waiting = asyncio.ensure_future(workers.offload(later.set))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    closing = asyncio.ensure_future(workers.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert await running == "finished"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not later.is_set()
    for call in (workers.run, workers.offload):
        with pytest.raises(ServeError) as caught:
            await call(thread_of, "x")
        assert caught.value.code == "shutting_down"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mlxbcd-text")]


async def test_after_very_long_texts_the_workers_tidy_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbcd.text.workers.TIDY_S", 0.05)
    tidied: list[str] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tidy() -> None:
        tidied.append(threading.current_thread().name)
        loop.call_soon_threadsafe(done.set)

    workers = TextWorkers(tidy=tidy)
    await workers.run(len, "x" * (INLINE_CHARACTERS + 1))
    for _ in range(5):
        await workers.run(len, "x" * (LONG_CHARACTERS + 1))
    await done.wait()
    await asyncio.sleep(0.1)
    assert len(tidied) == 1
    assert tidied[0].startswith("mlxbcd-long-text")
    await workers.close()
