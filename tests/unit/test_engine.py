"""The loop: every request hears its end once, whoever fails, cancels or stops, and idle costs nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_runner import Bench, Heard, Recorder, make_request, running

from mlxbcd.engine.engine import Activity, _Bill
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.engine.runner import MixedCost, PieceCost, Report
from mlxbcd.engine.scheduler import Iteration, Policy
from mlxbcd.errors import ServeError
from mlxbcd.methods.events import Failed
from mlxbcd.plan.request import Priority, Request


async def test_a_request_hears_its_prefill_its_tokens_and_its_end() -> None:
    async with running(Policy(planned_chunk=3)) as bench:
        listener = Recorder()
        bench.engine.submit(make_request(prompt=8, max_tokens=3), listener)
        await listener.over.wait()
        assert listener.heard == [
            ("prefilled", 0, 8),
            ("prefilled", 3, 8),
            ("prefilled", 6, 8),
            ("prefilled", 8, 8),
            ("sampled", 100, False),
            ("sampled", 101, False),
            ("sampled", 102, False),
            ("ended", "length"),
        ]


async def test_the_end_token_is_told_as_such() -> None:
    async with running() as bench:
        listener = Recorder()
        bench.engine.submit(make_request(max_tokens=9, eos=[101]), listener)
        await listener.over.wait()
        assert listener.heard[-3:] == [("sampled", 100, False), ("sampled", 101, True), ("ended", "stop")]


async def test_many_requests_share_the_device_and_each_hears_its_own() -> None:
    async with running() as bench:
        listeners = [Recorder() for _ in range(20)]
        for i, listener in enumerate(listeners):
            bench.engine.submit(make_request(prompt=1 + i, max_tokens=1 + i % 7, first=100 * i), listener)
        await bench.engine.drain()
        for i, listener in enumerate(listeners):
            assert listener.tokens == [100 * i + n for n in range(1 + i % 7)]
            assert listener.ends == [("ended", "length")]
        assert len(bench.runner.threads) == 1
        assert bench.runner.threads != {threading.get_ident()}
        await settled(bench)


async def test_requests_join_while_others_decode() -> None:
    async with running() as bench:
        first, second = Recorder(), Recorder()

        def react(heard: Heard) -> None:
            if heard[:2] == ("sampled", 102):
                bench.engine.submit(make_request(first=500), second)

        first = Recorder(react)
        bench.engine.submit(make_request(max_tokens=30), first)
        await bench.engine.drain()
        assert second.tokens == [500, 501, 502]
        assert first.tokens == list(range(100, 130))
        assert any(iteration.decode and iteration.piece for iteration in bench.runner.iterations)


# -- idle


async def test_with_nothing_to_do_the_loop_makes_no_pass() -> None:
    async with running() as bench:
        listener = Recorder()
        bench.engine.submit(make_request(), listener)
        await listener.over.wait()
        await settled(bench)
        passes = len(bench.runner.iterations)
        for _ in range(50):
            await asyncio.sleep(0)
        await bench.device.run(int)
        assert len(bench.runner.iterations) == passes
        assert not bench.engine._work.is_set()


async def test_an_idle_engine_wakes_for_the_next_request() -> None:
    async with running() as bench:
        for first in (100, 200, 300):
            listener = Recorder()
            bench.engine.submit(make_request(first=first), listener)
            await listener.over.wait()
            await settled(bench)
            assert listener.tokens == [first, first + 1, first + 2]


async def test_however_much_an_iteration_tells_the_loop_is_woken_once_for_it() -> None:
    async with running() as bench:
        told: list[Any] = []
        tell = bench.device.tell

        def counted(callback: Callable[..., None], *args: Any) -> None:
            told.append(callback)
            tell(callback, *args)

        bench.device.tell = counted
        done = threading.Event()

        def burst() -> None:
            for _ in range(100):
                bench.engine._emit([Failed("nobody", ServeError("internal", "-"))])
            done.set()

        job = bench.device.submit(burst)
        # The loop's thread is held up here while the device thread tells.
        done.wait()
        assert told.count(bench.engine._deliver) == 1
        await job


# -- cancelling


@pytest.mark.parametrize("after", range(11))
async def test_a_request_cancelled_at_any_point_hears_nothing_more_and_leaves_nothing(after: int) -> None:
    async with running(Policy(planned_chunk=2)) as bench:
        other = Recorder()
        bench.engine.submit(make_request(prompt=3, max_tokens=12, first=500), other)
        keys: list[Any] = []

        def react(heard: Heard) -> None:
            if len(listener.heard) == after:
                bench.engine.cancel(keys[0])

        listener = Recorder(react)
        keys.append(bench.engine.submit(make_request(prompt=7, max_tokens=5), listener))
        if after == 0:
            bench.engine.cancel(keys[0])
        await bench.engine.drain()
        assert len(listener.heard) == after
        assert other.tokens == list(range(500, 512))
        assert other.ends == [("ended", "length")]
        await settled(bench)


async def test_cancelling_twice_or_after_the_end_or_for_nobody_does_nothing() -> None:
    async with running() as bench:
        listener = Recorder()
        key = bench.engine.submit(make_request(), listener)
        await listener.over.wait()
        bench.engine.cancel(key)
        bench.engine.cancel("nobody")
        again = bench.engine.submit(make_request(), Recorder())
        bench.engine.cancel(again)
        bench.engine.cancel(again)
        await settled(bench)
        assert listener.ends == [("ended", "length")]


async def test_a_request_cancelled_while_it_is_being_started_leaves_at_the_next_boundary() -> None:
    async with running() as bench:
        started, go = hold(bench)
        listener = Recorder()
        key = bench.engine.submit(make_request(prompt=200, max_tokens=50), listener)
        await asyncio.to_thread(started.wait)
        bench.engine.cancel(key)
        go.set()
        await settled(bench)
        assert listener.heard == []
        assert bench.runner.left == [key]


async def test_a_cancel_makes_room_for_a_request_that_waits() -> None:
    async with running(Policy(max_rows=1)) as bench:
        started, go = hold(bench)
        first, second = Recorder(), Recorder()
        key = bench.engine.submit(make_request(prompt=4, max_tokens=1000), first)
        await asyncio.to_thread(started.wait)
        bench.engine.submit(make_request(first=500), second)
        bench.engine.cancel(key)
        go.set()
        await second.over.wait()
        assert second.tokens == [500, 501, 502]


async def test_cancelling_the_last_request_ends_a_drain() -> None:
    async with running() as bench:
        started, go = hold(bench)
        key = bench.engine.submit(make_request(max_tokens=1000), Recorder())
        await asyncio.to_thread(started.wait)
        drain = asyncio.ensure_future(bench.engine.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        bench.engine.cancel(key)
        await drain
        go.set()


# -- failing


async def test_a_row_that_fails_is_told_once_and_others_go_on() -> None:
    async with running() as bench:
        fails, goes_on = Recorder(), Recorder()
        key = bench.engine.submit(make_request(max_tokens=9), fails)
        bench.engine.submit(make_request(max_tokens=9, first=500), goes_on)

        def fail_third_step(iteration: Iteration) -> None:
            if key in bench.runner.rows and bench.runner.rows[key].drawn == 3:
                bench.runner.failing[key] = ServeError("device_error", "step failed")

        bench.runner.on_iterate = fail_third_step
        await bench.engine.drain()
        assert fails.tokens == [100, 101, 102]
        assert fails.ends == [("failed", "device_error")]
        assert goes_on.tokens == list(range(500, 509))
        await settled(bench)


@pytest.mark.parametrize("at", ["prefilled", "sampled", "ended"])
async def test_a_listener_that_raises_ends_its_own_request_and_no_other(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as bench:

        def react(heard: Heard) -> None:
            if heard[0] == at:
                raise ValueError("listener")

        raises, other = Recorder(react), Recorder()
        bench.engine.submit(make_request(), raises)
        bench.engine.submit(make_request(first=500), other)
        await bench.engine.drain()
        await settled(bench)
        assert raises.ends[-1] == ("failed", "internal")
        assert [heard[0] for heard in raises.heard].count("failed") == 1
        assert raises.heard[-1][0] == "failed"
        assert other.tokens == [500, 501, 502]
        assert "listener" in caplog.text
        assert bench.faults == []


@pytest.mark.parametrize("error", [DeviceFault("gone"), RuntimeError("a bug of the runner")])
async def test_a_fault_of_the_device_fails_every_request_once_and_is_reported_once(error: Exception) -> None:
    async with running() as bench:
        listeners = [Recorder() for _ in range(4)]
        for listener in listeners:
            bench.engine.submit(make_request(max_tokens=50), listener)

        def fault(iteration: Iteration) -> None:
            if len(bench.runner.iterations) == 6:
                raise error

        bench.runner.on_iterate = fault
        await bench.engine.drain()
        assert [listener.ends for listener in listeners] == [[("failed", "device_error")]] * 4
        assert len(bench.faults) == 1
        passes = len(bench.runner.iterations)
        with pytest.raises(ServeError) as refused:
            bench.engine.submit(make_request(), Recorder())
        assert refused.value.code == "device_error"
        assert len(bench.runner.iterations) == passes


async def test_a_listener_that_raises_at_a_fault_does_not_keep_others_from_hearing() -> None:
    async with running() as bench:

        def react(heard: Heard) -> None:
            raise ValueError("listener")

        raises, other = Recorder(react), Recorder()
        bench.engine.submit(make_request(), raises)
        bench.engine.submit(make_request(), other)

        def fault(iteration: Iteration) -> None:
            raise DeviceFault("gone")

        bench.runner.on_iterate = fault
        await bench.engine.drain()
        assert raises.ends == other.ends == [("failed", "device_error")]


# -- closing


async def test_closing_with_work_in_flight_fails_it_once_and_drops_the_state() -> None:
    async with running() as bench:
        started, go = hold(bench)
        listeners = [Recorder() for _ in range(3)]
        for listener in listeners:
            bench.engine.submit(make_request(max_tokens=1000), listener)
        await asyncio.to_thread(started.wait)
        closing = asyncio.ensure_future(bench.engine.close())
        await asyncio.sleep(0)
        assert [listener.ends for listener in listeners] == [[("failed", "shutting_down")]] * 3
        assert not closing.done()
        go.set()
        await closing
        assert bench.engine._task.done()
        assert bench.runner.closed == 1
        assert bench.runner.rows == {}
        assert bench.faults == []
        assert [len(listener.ends) for listener in listeners] == [1, 1, 1]


async def test_a_closed_engine_refuses_requests_and_may_be_closed_again() -> None:
    async with running() as bench:
        await bench.engine.close()
        with pytest.raises(ServeError) as refused:
            bench.engine.submit(make_request(), Recorder())
        assert refused.value.code == "shutting_down"
        await bench.engine.close()
        assert bench.runner.closed == 1


async def test_a_closed_engine_holds_its_runner_no_longer() -> None:
    async with running() as bench:
        await bench.engine.close()
        assert bench.runner not in vars(bench.engine).values()


# -- what it knows


async def test_counts_tell_queued_from_running() -> None:
    async with running(Policy(max_rows=1)) as bench:
        started, go = hold(bench)
        for _ in range(3):
            bench.engine.submit(make_request(), Recorder())
        assert (bench.engine.running, bench.engine.queued) == (0, 3)
        await asyncio.to_thread(started.wait)
        assert (bench.engine.running, bench.engine.queued) == (1, 2)
        assert "queued" in repr(bench.engine)
        go.set()
        await bench.engine.drain()
        assert (bench.engine.running, bench.engine.queued) == (0, 0)


async def test_costs_are_learnt_from_reports() -> None:
    async with running() as bench:
        bench.engine.submit(make_request(prompt=50), Recorder())
        await bench.engine.drain()
        await settled(bench)
        assert bench.engine.costs.widest == 32
        assert bench.engine.costs.step(1) == 0.001


async def test_until_a_row_has_told_what_it_takes_prompts_begin_one_by_one() -> None:
    async with running(packing=PackingRanges()) as bench:
        for _ in range(2):
            await heard(bench, [make_request(prompt=40, max_tokens=3)])
        await heard(bench, [make_request(prompt=3) for _ in range(20)])
        assert bench.engine.costs.widest
        assert not any(iteration.beside for iteration in bench.runner.iterations)


async def test_short_prompts_that_come_at_once_share_forwards_once_costs_are_known() -> None:
    async with running(packing=PackingRanges()) as bench:
        bench.runner.token_bytes = 1.0
        for _ in range(2):
            await heard(bench, [make_request(prompt=40, max_tokens=3)])
        before = len(bench.runner.iterations)
        listeners = await heard(bench, [make_request(prompt=3, first=100 * i) for i in range(20)])
        assert [listener.tokens for listener in listeners] == [[100 * i, 100 * i + 1, 100 * i + 2] for i in range(20)]
        pieces = [len(iteration.pieces) for iteration in bench.runner.iterations[before:] if iteration.pieces]
        assert pieces == [16, 4]
        assert bench.engine.cohorts.saved()


async def test_prompts_of_a_model_that_can_not_pack_share_nothing() -> None:
    async with running() as bench:
        bench.runner.token_bytes = 1.0
        for _ in range(2):
            await heard(bench, [make_request(prompt=40, max_tokens=3)])
        await heard(bench, [make_request(prompt=3) for _ in range(20)])
        assert not any(iteration.beside for iteration in bench.runner.iterations)


# -- helpers


async def heard(bench: Bench, requests: Sequence[Request]) -> list[Recorder]:
    """Submit requests at once, and wait until all are over."""
    listeners = [Recorder() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        bench.engine.submit(request, listener)
    for listener in listeners:
        await listener.over.wait()
    return listeners


async def mixes(bench: Bench, prompts: int = 200) -> list[Iteration]:
    """One row decodes while others prefill their prompts, piece by piece; the iterations that did both."""
    bench.engine.submit(make_request(max_tokens=100_000), Recorder())
    listeners = [Recorder() for _ in range(prompts)]
    for listener in listeners:
        # One after the other, or they would come along with each other.
        bench.engine.submit(make_request(prompt=8, max_tokens=1), listener)
        await listener.over.wait()
    return [iteration for iteration in bench.runner.iterations if iteration.decode and iteration.piece is not None]


async def test_where_packing_pays_forwards_are_packed_and_elsewhere_hardly_ever() -> None:
    for packed_s, share in ((0.001, (0.7, 1.0)), (0.004, (0.0, 0.15))):
        async with running(packing=PackingRanges()) as bench:
            bench.runner.packed_s = packed_s
            mixed = await mixes(bench)
            assert not mixed[0].packed, "nothing was measured"
            assert share[0] <= sum(iteration.packed for iteration in mixed) / len(mixed) <= share[1]
            assert bench.engine.packing is not None
            assert bool(bench.engine.packing.paying()) == (packed_s < 0.002)


async def test_a_model_that_can_not_pack_never_does() -> None:
    async with running() as bench:
        assert not any(iteration.packed for iteration in await mixes(bench, prompts=30))


async def test_an_hour_in_which_the_process_was_stopped_is_nobodys() -> None:
    async with running() as bench:
        report = Report(((2, 3600.0),), PieceCost(8, 0, 3600.0))
        bench.engine._charge(_Bill({"a": 8}, {"b": 1, "c": 1}), report)
        assert bench.engine._served == pytest.approx({"a": 1.0, "b": 0.5, "c": 0.5})


async def test_the_time_of_a_packed_forward_is_charged_by_what_its_parts_are_expected_to_take() -> None:
    async with running(packing=PackingRanges()) as bench:
        for _ in range(9):
            bench.engine.costs.saw_step(2, 0.002)
            bench.engine.costs.saw_piece(8, 0, 0.006)
        bill = _Bill({"prompt": 6, "shorter": 2}, {"one": 1, "other": 1})
        bench.engine._charge(
            bill, Report(mixed=MixedCost(2, PieceCost(8, 0, 0.0), 0.004, packed=True, comparable=True))
        )
        assert bench.engine._served == pytest.approx(
            {"prompt": 0.00225, "shorter": 0.00075, "one": 0.0005, "other": 0.0005}
        )


def hold(bench: Bench) -> tuple[threading.Event, threading.Event]:
    """Events: the first iteration has begun, and it may go on."""
    started, go = threading.Event(), threading.Event()

    def on_iterate(iteration: Iteration) -> None:
        started.set()
        go.wait()

    bench.runner.on_iterate = on_iterate
    return started, go


# -- prefixes that are held


class Prefix:
    """A prefix that is ready to be restored."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.released = 0

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("end", ["runs", "is cancelled", "fails"])
async def test_what_a_row_is_restored_from_is_held_until_it_is_and_then_let_go_once(end: str) -> None:
    async with running(Policy(max_rows=1)) as bench:
        first = Recorder()
        bench.engine.submit(make_request(max_tokens=30), first)
        held, listener = Prefix(2), Recorder()
        key = bench.engine.submit(make_request(prompt=5), listener, held=held)
        await asyncio.sleep(0)
        assert held.released == 0, "it waits for its turn"
        if end == "is cancelled":
            bench.engine.cancel(key)
        elif end == "fails":
            bench.runner.failing[key] = ServeError("internal", "-")
        await bench.engine.drain()
        assert held.released == 1
        await settled(bench)


async def test_a_refused_request_lets_go_of_its_prefix() -> None:
    async with running() as bench:
        await bench.engine.close()
        held = Prefix(2)
        with pytest.raises(ServeError):
            bench.engine.submit(make_request(), Recorder(), held=held)
        assert held.released == 1


async def test_what_can_be_restored_is_not_left_to_do() -> None:
    """Of two prompts, the longer one goes first if less of it is left."""
    async with running(Policy(max_rows=1)) as bench:
        blocker = Recorder()
        bench.engine.submit(make_request(max_tokens=5), blocker)
        short, long = Recorder(), Recorder()
        bench.engine.submit(make_request(prompt=20, first=100), short)
        key = bench.engine.submit(make_request(prompt=60, first=200), long, held=Prefix(55))
        bench.runner.restored[key] = 55
        order: list[str] = []
        for name, listener in (("short", short), ("long", long)):
            listener._react = lambda heard, name=name: order.append(name)
        await bench.engine.drain()
        assert order[0] == "long"


async def test_activity_is_told_when_it_changes_and_ends_idle() -> None:
    async with running() as bench:
        told: list[Activity] = []
        bench.engine.active = told.append
        urgent = dataclasses.replace(make_request(max_tokens=2), priority=Priority.INTERACTIVE)

        def react(heard: Heard) -> None:
            if heard[0] == "sampled" and len(plain.tokens) == 1:
                bench.engine.submit(urgent, Recorder())

        plain = Recorder(react)
        bench.engine.submit(make_request(max_tokens=40), plain)
        await bench.engine.drain()
        await settled(bench)
        assert told == [Activity.BUSY, Activity.INTERACTIVE, Activity.BUSY, Activity.IDLE]


async def settled(bench: Bench) -> None:
    """Wait until the loop has nothing to do, and see that nothing is left anywhere."""
    while bench.engine._work.is_set() or bench.engine.report.running:
        await bench.device.run(int)
    assert bench.engine._entries == {}
    assert bench.engine._leaving == {}
    assert not bench.engine._inbox
    assert bench.runner.rows == {}
    assert bench.runner.decoding == set()
