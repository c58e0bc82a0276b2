"""The service behind the sockets, whole: requests in, frames out, on tiny models from real directories."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
from tiny import generate, make_model
from tiny_directory import CONFIG, CONTEXT, EOS, VOCABULARY, make_tokenizer, write_model

from mlxbc import wire
from mlxbcd.config.settings import Settings
from mlxbcd.config.sources import fixed
from mlxbcd.device import Device
from mlxbcd.engine.executor import Executor
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.errors import ServeError
from mlxbcd.machine.power import Condition
from mlxbcd.model import load as load_module
from mlxbcd.model.blas import BlasReport
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.residency import resident as resident_module
from mlxbcd.residency.build import Built, build
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.contract import Job
from mlxbcd.serve.live import LiveService
from mlxbcd.text.tokenizer import Tokenizer

STEPS = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two models."""
    data = tmp_path_factory.mktemp("data")
    write_model(data / "models" / "one", seed=0)
    write_model(data / "models" / "two", seed=1)
    return data


@pytest.fixture(scope="module")
def tokenizer(store: Path) -> Tokenizer:
    return Tokenizer.load(store / "models" / "one")


@cache
def reference(prompt: str, max_tokens: int, model: int = 0, **settings: Any) -> list[int]:
    """The ids (no end token) that a model answers with, by an engine that is nothing but a loop."""
    backend = make_tokenizer()
    (eos,) = backend.encode(EOS).ids
    request = Request(
        prompt=tuple(backend.encode(prompt).ids),
        max_tokens=max_tokens,
        eos=frozenset({eos}),
        sampling=Sampling(**settings),
    )
    return [token for token in generate(make_model(CONFIG, model), request, VOCABULARY) if token != eos]


class Asked:
    """One submitted request, and its frames."""

    def __init__(self, service: LiveService, request: Any) -> None:
        self.frames: list[wire.Reply] = []
        self.over = asyncio.Event()
        self.job: Job = service.submit(request, self._reply, "test")

    def _reply(self, frame: wire.Reply) -> None:
        self.frames.append(frame)
        if isinstance(frame, wire.TERMINAL):
            self.over.set()

    async def end(self) -> Any:
        """The one terminal frame."""
        await self.over.wait()
        terminal = [frame for frame in self.frames if isinstance(frame, wire.TERMINAL)]
        assert terminal == self.frames[-1:]
        return terminal[0]

    async def first(self, kind: type[Any]) -> Any:
        """The first frame of a kind; the request mustn't end before it."""
        while not self.of(kind):
            assert not self.over.is_set(), self.frames
            await asyncio.sleep(0)
        return self.of(kind)[0]

    def of(self, kind: type[Any]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def text(self, channel: str = "text") -> str:
        return "".join(frame.text for frame in self.of(wire.Token) if frame.channel == channel)

    @property
    def ids(self) -> list[int]:
        return [token for frame in self.of(wire.Token) for token in frame.ids]


class House:
    """A service with its device."""

    def __init__(self, default: str | None, drafts: Mapping[str, str] = MappingProxyType({})) -> None:
        self.faults: list[BaseException] = []
        self.device = Device()
        self.device.start()
        self.configuration = Configuration(
            fixed(Settings(model=default, cache_mode="none", cache_disk=0, drafts=drafts))
        )
        self.service = LiveService(self.device, self.configuration, self.faults.append, BlasReport("native", "its own"))

    def ask(self, **fields: Any) -> Asked:
        return self.submit(wire.Generate(**{"id": 1, "resumable": True, "temperature": 0.0} | fields))

    def submit(self, request: Any) -> Asked:
        return Asked(self.service, request)

    async def empty(self) -> None:
        """Wait until the device has nothing to do, and see that no request has left anything behind."""
        service = self.service
        await asyncio.gather(*service._tasks, return_exceptions=True)
        for resident in service._residency.models.values():
            engine, executor = resident.engine, resident.built.executor
            while engine._work.is_set() or engine.report.running:
                await self.device.run(int)
            assert not engine._entries
            assert not executor._preparing
            assert not executor._ready
            assert len(executor._group) == 0
            assert engine.report.kv_bytes == 0
            assert resident.users == 0
        assert not service._open
        assert service._idle.is_set()


@asynccontextmanager
async def housed(
    store: Path, *, warm: bool = True, drafts: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[House]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXBC_DATA", str(store))
        patch.setenv("HF_HUB_CACHE", str(store / "no-hub"))
        house = House(str(store / "models" / "one"), drafts)
        if warm:
            house.service.warm(preload=False)
        try:
            yield house
        finally:
            await house.service.close()
            await house.device.close()


@pytest_asyncio.fixture
async def house(store: Path) -> AsyncIterator[House]:
    async with housed(store) as house:
        yield house


def chat(text: str) -> list[wire.Message]:
    return [wire.Message(role="user", content=text)]


# -- generating


async def test_a_raw_prompt_is_continued_as_the_model_alone_would(house: House, tokenizer: Tokenizer) -> None:
    asked = house.ask(prompt="the story in", max_tokens=STEPS)
    done = await asked.end()
    expected = reference("the story in", STEPS)
    assert asked.ids == expected
    assert asked.text() == tokenizer.decode(expected)
    assert done.usage.prompt == len(tokenizer.encode("the story in"))
    assert done.usage.generated == len(expected) + (done.reason == "stop")
    (accepted,) = asked.of(wire.Accepted)
    assert asked.frames.index(accepted) == 0
    assert accepted.model == "one"
    assert len(accepted.stream) == 32
    await house.empty()


async def test_a_chat_goes_through_the_models_template(house: House) -> None:
    asked = house.ask(messages=chat("hello"), max_tokens=8)
    await asked.end()
    assert asked.ids == reference("<|user|>hello<|end|><|assistant|>", 8)


async def test_a_template_that_opens_reasoning_puts_text_into_that_channel(house: House) -> None:
    asked = house.ask(messages=chat("hello"), template_options={"enable_thinking": True}, max_tokens=8)
    await asked.end()
    assert asked.text("reasoning")
    assert asked.text("text") == ""


async def test_a_crowd_gets_what_each_gets_alone(house: House) -> None:
    prompts = ["the", "in a " * 20, "x", "###", "hello there", "a" * 150]
    crowd = [
        house.ask(id=i, prompt=prompt, max_tokens=12 + i, temperature=float(i % 2), seed=i)
        for i, prompt in enumerate(prompts)
    ]
    for i, asked in enumerate(crowd):
        await asked.end()
        assert asked.ids == reference(prompts[i], 12 + i, temperature=float(i % 2), seed=i)
    await house.empty()


async def test_a_seed_that_was_chosen_for_a_request_reproduces_it(house: House) -> None:
    first = house.ask(prompt="the", temperature=1.2, max_tokens=10)
    await first.end()
    (accepted,) = first.of(wire.Accepted)
    second = house.ask(prompt="the", temperature=1.2, max_tokens=10, seed=accepted.seed)
    third = house.ask(prompt="the", temperature=1.2, max_tokens=10)
    await second.end()
    await third.end()
    assert first.ids == second.ids != third.ids


async def test_a_stream_that_broke_off_is_resumed_from_its_ids(house: House) -> None:
    whole = house.ask(prompt="once", temperature=1.0, seed=4, max_tokens=20)
    await whole.end()
    (accepted,) = whole.of(wire.Accepted)
    for had in (1, 7, 19, 20):
        resume = wire.Resume(stream=accepted.stream, tokens=whole.ids[:had])
        rest = house.ask(prompt="once", temperature=1.0, seed=4, max_tokens=20, resume=resume)
        done = await rest.end()
        assert rest.ids == whole.ids[had:]
        assert done.usage.generated == 20
        assert rest.of(wire.Accepted)[0].stream == accepted.stream
        assert whole.text().endswith(rest.text())


async def test_logprobs_come_with_their_tokens_and_change_none(house: House) -> None:
    plain = house.ask(prompt="the", max_tokens=6)
    asking = house.ask(id=2, prompt="the", max_tokens=6, logprobs=True, top_logprobs=2)
    await plain.end()
    await asking.end()
    told = [logprob for frame in asking.of(wire.Token) for logprob in frame.logprobs]
    assert asking.ids == plain.ids == [logprob.token for logprob in told]
    assert all(logprob.logprob <= 0 and len(logprob.top) == 2 for logprob in told)


async def test_a_stop_string_ends_the_text_before_it(house: House) -> None:
    free = house.ask(prompt="the", max_tokens=STEPS)
    await free.end()
    text = free.text()
    stop = text[10:13]
    asked = house.ask(prompt="the", max_tokens=STEPS, stop=[stop])
    done = await asked.end()
    assert asked.text() == text[: text.index(stop)]
    assert (done.reason, done.stop) == ("stop", stop)
    assert done.usage.generated < STEPS
    await house.empty()


async def test_two_models_serve_at_the_same_time(house: House) -> None:
    both = [house.ask(id=i, prompt="the", model=name, max_tokens=30) for i, name in enumerate(("one", "two"))]
    for i, asked in enumerate(both):
        await asked.end()
        assert asked.ids == reference("the", 30, model=i)
    assert both[0].ids != both[1].ids
    assert sorted(house.service.resident()) == ["one", "two"]


# -- tokens and models


@pytest.mark.parametrize("text", ["the end", "the " * 3000])
async def test_text_is_tokenised_and_counted(house: House, tokenizer: Tokenizer, text: str) -> None:
    tokens = await house.submit(wire.Tokenize(id=1, text=text)).end()
    count = await house.submit(wire.Count(id=2, text=text)).end()
    assert tokens == wire.Tokens(id=1, tokens=tokenizer.encode(text))
    assert count == wire.Counted(id=2, count=len(tokens.tokens))


async def test_a_chat_is_counted_as_the_model_sees_it(house: House, tokenizer: Tokenizer) -> None:
    count = await house.submit(wire.Count(id=2, messages=chat("hello"))).end()
    seen = "<|user|>hello<|end|><|assistant|>"
    assert count.count == len(tokenizer.encode(seen, special=False))
    tokens = await house.submit(wire.Tokenize(id=3, messages=chat("hello"))).end()
    assert tokens == wire.Tokens(id=3, tokens=tokenizer.encode(seen, special=False), text=seen)


async def test_models_are_listed_loaded_and_unloaded(house: House) -> None:
    def shown(listing: wire.ModelList) -> list[tuple[str, bool, bool]]:
        return [(entry.name, entry.resident, entry.default) for entry in listing.models]

    sizes = [entry.memory for entry in (await house.submit(wire.Models(id=7, memory=True)).end()).models]
    assert [entry.memory for entry in (await house.submit(wire.Models(id=8)).end()).models] == [0, 0]
    loaded = await house.submit(wire.Load(id=1, model="two")).end()
    assert sizes[1] == loaded.bytes
    assert (loaded.model, loaded.bytes > 0) == ("two", True)
    assert shown(await house.submit(wire.Models(id=2)).end()) == [("one", False, True), ("two", True, False)]
    (process,) = (await house.submit(wire.Ps(id=3)).end()).models
    assert (process.model, process.placement, process.context, process.reason) == ("two", "continuous", CONTEXT, "")
    assert await house.submit(wire.Unload(id=4, model="two")).end() == wire.Unloaded(id=4, model="two")
    assert (await house.submit(wire.Ps(id=5)).end()).models == []
    again = await house.submit(wire.Unload(id=6, model="two")).end()
    assert again.code == "bad_request"


async def test_the_default_model_stays_away_once_it_was_unloaded_until_somebody_asks(house: House) -> None:
    before = house.ask(prompt="the story in", max_tokens=STEPS)
    await before.end()
    assert (await house.submit(wire.Ps(id=2)).end()).models[0].pinned
    assert (await house.submit(wire.Unload(id=3, model="one")).end()).model == "one"
    house.service._residency.keeper.settle()
    house.configuration.reload()
    for asked in (wire.Models(id=4), wire.Status(id=5), wire.Ps(id=6)):
        await house.submit(asked).end()
    assert house.service.resident() == house.service._residency.loading == []
    after = house.ask(prompt="the story in", max_tokens=STEPS)
    await after.end()
    assert after.ids == before.ids
    assert house.service.resident() == ["one"]


async def test_a_model_is_not_unloaded_under_its_requests(house: House) -> None:
    asked = house.ask(prompt="the", max_tokens=300)
    await asked.first(wire.Token)
    refused = await house.submit(wire.Unload(id=2, model="one")).end()
    assert refused.code == "bad_request"
    asked.job.cancel()
    await asked.end()
    assert await house.submit(wire.Unload(id=3, model="one")).end() == wire.Unloaded(id=3, model="one")


# -- while a model loads


class Gate:
    """Holds up every load after its first report of progress."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        monkeypatch.setattr(load_module, "_GROUP_BYTES", 1)
        monkeypatch.setattr(resident_module, "build", self.build)

    def build(
        self, directory: Path, progress: Callable[[int, int], None], cancelled: Callable[[], bool], draft: Path | None
    ) -> Built:
        def report(done: int, total: int) -> None:
            progress(done, total)
            self.started.set()
            self.go.wait()

        return build(directory, report, cancelled, draft)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def test_progress_of_a_load_is_told_to_all_who_wait(house: House, gate: Gate) -> None:
    load, asked = house.submit(wire.Load(id=1)), house.ask(id=2, prompt="the", max_tokens=3)
    await asyncio.to_thread(gate.started.wait)
    await asked.first(wire.Progress)
    status = await house.submit(wire.Status(id=3)).end()
    assert "loading one" in status.notes
    gate.go.set()
    assert isinstance(await load.end(), wire.Loaded)
    done = await asked.end()
    assert {frame.phase for frame in load.of(wire.Progress)} == {"load"}
    assert done.timings.load > 0
    assert done.usage.generated == 3


@pytest.mark.parametrize("kind", ["load", "generate", "count"])
async def test_a_request_cancelled_while_its_model_loads_ends_at_once(house: House, gate: Gate, kind: str) -> None:
    if kind == "generate":
        asked = house.ask(prompt="the")
    else:
        asked = house.submit(wire.Load(id=1) if kind == "load" else wire.Count(id=1, text="the"))
    await asyncio.to_thread(gate.started.wait)
    asked.job.cancel()
    assert asked.over.is_set()
    end = await asked.end()
    if kind == "generate":
        assert (end.reason, end.usage.generated) == ("cancelled", 0)
    else:
        assert "cancelled" in end.message
    gate.go.set()
    while house.service._residency.loading:
        await asyncio.sleep(0)
    assert house.service.resident() == []
    await house.empty()


async def test_closing_during_a_load_ends_everything_once(store: Path, gate: Gate) -> None:
    async with housed(store) as house:
        everything = [house.submit(wire.Load(id=1)), house.ask(id=2, prompt="the")]
        await asyncio.to_thread(gate.started.wait)
        closing = asyncio.ensure_future(house.service.close())
        await asyncio.sleep(0)
        gate.go.set()
        await closing
        assert [(await asked.end()).code for asked in everything] == ["shutting_down"] * 2


# -- cancelling


@pytest.mark.parametrize("prompt", ["the", "a" * 200], ids=["short", "long"])
async def test_a_request_cancelled_at_any_point_ends_once_and_leaves_nothing(house: House, prompt: str) -> None:
    neighbour = house.ask(id=900, prompt="in the", max_tokens=60)

    async def cancelled_after(turns: int, rounds: int) -> None:
        """Cancel after some turns of the loop and some rounds of the device."""
        asked = house.ask(prompt=prompt, max_tokens=200)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(rounds):
            await house.device.run(int)
        asked.job.cancel()
        asked.job.cancel()
        assert asked.over.is_set()
        await asyncio.sleep(0)
        end = await asked.end()
        assert end.reason == "cancelled"
        assert sum(frame.n for frame in asked.of(wire.Token)) == end.usage.generated

    for turns in range(25):
        await cancelled_after(turns, rounds=0)
    for rounds in range(20):
        await cancelled_after(rounds % 3, rounds)
    await neighbour.end()
    assert neighbour.ids == reference("in the", 60)
    await house.empty()


@pytest.mark.parametrize("frames", range(1, 8))
async def test_a_request_cancelled_from_within_its_own_reply_ends_once(house: House, frames: int) -> None:
    await house.submit(wire.Load(id=9)).end()
    seen: list[wire.Reply] = []
    over = asyncio.Event()

    def reply(frame: wire.Reply) -> None:
        seen.append(frame)
        if isinstance(frame, wire.TERMINAL):
            over.set()
        elif len(seen) == frames:
            job.cancel()

    job = house.service.submit(wire.Generate(id=1, prompt="the", max_tokens=50), reply, "test")
    await over.wait()
    assert [frame for frame in seen if isinstance(frame, wire.TERMINAL)] == seen[-1:]
    await house.empty()


# -- refusing and failing


async def test_an_unknown_model_is_told_by_name(house: House) -> None:
    for request in (
        wire.Generate(id=1, prompt="x", model="nobody"),
        wire.Load(id=2, model="nobody"),
        wire.Count(id=3, text="x", model="nobody"),
        wire.Unload(id=4, model="nobody"),
    ):
        error = await house.submit(request).end()
        assert (error.code, error.id) == ("unknown_model", request.id)
        assert "nobody" in error.message
    await house.empty()


async def test_what_does_not_fit_the_context_is_refused_with_both_numbers(house: House) -> None:
    error = await house.ask(prompt="x" * (CONTEXT + 1)).end()
    assert error.code == "context_too_long"
    assert (error.data["prompt"], error.data["context"]) == (CONTEXT + 1, CONTEXT)
    assert error.data["fields"] == [], "no field would make it fit"
    assert not error.retryable


async def test_requests_that_contradict_themselves_are_refused_at_submit(house: House) -> None:
    for request in (wire.Generate(id=1), wire.Count(id=1), wire.Tokenize(id=1, text="x", messages=chat("x"))):
        with pytest.raises(ServeError) as refused:
            house.submit(request)
        assert refused.value.code == "bad_request"
    await house.empty()


async def test_a_broken_model_is_a_failed_load_and_others_still_serve(house: House, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "broken")
    (directory / "config.json").write_text("{")
    error = await house.ask(prompt="x", model=str(directory)).end()
    assert error.code == "load_failed"
    assert isinstance(await house.ask(prompt="x", max_tokens=2).end(), wire.Done)


async def test_an_exception_nobody_expected_ends_its_request_and_is_logged(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await house.submit(wire.Load(id=1)).end()

    def broken(*args: Any, **kwargs: Any) -> list[int]:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", broken)
        ends = [await house.ask(prompt="x").end(), await house.submit(wire.Count(id=2, text="x")).end()]
    assert [end.code for end in ends] == ["internal"] * 2
    assert "ZeroDivisionError" in caplog.text
    assert isinstance(await house.ask(prompt="x", max_tokens=2).end(), wire.Done)
    await house.empty()


async def test_a_step_that_raises_fails_those_it_ran_and_the_next_request_works(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.submit(wire.Load(id=1)).end()
    forward = next(iter(house.service._residency.models.values())).built.executor.forward
    run, seen = forward.run, []

    def failing(groups: Any) -> Any:
        seen.append(1)
        if len(seen) == 20:
            raise RuntimeError("no such kernel")
        return run(groups)

    monkeypatch.setattr(forward, "run", failing)
    ends = [await asked.end() for asked in [house.ask(id=i, prompt="x", max_tokens=100) for i in range(3)]]
    assert {end.code for end in ends} == {"device_error"}
    assert all(end.retryable for end in ends)
    assert isinstance(await house.ask(prompt="x", max_tokens=5).end(), wire.Done)
    status = await house.submit(wire.Status(id=8)).end()
    assert (status.served, status.failed, status.state) == (1, 3, "ready")
    assert house.faults == []
    await house.empty()


async def test_a_fault_of_the_device_fails_all_is_reported_once_and_closing_does_not_wait_for_it(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with housed(store) as house:
        await house.submit(wire.Load(id=1)).end()
        iterate, seen = Executor.iterate, []

        def failing(self: Executor, *args: Any) -> Any:
            seen.append(1)
            if len(seen) == 10:
                raise DeviceFault("gone")
            return iterate(self, *args)

        monkeypatch.setattr(Executor, "iterate", failing)
        everybody = [house.ask(id=i, prompt="x", max_tokens=100) for i in range(3)]
        assert {(await asked.end()).code for asked in everybody} == {"device_error"}
        assert len(house.faults) == 1
        status = await house.submit(wire.Status(id=8)).end()
        assert status.state == "degraded"
        refused = await house.ask(id=9, prompt="x").end()
        assert refused.code == "device_error"
        await house.service.close()
        assert house.service.resident() == ["one"], "what can't be trusted isn't touched"


async def test_more_requests_than_the_daemon_holds_are_refused(house: House) -> None:
    house.service._take(Settings(model=house.configuration.settings.model, queue=3))
    held = [house.ask(id=i, prompt="x", max_tokens=2) for i in range(3)]
    with pytest.raises(ServeError) as refused:
        house.ask(id=9, prompt="x")
    assert refused.value.code == "queue_full"
    assert isinstance(await house.submit(wire.Status(id=8)).end(), wire.StatusReport)
    for asked in held:
        await asked.end()
    assert isinstance(await house.ask(prompt="x", max_tokens=2).end(), wire.Done)


# -- the machine


class Supply:
    """The machine's power, as the test says."""

    def __init__(self, house: House, *, on_battery: bool) -> None:
        self._now = Condition(on_battery=on_battery)
        self._manners = house.service._manners
        self._manners._power = self

    def condition(self) -> Condition:
        return self._now

    async def change(self, *, on_battery: bool) -> None:
        """It changes, and the daemon looks."""
        self._now = Condition(on_battery=on_battery)
        self._manners._looked = -1e9
        await self._manners.look()


async def begun_and_resting(house: House, supply: Supply) -> tuple[Asked, list[int]]:
    """A background request that rests in the middle of its answer; and its whole answer."""
    whole = house.ask(id=1, prompt="the story in", max_tokens=300)
    await whole.end()
    asked = house.ask(id=2, prompt="the story in", max_tokens=300, priority="background")
    await asked.first(wire.Token)
    await supply.change(on_battery=True)
    (resident,) = house.service._residency.models.values()
    while resident.engine._work.is_set():
        await house.device.run(int)
    return asked, whole.ids


async def test_background_requests_that_run_rest_on_battery_and_go_on_to_the_same_answer(house: House) -> None:
    supply = Supply(house, on_battery=False)
    resting, whole = await begun_and_resting(house, supply)
    had = list(resting.ids)
    assert 0 < len(had) < len(whole)
    status = await house.submit(wire.Status(id=8)).end()
    assert (status.running, status.queued) == (1, 0)
    assert "background requests wait: the machine runs on battery" in status.notes
    await asyncio.gather(*(house.device.run(int) for _ in range(20)))
    assert resting.ids == had, "nothing is computed for it"
    assert isinstance(await house.ask(id=3, prompt="x", max_tokens=10).end(), wire.Done)
    assert len(had) < len(resting.ids) < len(whole), "steps that are made for others take it along"
    await supply.change(on_battery=False)
    assert (await resting.end()).reason == "length"
    assert resting.ids == whole
    await house.empty()


async def test_one_that_rests_can_be_cancelled_and_leaves_nothing(house: House) -> None:
    resting, _ = await begun_and_resting(house, Supply(house, on_battery=False))
    resting.job.cancel()
    assert (await resting.end()).reason == "cancelled"
    await house.empty()


async def test_a_draining_daemon_lets_what_rests_finish(house: House) -> None:
    resting, whole = await begun_and_resting(house, Supply(house, on_battery=False))
    await asyncio.wait_for(house.service.drain(), 60)
    assert resting.ids == whole


async def test_background_requests_wait_on_battery_and_others_do_not(house: House) -> None:
    supply = Supply(house, on_battery=True)
    waits = house.ask(id=1, prompt="x", max_tokens=3, priority="background")
    answered = house.ask(id=2, prompt="x", max_tokens=3)
    assert isinstance(await answered.end(), wire.Done)
    status = await house.submit(wire.Status(id=8)).end()
    assert "background requests wait: the machine runs on battery" in status.notes
    assert (status.running, status.queued) == (0, 1)
    assert not waits.over.is_set()
    await supply.change(on_battery=False)
    assert isinstance(await waits.end(), wire.Done)
    assert waits.ids == answered.ids


# -- how long a model stays


async def test_the_default_model_is_pinned_and_another_stays_while_there_is_room(house: House) -> None:
    for name in ("one", "two"):
        await house.ask(prompt="x", model=name, max_tokens=2).end()
    listed = (await house.submit(wire.Ps(id=2)).end()).models
    assert [(one.model, one.pinned, one.expires_s) for one in listed] == [("one", True, None), ("two", False, None)]


async def test_a_request_says_how_long_its_model_stays(house: House) -> None:
    await house.submit(wire.Load(id=1, model="two", keep_alive=100.0)).end()
    (listed,) = (await house.submit(wire.Ps(id=2)).end()).models
    assert 99 < listed.expires_s <= 100
    await house.ask(prompt="x", model="two", max_tokens=2, keep_alive=-1.0).end()
    (listed,) = (await house.submit(wire.Ps(id=2)).end()).models
    assert listed.pinned
    await house.ask(prompt="x", model="two", max_tokens=2, keep_alive=0.0).end()
    while house.service.resident():
        await house.service._residency.keeper.changed()


async def test_status_tells_what_the_models_take_and_may_take(house: House) -> None:
    await house.submit(wire.Load(id=1)).end()
    status = await house.submit(wire.Status(id=2)).end()
    assert status.memory_used == status.models[0].bytes
    assert status.memory_used < status.memory_limit
    assert status.footprint > status.memory_used
    house.service._take(Settings(model=house.configuration.settings.model, memory_limit=1000))
    refused = await house.ask(id=3, prompt="x", model="two").end()
    assert refused.code == "out_of_memory"
    status = await house.submit(wire.Status(id=4)).end()
    assert status.memory_limit == 500, "half of it is for the allocator's cache"
    house.service._take(Settings(model=house.configuration.settings.model))
    assert isinstance(await house.ask(id=5, prompt="x", model="two", max_tokens=2).end(), wire.Done)


async def test_the_text_of_waiting_prompts_is_bounded_and_let_go(house: House) -> None:
    settings = Settings(model=house.configuration.settings.model, prompts=50_000)
    house.service._take(settings)
    held = [house.ask(id=i, prompt="x" * 20_000) for i in range(2)]
    with pytest.raises(ServeError, match="prompts of open requests hold"):
        house.ask(id=9, prompt="x" * 20_000)
    for asked in held:
        assert (await asked.end()).code == "context_too_long"
    running = house.ask(id=1, prompt="the " * 80, max_tokens=200)
    await running.first(wire.Token)
    assert house.service._prompts.total < 80 * 3 * 40, "its text is gone"
    running.job.cancel()
    await running.end()
    await house.empty()
    assert house.service._prompts.total == 0


# -- starting and stopping


async def test_the_default_model_is_loaded_ahead_when_asked(store: Path) -> None:
    async with housed(store, warm=False) as house:
        house.service.warm(preload=True)
        while not house.service.resident():
            await asyncio.sleep(0)
        status = await house.submit(wire.Status(id=1)).end()
        assert status.device == "cpu (native)"


async def test_a_daemon_without_its_default_model_serves_others(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with housed(store, warm=False) as house:
        house.service._residency._default = str(tmp_path / "nothing")
        house.service.warm(preload=True)
        assert isinstance(await house.ask(prompt="x", model="two", max_tokens=2).end(), wire.Done)
        assert (await house.ask(prompt="x").end()).code == "unknown_model"
        assert [e.default for e in (await house.submit(wire.Models(id=3)).end()).models] == [False, False]
    assert "default model was not loaded" in caplog.text


async def test_draining_finishes_what_runs_and_refuses_what_comes(house: House) -> None:
    running = [house.ask(id=i, prompt="x", max_tokens=20) for i in range(3)]
    drain = asyncio.ensure_future(house.service.drain())
    await asyncio.sleep(0)
    with pytest.raises(ServeError) as refused:
        house.ask(id=9, prompt="x")
    assert refused.value.code == "shutting_down"
    assert (await house.submit(wire.Status(id=8)).end()).state == "draining"
    await drain
    assert [type(await asked.end()) for asked in running] == [wire.Done] * 3


async def test_draining_does_not_wait_for_a_load_that_no_request_asked_for(store: Path, gate: Gate) -> None:
    async with housed(store, warm=False) as house:
        house.service.warm(preload=True)
        await asyncio.to_thread(gate.started.wait)
        await house.service.drain()
        gate.go.set()
        await house.service.close()
        assert house.service.resident() == []


async def test_closing_fails_what_runs_once_and_frees_everything(store: Path) -> None:
    async with housed(store) as house:
        running = [house.ask(id=i, prompt="x", max_tokens=350, model=name) for i, name in enumerate(("one", "two"))]
        for asked in running:
            await asked.first(wire.Token)
        await house.service.close()
        assert [(await asked.end()).code for asked in running] == ["shutting_down"] * 2
        assert house.service.resident() == []
        assert "closed" in repr(house.device)


async def test_status_is_answered_at_once_whatever_the_device_does(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    held = house.device.submit(go.wait)
    monkeypatch.setattr(Device, "busy_s", property(lambda device: 75.0))
    status = await house.submit(wire.Status(id=1)).end()
    go.set()
    await held
    assert status.state == "degraded"
    assert "75 s" in status.notes[0]


async def test_settings_that_are_read_again_while_the_daemon_ends_are_not_put_into_force(house: House) -> None:
    """The device that would take them is gone."""
    await house.service.close()
    house.service.reload()
    assert house.configuration.loads == 0
