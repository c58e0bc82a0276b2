"""Which models stay: several at once within a budget, none dropped while it is asked, each unharmed by the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from fake_runner import Recorder
from tiny import generate, make_model, make_request
from tiny_directory import CONFIG, VOCABULARY, write_model

from mlxbcd.device import Device
from mlxbcd.engine.budget import MemoryBudget
from mlxbcd.engine.scheduler import Policy
from mlxbcd.errors import ServeError
from mlxbcd.model.size import bytes_in_memory
from mlxbcd.plan.request import Priority
from mlxbcd.residency import keeper as keeper_module
from mlxbcd.residency.names import Resolved
from mlxbcd.residency.resident import Residency
from mlxbcd.text.workers import TextWorkers


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Resolved]:
    """Three models of one size."""
    directory = tmp_path_factory.mktemp("models")
    names = ["one", "two", "three"]
    return [Resolved(name, write_model(directory / name, seed=n), "directory") for n, name in enumerate(names)]


@pytest.fixture
def size(sources: list[Resolved]) -> int:
    """Bytes of one of them in memory."""
    return bytes_in_memory(sources[0].path, expand=True)


@pytest_asyncio.fixture
async def residency(size: int, monkeypatch: pytest.MonkeyPatch, sources: list[Resolved]) -> AsyncIterator[Residency]:
    """Room for two models and almost a third one. The first one is the default, which isn't pinned."""
    monkeypatch.setenv("HF_HUB_CACHE", str(sources[0].path / "none"))
    device, workers = Device(), TextWorkers()
    device.start()
    budget = MemoryBudget(3 * size - 1)
    residency = Residency(device, workers, lambda fault: pytest.fail(str(fault)), budget)
    residency.choose(default=str(sources[0].path), aliases={})
    residency.keeper.pin_default = False
    yield residency
    await residency.close()
    await workers.close()
    await device.close()
    assert budget.used == 0, "nothing is counted that isn't there"


async def load(residency: Residency, source: Resolved) -> None:
    async with residency.use(source):
        pass


def names(residency: Residency) -> list[str]:
    return sorted(resident.name for resident in residency.models.values())


async def answer(residency: Residency, source: Resolved, tokens: int = 12) -> list[int]:
    listener = Recorder()
    async with residency.use(source) as resident:
        resident.engine.submit(make_request([1, 2, 3], tokens), listener)
    await listener.over.wait()
    residency.keeper.settle()
    return listener.tokens


async def hold(residency: Residency, source: Resolved) -> tuple[Recorder, int]:
    """Start a generation that goes on; its listener, and the key to cancel it with."""
    listener = Recorder()
    async with residency.use(source) as resident:
        key = resident.engine.submit(make_request([1, 2, 3], 300), listener)
    assert isinstance(key, int)
    return listener, key


# -- room


async def test_the_size_that_files_tell_is_that_of_the_model_in_memory(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    await load(residency, sources[0])
    assert residency.models[sources[0].path].built.bytes == size
    assert residency.budget.held(sources[0].path, "weights") == size


async def test_the_least_recently_used_model_makes_room(residency: Residency, sources: list[Resolved]) -> None:
    one, two, three = sources
    await load(residency, one)
    await load(residency, two)
    await answer(residency, one)
    await load(residency, three)
    assert names(residency) == ["one", "three"]


async def test_models_that_take_turns_answer_as_each_does_alone(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    residency.budget.limit = 2 * size - 1  # room for one
    wanted = [generate(make_model(CONFIG, n), make_request([1, 2, 3], 12), VOCABULARY) for n in range(3)]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    for n in (0, 1, 2, 0, 2, 1, 1, 0):
        assert await answer(residency, sources[n]) == wanted[n]
        assert names(residency) == [sources[n].name]


async def test_requests_for_more_models_than_there_is_room_for_are_all_answered(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    residency.budget.limit = 2 * size - 1
    wanted = [generate(make_model(CONFIG, n), make_request([1, 2, 3], 12), VOCABULARY) for n in range(3)]
    answers = await asyncio.gather(*(answer(residency, sources[n % 3]) for n in range(9)))
    assert answers == [wanted[n % 3] for n in range(9)]
    assert len(residency.models) == 1


async def test_a_running_request_keeps_its_model_and_the_newcomer_waits(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    residency.budget.limit = 2 * size - 1
    one, two, _ = sources
    listener, key = await hold(residency, one)
    waiting = asyncio.ensure_future(load(residency, two))
    while len(listener.tokens) < 30:
        await asyncio.sleep(0)
    assert names(residency) == ["one"]
    assert not waiting.done()
    residency.models[one.path].engine.cancel(key)
    residency.keeper.settle()
    await waiting
    assert names(residency) == ["two"]
    assert listener.ends == []


async def test_a_model_that_is_always_asked_lets_a_waiting_one_in(
    residency: Residency, sources: list[Resolved], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "PATIENCE_S", 0.0)
    residency.budget.limit = 2 * size - 1
    one, two, _ = sources
    first, key = await hold(residency, one)
    waiting = asyncio.ensure_future(answer(residency, two))
    while not residency.models[one.path].leaving:
        await asyncio.sleep(0)
    later = asyncio.ensure_future(answer(residency, one))
    await asyncio.sleep(0.01)
    assert residency.models[one.path].engine.running == 1, "it takes nobody new"
    residency.models[one.path].engine.cancel(key)
    residency.keeper.settle()
    assert len(await waiting) == 12
    assert len(await later) == 12
    assert first.ends == []


async def test_a_model_that_has_to_go_is_not_kept_by_background_rows_that_rest(
    residency: Residency, sources: list[Resolved], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "PATIENCE_S", 0.0)
    residency.budget.limit = 2 * size - 1
    one, two, _ = sources
    await load(residency, one)
    engine = residency.models[one.path].engine
    rest = [Recorder(lambda heard: residency.keeper.settle()) for _ in range(2)]
    request = replace(make_request([1, 2, 3], 100), priority=Priority.BACKGROUND)
    engine.submit(request, rest[0])
    while not rest[0].tokens:
        await asyncio.sleep(0)
    residency.schedule(Policy(background=False))
    engine.submit(request, rest[1])
    await load(residency, two)
    assert [listener.ends for listener in rest] == [[("ended", "length")]] * 2
    assert names(residency) == ["two"]
    assert not residency.models[two.path].engine.policy.background, "it is for those alone that others wait for"


async def test_a_newcomer_that_gives_up_leaves_everything_as_it_was(
    residency: Residency, sources: list[Resolved], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "PATIENCE_S", 0.0)
    residency.budget.limit = 2 * size - 1
    one, two, three = sources
    _, key = await hold(residency, one)
    waiting = asyncio.ensure_future(load(residency, two))
    while not residency.models[one.path].leaving:
        await asyncio.sleep(0)
    waiting.cancel()
    while residency.loading:
        await asyncio.sleep(0)
    assert not residency.models[one.path].leaving
    residency.models[one.path].engine.cancel(key)
    assert len(await answer(residency, one)) == 12
    await load(residency, three)
    assert names(residency) == ["three"]


async def test_a_model_that_can_never_fit_is_refused_and_nothing_is_dropped_for_it(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    one, two, three = sources
    await load(residency, one)
    residency.budget.limit = size + size // 2
    residency.keeper.pin_default = True
    with pytest.raises(ServeError) as refused:
        await load(residency, two)
    assert refused.value.code == "out_of_memory"
    assert "beside one, which stays" in refused.value.message
    assert "memory.limit" in refused.value.message
    assert names(residency) == ["one"]
    await residency.unload(one)
    residency.budget.limit = size // 2
    for source in (two, three):
        with pytest.raises(ServeError, match="there is no room for it: all models may take"):
            await load(residency, source)
    residency.budget.limit = size
    await load(residency, two)


async def test_a_checkpoint_with_parts_that_are_not_used_is_measured_by_what_is(
    residency: Residency, sources: list[Resolved], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def thrice(directory: Path, *, expand: bool) -> int:
        return 3 * bytes_in_memory(directory, expand=expand)

    monkeypatch.setattr("mlxbcd.residency.resident.bytes_in_memory", thrice)
    await load(residency, sources[0])
    assert residency.budget.used == size


async def test_a_model_that_is_larger_than_its_files_say_gets_more_room(
    residency: Residency, sources: list[Resolved], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = sources
    await load(residency, one)
    await load(residency, two)
    monkeypatch.setattr("mlxbcd.residency.resident.bytes_in_memory", lambda directory, *, expand: 10)
    await load(residency, three)
    assert names(residency) == ["three", "two"]
    assert residency.budget.used == 2 * size


async def test_two_loads_at_once_do_not_take_the_same_room(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    residency.budget.limit = 2 * size - 1
    await asyncio.gather(*(load(residency, source) for source in sources))
    assert len(residency.models) == 1
    assert residency.budget.used == size


async def test_row_states_count_and_count_no_more_when_their_rows_are_gone(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    one, two, three = sources
    listener, key = await hold(residency, one)
    while len(listener.tokens) < 5:
        await asyncio.sleep(0)
    assert residency.budget.held(one.path, "kv") > 0
    residency.models[one.path].engine.cancel(key)
    while residency.budget.held(one.path, "kv"):
        await asyncio.sleep(0)
    await load(residency, two)
    await load(residency, three)
    assert residency.budget.used == 2 * size


async def test_an_idle_model_goes_for_a_request_that_needs_its_room_and_a_running_one_keeps_what_it_may_need(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    one, two, _ = sources
    await answer(residency, one)  # what a token's state takes is known from now on
    listener, key = await hold(residency, one)
    while not listener.tokens:  # until it has begun, it claims nothing
        await asyncio.sleep(0)
    claimed = residency.models[one.path].engine.claimed
    assert claimed > 0
    residency.budget.limit = 2 * size + claimed // 2
    loading = asyncio.ensure_future(load(residency, two))
    while len(listener.tokens) < 10:
        await asyncio.sleep(0)
    assert not loading.done(), "the room is promised"
    residency.models[one.path].engine.cancel(key)
    while residency.budget.held(one.path, "kv"):  # it may have grown into all of it
        await asyncio.sleep(0)
    residency.keeper.settle()
    await loading
    await answer(residency, one)
    assert names(residency) == ["one", "two"]
    later, key = await hold(residency, one)
    while not later.tokens:
        await asyncio.sleep(0)
    while two.path in residency.models:
        await residency.keeper.changed()
    residency.models[one.path].engine.cancel(key)


# -- what goes first


async def test_a_prefix_cache_is_shed_before_a_model_is_dropped(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    cached = size
    asked: list[int] = []

    async def shed(wanted: int) -> int:
        nonlocal cached
        asked.append(wanted)
        freed = min(cached, wanted)
        cached -= freed
        return freed

    one, two, three = sources
    residency.budget.measure("prefixes", "prefix", lambda: cached)
    residency.keeper.shedders.append(shed)
    await load(residency, one)
    await load(residency, two)
    assert names(residency) == ["one", "two"]
    assert asked == [1]
    await load(residency, three)
    assert names(residency) == ["three", "two"]
    assert await residency.keeper.relieve(size // 2) >= size // 2
    cached = 0
    residency.budget.forget("prefixes")


async def test_pressure_drops_idle_models_and_no_other(
    residency: Residency, sources: list[Resolved], size: int
) -> None:
    one, two, _ = sources
    await load(residency, one)
    listener, key = await hold(residency, two)
    assert await residency.keeper.relieve(1 << 40) == size
    assert names(residency) == ["two"]
    assert not listener.over.is_set()
    residency.models[two.path].engine.cancel(key)
    residency.models[two.path].keep_alive = math.inf
    assert await residency.keeper.relieve(1 << 40) == 0, "a pinned one stays"


async def test_a_cache_that_fails_to_shed_does_not_keep_others_from_it(
    residency: Residency, sources: list[Resolved]
) -> None:
    async def broken(wanted: int) -> int:
        raise RuntimeError("odd")

    residency.keeper.shedders.append(broken)
    residency.budget.measure("prefixes", "prefix", 10)
    for source in sources:
        await load(residency, source)
    assert names(residency) == ["three", "two"]
    residency.budget.forget("prefixes")


# -- lack of use


async def test_a_model_goes_when_nobody_has_asked_it_for_its_time(
    residency: Residency, sources: list[Resolved]
) -> None:
    residency.keeper.keep_alive = 0.05
    one, two, _ = sources
    await load(residency, one)
    residency.models[one.path].keep_alive = math.inf
    await load(residency, two)
    listener, key = await hold(residency, two)
    while len(listener.tokens) < 30:
        await asyncio.sleep(0.005)
    assert names(residency) == ["one", "two"], "neither a pinned nor a busy one"
    residency.models[two.path].engine.cancel(key)
    residency.keeper.settle()
    while two.path in residency.models:
        await residency.keeper.changed()
    assert names(residency) == ["one"]


async def test_a_model_whose_time_is_nothing_goes_with_its_last_request(
    residency: Residency, sources: list[Resolved]
) -> None:
    one = sources[0]
    await load(residency, one)
    residency.models[one.path].keep_alive = 0.0
    answers = await asyncio.gather(*(answer(residency, one) for _ in range(3)))
    assert len(set(map(tuple, answers))) == 1
    while residency.models:
        await residency.keeper.changed()


async def test_no_timer_runs_while_everything_stays(residency: Residency, sources: list[Resolved]) -> None:
    await answer(residency, sources[0])
    assert residency.keeper._timer is None
    residency.models[sources[0].path].keep_alive = 1000.0
    residency.keeper.settle()
    assert residency.keeper._timer is not None


async def test_the_default_model_is_pinned_until_a_client_says_otherwise(
    residency: Residency, sources: list[Resolved]
) -> None:
    residency.keeper.pin_default = True
    residency.keeper.keep_alive = 0.0
    one, two, _ = sources
    await load(residency, one)
    await load(residency, two)
    while two.path in residency.models:
        await residency.keeper.changed()
    resident = residency.models[one.path]
    assert residency.keeper.pinned(resident)
    assert residency.keeper.expires_s(resident) == math.inf
    resident.keep_alive = 0.0
    residency.keeper.settle()
    while residency.models:
        await residency.keeper.changed()
