"""Resident models: loaded once however many wait, kept while in use, and gone with their memory when dropped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import mlx.core as mx
import pytest
import pytest_asyncio
from fake_runner import Recorder
from tiny import make_request
from tiny_directory import write_model

from mlxbcd.device import Device
from mlxbcd.errors import ServeError
from mlxbcd.model import load as load_module
from mlxbcd.residency import resident as resident_module
from mlxbcd.residency.build import Built, build
from mlxbcd.residency.names import Resolved
from mlxbcd.residency.resident import Progress, Residency
from mlxbcd.text.workers import TextWorkers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    return Resolved("tiny", write_model(tmp_path_factory.mktemp("models") / "tiny"), "directory")


@pytest_asyncio.fixture
async def device() -> AsyncIterator[Device]:
    device = Device()
    device.start()
    yield device
    await device.close()


@pytest_asyncio.fixture
async def residency(device: Device) -> AsyncIterator[Residency]:
    workers = TextWorkers()
    residency = Residency(device, workers, lambda fault: pytest.fail(str(fault)))
    yield residency
    await residency.close()
    await workers.close()
    assert residency.models == {}
    assert residency.loading == []


class Gate:
    """Holds up every load after its first report of progress, and counts loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.started = threading.Event()
        self.go = threading.Event()
        monkeypatch.setattr(load_module, "_GROUP_BYTES", 1)
        monkeypatch.setattr(resident_module, "build", self.build)

    def build(self, directory: Path, progress: Progress, cancelled: Callable[[], bool], draft: Path | None) -> Built:
        self.loads += 1

        def report(done: int, total: int) -> None:
            progress(done, total)
            self.started.set()
            self.go.wait()

        return build(directory, report, cancelled, draft)

    async def reached(self) -> None:
        await asyncio.to_thread(self.started.wait)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def load(residency: Residency, source: Resolved, progress: Progress | None = None) -> None:
    async with residency.use(source, progress):
        pass


def loading(residency: Residency, source: Resolved, progress: Progress | None = None) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(load(residency, source, progress))


# -- loading


async def test_a_model_is_loaded_once_however_many_wait_for_it(
    residency: Residency, source: Resolved, gate: Gate
) -> None:
    tasks = [loading(residency, source) for _ in range(5)]
    await gate.reached()
    assert residency.loading == ["tiny"]
    gate.go.set()
    await asyncio.gather(*tasks)
    await load(residency, source)
    assert gate.loads == 1
    assert list(residency.models) == [source.path]


async def test_a_resident_model_answers(residency: Residency, source: Resolved) -> None:
    async with residency.use(source) as resident:
        listener = Recorder()
        resident.engine.submit(make_request([1, 2, 3], 5), listener)
        await listener.over.wait()
    assert len(listener.tokens) == 5
    assert listener.ends == [("ended", "length")]


async def test_every_waiter_hears_of_progress_from_when_it_came(
    residency: Residency, source: Resolved, gate: Gate
) -> None:
    early: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    first = loading(residency, source, lambda done, total: early.append((done, total)))
    await gate.reached()
    second = loading(residency, source, lambda done, total: late.append((done, total)))
    while not late and not second.done():
        await asyncio.sleep(0)
    gate.go.set()
    await asyncio.gather(first, second)
    assert early[0] == late[0]
    assert early[0][0] == 0
    total = early[0][1]
    assert early[-1] == late[-1] == (total, total)
    assert early == sorted(early)
    assert total == residency.models[source.path].built.bytes


async def test_a_waiter_that_leaves_does_not_end_the_load_for_the_others(
    residency: Residency, source: Resolved, gate: Gate
) -> None:
    leaves, stays = loading(residency, source), loading(residency, source)
    await gate.reached()
    leaves.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    gate.go.set()
    await stays
    assert gate.loads == 1


async def test_when_the_last_waiter_has_left_the_load_is_given_up(
    residency: Residency, source: Resolved, gate: Gate
) -> None:
    task = loading(residency, source)
    await gate.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.go.set()
    while residency.loading:
        await asyncio.sleep(0)
    assert residency.models == {}


async def test_who_asks_for_a_model_that_is_being_given_up_gets_it_all_the_same(
    residency: Residency, source: Resolved, gate: Gate
) -> None:
    first = loading(residency, source)
    await gate.reached()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    others = [loading(residency, source) for _ in range(3)]
    await asyncio.sleep(0)
    gate.go.set()
    await asyncio.gather(*others)
    assert gate.loads == 2
    assert list(residency.models) == [source.path]


async def test_a_load_that_fails_tells_every_waiter_and_may_be_tried_again(
    residency: Residency, source: Resolved, tmp_path: Path
) -> None:
    broken = write_model(tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    target = Resolved("broken", broken, "directory")
    results = await asyncio.gather(*(load(residency, target) for _ in range(3)), return_exceptions=True)
    assert [getattr(result, "code", None) for result in results] == ["load_failed"] * 3
    (broken / "model.safetensors").write_bytes(weights)
    await load(residency, target)
    assert list(residency.models) == [broken]


async def test_a_model_without_a_usable_tokenizer_is_not_kept_in_memory(
    residency: Residency, device: Device, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "mute")
    (directory / "tokenizer.json").write_text("{}")
    gc.collect()
    before = await device.run(mx.get_active_memory)
    with pytest.raises(ServeError) as failed:
        await load(residency, Resolved("mute", directory, "directory"))
    assert failed.value.code == "load_failed"
    assert "tokenizer.json" in failed.value.message
    assert await device.run(mx.get_active_memory) < before + 1000


async def test_a_model_whose_first_forward_fails_is_told_as_a_failed_load(
    residency: Residency, source: Resolved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> int:
        raise TypeError("unexpected cache")

    monkeypatch.setattr("mlxbcd.residency.build._vocab_size", fails)
    with pytest.raises(ServeError) as failed:
        await load(residency, source)
    assert failed.value.code == "load_failed"
    assert "unexpected cache" in failed.value.message


# -- unloading


async def test_an_unloaded_model_gives_its_memory_back(residency: Residency, source: Resolved, device: Device) -> None:
    gc.collect()
    before = await device.run(mx.get_active_memory)
    async with residency.use(source) as resident:
        listener = Recorder()
        resident.engine.submit(make_request([1, 2, 3], 5), listener)
        await listener.over.wait()
        size = resident.built.bytes
        assert await device.run(mx.get_active_memory) >= before + size
    del resident
    await residency.unload(source)
    assert await device.run(mx.get_active_memory) < before + size // 10
    assert residency.models == {}


async def test_a_model_that_is_not_loaded_cannot_be_unloaded(residency: Residency, source: Resolved) -> None:
    with pytest.raises(ServeError) as refused:
        await residency.unload(source)
    assert refused.value.code == "bad_request"


async def test_a_model_in_use_cannot_be_unloaded(residency: Residency, source: Resolved) -> None:
    async with residency.use(source) as resident:
        with pytest.raises(ServeError, match="requests run"):
            await residency.unload(source)
        listener = Recorder()
        key = resident.engine.submit(make_request([1], 300), listener)
    with pytest.raises(ServeError, match="requests run"):
        await residency.unload(source)
    resident.engine.cancel(key)
    await residency.unload(source)


async def test_who_asks_while_a_model_leaves_gets_it_loaded_anew(
    residency: Residency, source: Resolved, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.go.set()
    await load(residency, source)
    loads_when_freed: list[int] = []
    close = Built.close

    def closed(built: Built) -> None:
        loads_when_freed.append(gate.loads)
        close(built)

    monkeypatch.setattr(Built, "close", closed)
    leaving = asyncio.ensure_future(residency.unload(source))
    await asyncio.sleep(0)
    await load(residency, source)
    old = await leaving
    assert gate.loads == 2
    assert loads_when_freed == [1], "its memory is free before it is loaded again"
    assert residency.models[source.path] is not old
    async with residency.use(source) as resident:
        listener = Recorder()
        resident.engine.submit(make_request([1], 2), listener)
        await listener.over.wait()
        assert listener.ends == [("ended", "length")]


async def test_an_unload_whose_caller_gives_up_is_finished_all_the_same(
    residency: Residency, source: Resolved, device: Device
) -> None:
    await load(residency, source)
    built = residency.models[source.path].built
    unloading = asyncio.ensure_future(residency.unload(source))
    await asyncio.sleep(0)
    unloading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unloading
    while residency._leaving:
        await asyncio.sleep(0)
    assert not hasattr(built, "executor")


# -- closing


async def test_closing_gives_up_what_is_being_loaded(device: Device, source: Resolved, gate: Gate) -> None:
    workers = TextWorkers()
    residency = Residency(device, workers, lambda fault: None)
    task = loading(residency, source)
    await gate.reached()
    closing = asyncio.ensure_future(residency.close())
    await asyncio.sleep(0)
    gate.go.set()
    await closing
    with pytest.raises(ServeError):
        await task
    assert residency.models == {}
    with pytest.raises(ServeError) as refused:
        await load(residency, source)
    assert refused.value.code == "shutting_down"
    await workers.close()


async def test_closing_waits_for_an_unload(device: Device, source: Resolved) -> None:
    workers = TextWorkers()
    residency = Residency(device, workers, lambda fault: None)
    await load(residency, source)
    built = residency.models[source.path].built
    unloading = asyncio.ensure_future(residency.unload(source))
    await asyncio.sleep(0)
    await residency.close()
    assert not hasattr(built, "executor")
    with contextlib.suppress(asyncio.CancelledError):
        await unloading
    await workers.close()
