"""Generations that are taken up again: those that went on without their client, those on record, and all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_live import Asked
from test_live_cache import House, housed
from tiny_directory import write_model

from mlxbc import wire
from mlxbcd.serve import resuming

PROMPT = "the story of a lighthouse in the fog"
SEEDED = {"temperature": 0.9, "seed": 4}
LENGTH = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are made every few tokens, so that short answers have some."""
    monkeypatch.setattr(resuming, "EVERY", 8)


def ask(house: House, model: Path, **fields: Any) -> Asked:
    return house.generate(model, **{"prompt": PROMPT, "max_tokens": LENGTH, **SEEDED, **fields})


async def whole(house: House, model: Path, **fields: Any) -> Asked:
    """An answer that nothing interrupts."""
    asked = ask(house, model, **fields)
    await asked.end()
    return asked


async def drawn(asked: Asked, tokens: int) -> list[int]:
    """Wait for so many ids; those there are then."""
    while len(asked.ids) < tokens:
        assert not asked.over.is_set(), asked.frames
        await asyncio.sleep(0)
    return asked.ids


async def rest(house: House, model: Path, stream: str, had: list[int], **fields: Any) -> Asked:
    """Ask for the rest of a stream."""
    asked = ask(house, model, resume=wire.Resume(stream=stream, tokens=had), **fields)
    await asked.end()
    return asked


def stream_of(asked: Asked) -> str:
    (accepted,) = asked.of(wire.Accepted)
    assert isinstance(accepted, wire.Accepted)
    return accepted.stream


def part(asked: Asked, tokens: int) -> tuple[list[int], str]:
    """What a client has that got the first frames, with at least so many tokens: their ids, and their text."""
    ids: list[int] = []
    text = ""
    for token in asked.of(wire.Token):
        if len(ids) >= tokens:
            break
        ids += token.ids
        text += token.text
    return ids, text


def recorded(directory: Path) -> list[str]:
    return [path.name for path in (directory / "streams").glob("*.stream")]


# -- going on without a client


@pytest.mark.parametrize("had", [0, 1, 7, 40])
async def test_a_kept_generation_goes_on_and_is_taken_over(had: int, model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        alone = await whole(house, model)
        asked = ask(house, model, on_disconnect="keep")
        await drawn(asked, max(had, 1) + 2)
        ids, before = part(asked, had)
        asked.job.cancel("disconnected")
        frames = len(asked.frames)
        taken = await rest(house, model, stream_of(asked), ids, on_disconnect="keep")
        assert len(asked.frames) == frames, "nobody is told twice"
        assert ids + taken.ids == alone.ids
        assert before + taken.text() == alone.text()
        done = taken.of(wire.Done)[0]
        assert (done.reason, done.usage.generated) == ("length", LENGTH)
        assert min(done.timings.queue, done.timings.prefill, done.timings.first_token, done.timings.decode) >= 0
        status = await house.submit(wire.Status(id=9)).end()
        assert isinstance(status, wire.StatusReport)
        assert (status.served, status.failed, status.generated_tokens) == (2, 0, 2 * LENGTH), "it counts once"
        assert house.service._open == set()


async def test_one_that_ends_without_its_client_is_held_for_it(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        alone = await whole(house, model)
        asked = ask(house, model, on_disconnect="keep")
        await drawn(asked, 3)
        asked.job.cancel("disconnected")
        while house.service._open:
            await asyncio.sleep(0)
        served = house.service._standing.served
        taken = await rest(house, model, stream_of(asked), alone.ids[:3])
        assert alone.ids[:3] + taken.ids == alone.ids
        assert house.service._standing.served == served + 1
        engine = next(iter(house.service._residency.models.values())).engine
        assert engine.running == 0


async def test_one_that_nobody_comes_back_for_is_cancelled(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        asked = ask(house, model, on_disconnect="keep", keep_s=0, max_tokens=300)
        await drawn(asked, 1)
        asked.job.cancel("disconnected")
        while house.service._open:
            await asyncio.sleep(0)
        assert recorded(tmp_path) == []


async def test_without_keep_a_client_that_has_gone_ends_it(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        asked = ask(house, model)
        await drawn(asked, 1)
        asked.job.cancel("disconnected")
        assert (await asked.end()).reason == "cancelled"


async def test_another_request_under_the_same_stream_starts_anew(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        other = await whole(house, model, seed=5)
        asked = ask(house, model, on_disconnect="keep")
        await drawn(asked, 3)
        asked.job.cancel("disconnected")
        taken = await rest(house, model, stream_of(asked), [], seed=5)
        assert taken.ids == other.ids
        wrong = await rest(house, model, stream_of(asked), [1, 2, 3])
        assert wrong.of(wire.Done), "tokens that were never drawn are forced all the same"


async def test_one_whose_name_another_request_takes_does_not_go_on_for_nobody(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        asked = ask(house, model, on_disconnect="keep", max_tokens=300)
        await drawn(asked, 3)
        asked.job.cancel("disconnected")
        resume = wire.Resume(stream=stream_of(asked), tokens=[])
        other = ask(house, model, on_disconnect="keep", max_tokens=300, seed=5, resume=resume)
        await drawn(other, 1)
        other.job.cancel("disconnected")
        assert house.service._open == {other.job}
        assert len(house.service._caches.book._kept) == 1


async def test_a_client_that_goes_again_can_come_back_again(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        alone = await whole(house, model)
        asked = ask(house, model, on_disconnect="keep")
        had: list[int] = []
        for _ in range(4):
            had += (await drawn(asked, 2))[:2]
            asked.job.cancel("disconnected")
            asked = ask(house, model, on_disconnect="keep", resume=wire.Resume(stream=stream_of(asked), tokens=had))
        await asked.end()
        assert had + asked.ids == alone.ids


async def test_keeping_is_refused_where_it_would_be_an_empty_promise(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        for fields, why in (
            ({"resumable": False, "on_disconnect": "keep"}, "resumable"),
            ({"keep_s": 5}, "on_disconnect"),
        ):
            with pytest.raises(Exception, match=why):
                ask(house, model, **fields)
        error = await ask(house, model, on_disconnect="keep", logprobs=True).end()
        assert isinstance(error, wire.Error)
        assert "logprobs" in error.message


# -- records


@asynccontextmanager
async def interrupted(model: Path, directory: Path, tokens: int, **fields: Any) -> AsyncIterator[Asked]:
    """A daemon that ends while it generates."""
    async with housed(directory) as house:
        asked = ask(house, model, **fields)
        await drawn(asked, tokens)
    yield asked


@pytest.mark.parametrize("had", [0, 5, 30])
async def test_a_restart_in_the_middle_loses_nothing(had: int, model: Path, tmp_path: Path) -> None:
    async with housed(None) as house:
        alone = await whole(house, model)
    async with interrupted(model, tmp_path, 33) as asked:
        error = await asked.end()
        assert error.code == "shutting_down"
        assert len(recorded(tmp_path)) == 1
        ids, before = part(asked, had)
        async with housed(tmp_path) as house:
            taken = await rest(house, model, stream_of(asked), ids)
            assert ids + taken.ids == alone.ids
            assert before + taken.text() == alone.text()
            assert taken.of(wire.Done)[0].usage.generated == LENGTH
        assert recorded(tmp_path) == [], "it is over"


async def test_what_was_on_record_is_told_without_drawing_it_again(model: Path, tmp_path: Path) -> None:
    async with interrupted(model, tmp_path, 33) as asked, housed(tmp_path) as house:
        again = ask(house, model, resume=wire.Resume(stream=stream_of(asked), tokens=[]))
        prefilled = await again.first(wire.Token)
        assert prefilled.ids
        engine = next(iter(house.service._residency.models.values())).engine
        (entry,) = engine._entries.values()
        assert len(entry.request.forced) >= 33
        await again.end()


@pytest.mark.parametrize("cache", ["none", "ram"])
async def test_what_must_not_be_on_the_disk_is_not_recorded(cache: str, model: Path, tmp_path: Path) -> None:
    async with interrupted(model, tmp_path, 33, cache=cache) as asked:
        assert recorded(tmp_path) == []
        async with housed(tmp_path) as house:
            alone = await whole(house, model, cache=cache)
            taken = await rest(house, model, stream_of(asked), alone.ids[:5], cache=cache)
            assert alone.ids[:5] + taken.ids == alone.ids


async def test_an_answer_that_was_heard_leaves_no_record(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        await whole(house, model)
    assert recorded(tmp_path) == []


async def test_one_that_ended_unheard_is_on_record_as_a_whole(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        alone = await whole(house, model)
        asked = ask(house, model, on_disconnect="keep")
        await drawn(asked, 3)
        asked.job.cancel("disconnected")
        while house.service._open:
            await asyncio.sleep(0)
    assert len(recorded(tmp_path)) == 1
    async with housed(tmp_path) as house:
        taken = await rest(house, model, stream_of(asked), [])
        assert taken.ids == alone.ids
        assert taken.of(wire.Done)[0].reason == "length"
        assert not house.service._residency.models or all(
            resident.engine.report.running == () for resident in house.service._residency.models.values()
        )


async def test_clearing_the_cache_forgets_records(model: Path, tmp_path: Path) -> None:
    async with interrupted(model, tmp_path, 33), housed(tmp_path) as house:
        cleared = await house.submit(wire.CacheClear(id=5)).end()
        assert cleared.streams == 1
        assert recorded(tmp_path) == []


async def test_a_stop_string_in_what_is_replayed_ends_it(model: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        alone = await whole(house, model)
        stop = alone.text()[20:24]
        assert stop
        stopped = await whole(house, model, stop=[stop])
        asked = ask(house, model, stop=[stop], on_disconnect="keep")
        await drawn(asked, 1)
        asked.job.cancel("disconnected")
        while house.service._open:
            await asyncio.sleep(0)
        taken = await rest(house, model, stream_of(asked), [], stop=[stop])
        done = taken.of(wire.Done)[0]
        assert (taken.text(), done.stop, done.reason) == (stopped.text(), stop, "stop")
