"""A real daemon at work: who joins, leaves or only asks disturbs nobody whose text is being generated."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_daemon import Daemon, Frames, Solo, ask, daemon, socket_path, tokens
from stories import LONG, STORIES

from mlxbc import AsyncClient, wire

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

JOINER = 9
STREAMS = range(len(STORIES))


class Company:
    """Four streams in decode on one connection, and the order of everything that came."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.journal: list[wire.Reply] = []
        # Guesses that come true would let a stream get ahead of the others.
        frames.say(*(ask(n, story, max_tokens=4000, draft="off") for n, story in enumerate(STORIES)))
        self.read(lambda frame: all(len(tokens(self.journal, n)) >= 3 for n in STREAMS))

    def read(self, enough: Callable[[wire.Reply], bool]) -> wire.Reply:
        """Read up to the first frame after which it is enough."""
        while True:
            frame = self.frames.read()
            assert frame is not None, "the daemon hung up"
            assert not isinstance(frame, wire.Error), frame
            self.journal.append(frame)
            if enough(frame):
                return frame

    def ended(self, request: int) -> wire.Done:
        done = self.read(lambda frame: isinstance(frame, wire.Done) and frame.id == request)
        assert isinstance(done, wire.Done)
        return done

    def leave(self) -> None:
        """End the streams."""
        self.frames.say(*(wire.Cancel(id=n) for n in STREAMS))
        left = set(STREAMS)
        while left:
            done = self.read(lambda frame: isinstance(frame, wire.Done))
            assert isinstance(done, wire.Done)
            assert done.reason == "cancelled"
            left.remove(done.id)

    def kv_bytes(self) -> int:
        """Bytes of all rows' state after the newest iteration, as `ps` tells them."""
        self.frames.say(wire.Ps(id=99))
        reply = self.read(lambda frame: isinstance(frame, wire.ProcessList))
        assert isinstance(reply, wire.ProcessList)
        (process,) = reply.models
        return process.kv_bytes


def progress(frame: wire.Reply) -> bool:
    return isinstance(frame, wire.Progress) and frame.id == JOINER


def assert_unchanged(journal: list[wire.Reply], solo: Solo) -> None:
    """Each stream said what it says alone."""
    for n, story in enumerate(STORIES):
        mine = tokens(journal, n)
        assert mine == solo.ids(story, len(mine)), f"story {n}"


# --------------------------------------------------------------------------------------------------------- joining


def test_all_streams_keep_flowing_while_a_long_prompt_joins(shared: Daemon, solo: Solo) -> None:
    with shared.frames() as frames:
        company = Company(frames)
        frames.say(ask(JOINER, {"prompt": LONG, "temperature": 0}, max_tokens=4))
        done = company.ended(JOINER)
        company.leave()
    assert done.usage.prompt > 2000
    journal = company.journal
    steps = [place for place, frame in enumerate(journal) if progress(frame)]
    assert len(steps) >= 3, "the prompt is prefilled in pieces"
    for begin, end in itertools.pairwise(steps):
        quiet = [n for n in STREAMS if not tokens(journal[begin:end], n)]
        assert not quiet, "between two reports of its progress every stream moves on"
    drawn = [len(tokens(journal[steps[0] : steps[-1]], n)) for n in STREAMS]
    assert max(drawn) - min(drawn) <= 1, "no stream is favoured"
    assert_unchanged(journal, solo)


def test_a_prompt_that_is_cancelled_while_it_joins_costs_at_most_the_chunk_that_runs(
    shared: Daemon, solo: Solo
) -> None:
    with shared.frames() as frames:
        company = Company(frames)
        before = company.kv_bytes()
        frames.say(ask(JOINER, {"prompt": LONG, "temperature": 0}))
        company.read(progress)
        company.read(progress)
        its_own = company.kv_bytes() - before
        assert its_own > before, "a long prompt's state is far larger than that of four short stories"
        frames.say(wire.Cancel(id=JOINER))
        done = company.ended(JOINER)
        cancelled = len(company.journal)
        # Each iteration is one decode step and at most one chunk. Two may pass: the one that ran when the cancel came,
        # and the one in which the row leaves.
        while company.kv_bytes() > before + its_own // 2:
            company.read(lambda frame: isinstance(frame, wire.Token) and frame.id == 0)
            assert len(tokens(company.journal[cancelled:], 0)) <= 3
        company.read(lambda frame: len(tokens(company.journal[cancelled:], 0)) >= 8)
        company.leave()
    assert (done.reason, done.usage.generated) == ("cancelled", 0)
    later = company.journal[cancelled:]
    assert not any(isinstance(frame, wire.Progress | wire.Token) and frame.id == JOINER for frame in later)
    assert_unchanged(company.journal, solo)


# ---------------------------------------------------------------------------------------------------------- asking


async def test_ping_is_answered_at_once_while_a_long_text_is_counted_and_a_long_prompt_prefills(
    shared: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    p99 = min([await ping_p99_ms(shared) for _ in range(2)])
    with capsys.disabled():
        print(f"\nping p99 {p99:.2f} ms while 100k tokens are counted and 6,000 prefill")
    assert p99 < 20


async def ping_p99_ms(daemon: Daemon) -> float:
    """The 99th percentile of pings while a text is counted again and again and a prompt prefills once."""

    async def count(client: AsyncClient) -> None:
        while True:
            assert await client.count(LONG * 50) > 100_000

    path = daemon.path
    pings: list[float] = []
    async with AsyncClient(path) as asking, AsyncClient(path) as counting, AsyncClient(path) as prompting:
        counter = asyncio.create_task(count(counting))
        async with prompting.generate(LONG * 3, max_tokens=1) as stream:
            while not isinstance(await anext(stream), wire.Progress):
                pass
            prefill = asyncio.create_task(stream.wait())
            while not prefill.done() and len(pings) < 1000:
                pings.append(await asking.ping() * 1e3)
                await asyncio.sleep(0.005)
            assert not counter.done()
            counter.cancel()
            stream.cancel()
            await prefill
    assert len(pings) >= 100, "there was something to measure"
    return statistics.quantiles(pings, n=100)[98]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes")
def test_a_model_that_is_unloaded_gives_its_memory_back_to_the_system(model_directory: Path) -> None:
    with socket_path() as path, daemon(path, model_directory, "--no-preload", wait_for="ready after") as own:
        before = own.until(lambda report: report.device != "starting").footprint
        with own.client() as client:
            for _ in range(2):
                weights = client.load().bytes
                client.generate("Once upon a time", max_tokens=3).wait()
                assert client.status().footprint > before + weights
                client.unload(str(model_directory))
                assert client.status().footprint < before + weights // 2, "what is left is code, tables and some heap"
