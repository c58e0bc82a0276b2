"""The service with its prefix cache: chats that go on, restarts, models that change, and everything that opts out.

Windows and recurrent state can't be cut back, so their chats live off the lengths at which states were kept.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from test_live import Asked
from tiny import LLAMA, make_model
from tiny_directory import VOCABULARY, make_tokenizer, write_json, write_text

from mlxbc import wire
from mlxbcd.cache.disk import Directory
from mlxbcd.cache.files import SUFFIX
from mlxbcd.config.settings import Settings
from mlxbcd.config.sources import fixed
from mlxbcd.device import Device
from mlxbcd.errors import ServeError
from mlxbcd.model.blas import BlasReport
from mlxbcd.residency import build as build_module
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.live import LiveService

ZOO: Final = json.loads((Path(__file__).parents[1] / "oracle" / "zoo" / "configs.json").read_text(encoding="utf-8"))
CONTEXT: Final = 4000
SHAPE: Final = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "full": LLAMA | SHAPE | {"tie_word_embeddings": False},
    "window": ZOO["gemma3_text"] | SHAPE,
    "hybrid": ZOO["qwen3_5"] | SHAPE,
}
KINDS = pytest.mark.parametrize("kind", list(MODELS))
STRIPPING: Final = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content.split('</think>')[-1] }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking %}<think>{% endif %}"
)
"""Earlier reasoning goes, and the answer begins inside it."""
LETTERS: Final = "bcdfgjklmpqvwxyz"
"""No two of them are one token, so that a text made of them has the tokens it was made of."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of each kind."""
    root = tmp_path_factory.mktemp("models")
    for kind, config in MODELS.items():
        write_text(root / kind)
        write_json(root / kind / "config.json", config)
        tokens = json.loads((root / kind / "tokenizer_config.json").read_text())
        write_json(root / kind / "tokenizer_config.json", tokens | {"chat_template": STRIPPING})
        parameters = dict(tree_flatten(make_model(config).parameters()))
        mx.save_safetensors(str(root / kind / "model.safetensors"), parameters)
    return root


@pytest.fixture
def letters() -> dict[int, float]:
    """A bias after which a model says letters alone."""
    backend = make_tokenizer()
    return {backend.token_to_id(letter): 100.0 for letter in LETTERS}


class House:
    """A service that keeps its cache in a directory."""

    def __init__(self, directory: Path | None, **settings: Any) -> None:
        device = Device()
        device.start()
        if directory is None:
            settings["cache_disk"] = 0
        chosen = Settings(**{"cache_directory": directory, "cache_free": 1} | settings)
        self.device = device
        self.service = LiveService(device, Configuration(fixed(chosen)), pytest.fail, BlasReport("native", "its own"))
        self.service.warm(preload=False)

    def submit(self, request: Any) -> Asked:
        return Asked(self.service, request)

    def generate(self, model: Path, **fields: Any) -> Asked:
        return self.submit(
            wire.Generate(**{"id": 1, "model": str(model), "temperature": 0.0, "resumable": True} | fields)
        )

    async def report(self) -> wire.CacheReport:
        report = await self.submit(wire.Cache(id=2)).end()
        assert isinstance(report, wire.CacheReport)
        return report

    async def settled(self) -> wire.CacheReport:
        """Wait until nothing runs and everything is written."""
        for resident in self.service._residency.models.values():
            while resident.engine._work.is_set() or resident.engine.report.running:
                await self.device.run(int)
        while (report := await self.report()).pending:
            await asyncio.sleep(0.005)
        return report


@asynccontextmanager
async def housed(directory: Path | None, **settings: Any) -> AsyncIterator[House]:
    house = House(directory, **settings)
    try:
        yield house
    finally:
        await house.service.close()
        cache = house.service._caches.cache
        assert cache is None or cache.leases == 0


def words(seed: int, n: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(LETTERS) for _ in range(n))


class Chat:
    """A chat with one model, whose history grows by what it says."""

    def __init__(self, house: House, model: Path, seed: int, **fields: Any) -> None:
        self.house = house
        self.model = model
        self.seed = seed
        self.fields = fields
        self.messages: list[wire.Message] = []
        self.sequence: list[int] = []

    async def turn(self, said: int, answer: int = 30) -> tuple[int, int]:
        """Say so many letters. Tokens of the last turn that this one's prompt begins with, and those it reused."""
        self.seed += 1
        self.messages.append(wire.Message(role="user", content=words(self.seed, said)))
        prompt = await self._tokens()
        asked = self.house.generate(self.model, messages=self.messages, max_tokens=answer, **self.fields)
        done = await asked.end()
        assert isinstance(done, wire.Done), done
        assert done.usage.prompt == len(prompt)
        again = common(self.sequence, prompt)
        self.sequence = prompt + asked.ids
        reasoning = asked.text("reasoning")
        content = (f"<think>{reasoning}</think>" if reasoning else "") + asked.text()
        self.messages.append(wire.Message(role="assistant", content=content))
        await self.house.settled()
        return again, done.usage.cached

    async def _tokens(self) -> list[int]:
        fields = {"template_options": self.fields.get("template_options", {})}
        reply = await self.house.submit(
            wire.Tokenize(id=3, messages=self.messages, model=str(self.model), **fields)
        ).end()
        assert isinstance(reply, wire.Tokens)
        return reply.tokens


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- chats


@KINDS
@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "stripped"])
async def test_each_turn_reuses_what_it_has_of_the_last_one(
    kind: str, thinking: bool, models: Path, letters: dict[int, float], tmp_path: Path
) -> None:
    options = {"template_options": {"enable_thinking": True}} if thinking else {}
    async with housed(tmp_path) as house:
        chat = Chat(house, models / kind, 0, logit_bias=letters, **options)
        assert await chat.turn(300) == (0, 0)
        for _ in range(3):
            again, cached = await chat.turn(40)
            assert again > 300
            assert cached >= 0.95 * again, f"{cached} of {again}"
        assert (await house.report()).hits == 3


@KINDS
async def test_two_chats_that_alternate_keep_both_their_hits(
    kind: str, models: Path, letters: dict[int, float], tmp_path: Path
) -> None:
    async with housed(tmp_path) as house:
        chats = [Chat(house, models / kind, seed, logit_bias=letters, session=f"{seed}") for seed in (100, 200)]
        for chat in chats:
            await chat.turn(300)
        for _ in range(5):
            for chat in chats:
                again, cached = await chat.turn(20)
                assert cached >= 0.95 * again


@KINDS
async def test_a_chat_goes_on_after_a_restart(
    kind: str, models: Path, letters: dict[int, float], tmp_path: Path
) -> None:
    async with housed(tmp_path) as house:
        chat = Chat(house, models / kind, 7, logit_bias=letters)
        await chat.turn(300)
    async with housed(tmp_path) as house:
        chat.house = house
        again, cached = await chat.turn(20)
        assert cached >= 0.95 * again
        assert (await house.report()).from_disk == cached


@KINDS
async def test_what_is_restored_says_the_same(kind: str, models: Path, tmp_path: Path) -> None:
    prompt = words(8, 400)
    async with housed(tmp_path) as house:
        first = house.generate(models / kind, prompt=prompt, max_tokens=20)
        await first.end()
        again = house.generate(models / kind, prompt=prompt, max_tokens=20)
        assert (await again.end()).usage.cached == 400 - 1
        assert again.ids == first.ids
        await house.settled()
    async with housed(tmp_path) as house:
        later = house.generate(models / kind, prompt=prompt, max_tokens=20)
        assert (await later.end()).usage.cached == 400 - 1
        assert later.ids == first.ids


async def test_a_long_system_prompt_serves_other_chats_of_models_that_cannot_be_cut(
    models: Path, tmp_path: Path
) -> None:
    system = wire.Message(role="system", content=words(9, 600))
    async with housed(tmp_path) as house:
        for i, said in enumerate(("bcd", "fgj")):
            messages = [system, wire.Message(role="user", content=said)]
            done = await house.generate(models / "hybrid", messages=messages, max_tokens=4).end()
            assert done.usage.cached >= 600 * i
            await house.settled()


async def test_a_prompt_that_branches_twice_finds_the_branch(models: Path, tmp_path: Path) -> None:
    """The second one tells where texts part; from there on the state is kept, and the third one finds it."""
    start = words(10, 500)
    async with housed(tmp_path) as house:
        cached = []
        for end in ("b" * 100, "c" * 100, "d" * 100):
            done = await house.generate(models / "window", prompt=start + end, max_tokens=2).end()
            cached.append(done.usage.cached)
            await house.settled()
        assert cached == [0, 0, 500]


async def test_eight_at_once_share_one_prefill_of_what_they_begin_with(models: Path, tmp_path: Path) -> None:
    start = words(11, 600)
    async with housed(tmp_path) as house:
        asked = [
            house.generate(models / "full", id=i, prompt=start + letter, max_tokens=4)
            for i, letter in enumerate(LETTERS[:8])
        ]
        cached = [(await one.end()).usage.cached for one in asked]
        assert sorted(cached)[1:] == [600] * 7


@KINDS
@pytest.mark.parametrize("stop", [None, "bcdf"])
async def test_states_of_answers_that_were_guessed_ahead_are_those_of_their_text(
    kind: str,
    stop: str | None,
    models: Path,
    letters: dict[int, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guesses that were wrong have been in the state; nothing of them may be in what the next turn finds there."""
    # Windows of guesses cost next to nothing, so whatever is likely is verified.
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {1: 1e-9, 32: 1.1e-9})
    prompt = words(30, 300)
    fields: dict[str, Any] = {"logit_bias": letters, "max_tokens": 60, "temperature": 0.9, "seed": 3}
    async with housed(None, cache_ram=0) as house:
        plain = house.generate(models / kind, prompt=prompt, draft="off", **fields)
        await plain.end()
        text = plain.text()
        following = prompt + text[:50] + "bb"
        alone = house.generate(models / kind, prompt=following, draft="off", **fields)
        await alone.end()
        guess = "".join(letter if i % 7 else "b" for i, letter in enumerate(text))
    async with housed(tmp_path) as house:
        ends = {"stop": [text[44:50]]} if stop else {"max_tokens": 50}
        guessed = house.generate(models / kind, prompt=prompt, echo=[guess], **{**fields, **ends})
        done = await guessed.end()
        assert guessed.text() == text[:44] if stop else guessed.ids == plain.ids[:50]
        assert done.usage.drafted > done.usage.accepted > 0
        await house.settled()
        after = house.generate(models / kind, prompt=following, **fields)
        cached = (await after.end()).usage.cached
        # Where the state can't be cut, it is kept only if nothing has been read beyond what was delivered.
        assert cached == 349 or (cached == 299 and stop is not None and kind != "full")
        assert after.ids == alone.ids


# -- priming


@KINDS
async def test_a_primed_prompt_starts_at_once(kind: str, models: Path, tmp_path: Path) -> None:
    messages = [wire.Message(role="user", content=words(12, 300))]
    async with housed(tmp_path) as house:
        primed = await house.submit(wire.Prime(id=4, messages=messages, model=str(models / kind))).end()
        assert isinstance(primed, wire.Primed)
        assert (primed.usage.generated, primed.usage.cached, primed.model) == (0, 0, str(models / kind))
        done = await house.generate(models / kind, messages=messages, max_tokens=2).end()
        assert done.usage.cached == done.usage.prompt - 1 == primed.usage.prompt - 1


async def test_priming_is_refused_where_nothing_would_come_of_it(models: Path, tmp_path: Path) -> None:
    async with housed(None, cache_mode="none") as house:
        with pytest.raises(ServeError, match="no prefix cache"):
            house.submit(wire.Prime(id=4, prompt="x"))
    async with housed(None, cache_ram=0) as house:
        with pytest.raises(ServeError, match="no prefix cache"):
            house.submit(wire.Prime(id=4, prompt="x", cache="ram"))
        with pytest.raises(ServeError, match="exactly one"):
            house.submit(wire.Prime(id=4))


async def test_priming_ends_with_an_error_when_it_is_cancelled(models: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        asked = house.submit(wire.Prime(id=4, prompt=words(13, 3000), model=str(models / "full")))
        asked.job.cancel("superseded")
        error = await asked.end()
        assert isinstance(error, wire.Error)
        assert "newer request" in error.message


# -- opting out


@pytest.mark.parametrize("mode", ["none", "ram", "disk"])
@pytest.mark.parametrize("by", ["request", "setting"])
async def test_a_request_is_kept_where_it_may_be(mode: str, by: str, models: Path, tmp_path: Path) -> None:
    settings = {"cache_mode": mode} if by == "setting" else {}
    fields = {"cache": mode} if by == "request" else {}
    async with housed(tmp_path, **settings) as house:
        for _ in range(2):
            done = await house.generate(models / "full", prompt=words(14, 300), max_tokens=2, **fields).end()
        report = await house.settled()
        assert done.usage.cached == (0 if mode == "none" else 299)
        assert (report.ram_entries > 0, report.disk_entries > 0) == (mode != "none", mode == "disk")
        assert bool(list((tmp_path / "states").glob(f"*{SUFFIX}"))) == (mode == "disk")
        assert report.lookups == (0 if mode == "none" else 2)


async def test_without_a_disk_there_is_ram_and_without_ram_nothing(models: Path) -> None:
    async with housed(None) as house:
        for cached in (0, 299):
            done = await house.generate(models / "full", prompt=words(15, 300), max_tokens=2).end()
            assert done.usage.cached == cached
        assert (await house.report()).disk_limit == 0
    async with housed(None, cache_ram=0) as house:
        for _ in range(2):
            done = await house.generate(models / "full", prompt=words(15, 300), max_tokens=2, explain=True).end()
            assert done.usage.cached == 0
        assert done.plan.off["prefix cache"]
        assert (await house.report()).mode == "none"


# -- what changes


async def test_other_weights_under_the_same_name_find_nothing(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(models / "full", tmp_path / "model")
    prompt = words(16, 300)
    async with housed(tmp_path / "cache") as house:
        await house.generate(model, prompt=prompt, max_tokens=2).end()
        await house.settled()
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    async with housed(tmp_path / "cache") as house:
        assert (await house.generate(model, prompt=prompt, max_tokens=2).end()).usage.cached == 0
        await house.settled()
        assert (await house.generate(model, prompt=prompt, max_tokens=2).end()).usage.cached == 299
    data[-1] ^= 1
    weights.write_bytes(data)
    async with housed(tmp_path / "cache") as house:
        assert (await house.generate(model, prompt=prompt, max_tokens=2).end()).usage.cached == 299, (
            "the first ones again"
        )


async def test_two_models_never_share(models: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        said = {}
        for turn in range(2):
            for kind in MODELS:
                asked = house.generate(models / kind, prompt=words(17, 300), max_tokens=6)
                assert (await asked.end()).usage.cached == (299 if turn else 0)
                said.setdefault(kind, asked.ids)
                assert asked.ids == said[kind]


async def test_a_damaged_file_is_never_served(models: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        first = house.generate(models / "full", prompt=words(18, 700), max_tokens=8)
        await first.end()
        await house.settled()
    files = sorted((tmp_path / "states").glob(f"*{SUFFIX}"))
    assert len(files) == 3
    for path in files:
        data = bytearray(path.read_bytes())
        data[-70] ^= 1
        path.write_bytes(data)
    async with housed(tmp_path) as house:
        again = house.generate(models / "full", prompt=words(18, 700), max_tokens=8)
        assert (await again.end()).usage.cached == 0
        assert again.ids == first.ids


async def test_clearing_forgets_everything(models: Path, tmp_path: Path) -> None:
    async with housed(tmp_path) as house:
        prompt = words(19, 300)
        await house.generate(models / "full", prompt=prompt, max_tokens=2).end()
        assert (await house.settled()).disk_entries
        cleared = await house.submit(wire.CacheClear(id=5)).end()
        assert isinstance(cleared, wire.CacheCleared)
        assert cleared.bytes > 0
        report = await house.report()
        assert (report.ram_bytes, report.disk_bytes) == (0, 0)
        assert list((tmp_path / "states").glob(f"*{SUFFIX}")) == []
        assert (await house.generate(models / "full", prompt=prompt, max_tokens=2).end()).usage.cached == 0


async def test_explain_tells_what_would_be_reused_and_why_not_more(models: Path, tmp_path: Path) -> None:
    prompt = words(20, 600)
    async with housed(tmp_path) as house:
        for kind, disk, why in (("full", 500, "diverges"), ("window", 0, "untrimmable")):
            await house.generate(models / kind, prompt=prompt, max_tokens=2).end()
            await house.settled()
            explained = await house.submit(
                wire.Explain(id=6, prompt=prompt[:500] + "b" * 50, model=str(models / kind))
            ).end()
            assert isinstance(explained, wire.Explained)
            assert explained.cached == wire.Cached(ram=disk, disk=disk, matched=500, why=why)
            assert "prefix cache" in explained.plan.on


# -- crowds and ends


@pytest.mark.parametrize("prompts", [60, pytest.param(200, marks=pytest.mark.slow)])
async def test_prompts_with_disconnects_stay_within_bounds(prompts: int, models: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    ram, disk = 3_000_000, 4_000_000
    async with housed(tmp_path, cache_ram=ram, cache_disk=disk) as house:
        running: list[Asked] = []
        for i in range(prompts):
            kind = rng.choice(list(MODELS))
            prompt = words(rng.randrange(30), 260) + words(1000 + i, rng.randrange(80))
            asked = house.generate(models / kind, id=i, prompt=prompt, max_tokens=rng.randrange(1, 12))
            running.append(asked)
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            if len(running) > 6:
                leaver = running.pop(rng.randrange(len(running)))
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0.0005 * rng.randrange(2))
                if rng.random() < 0.6:
                    leaver.job.cancel(rng.choice(["cancelled", "superseded", "disconnected"]))
                await leaver.end()
            report = await house.report()
            assert report.ram_bytes <= ram
            assert report.disk_bytes <= disk
        for asked in running:
            await asked.end()
        report = await house.settled()
        assert report.leases == 0
        assert report.hits > 0
        assert report.evicted > 0
        held = sum(path.stat().st_size for path in (tmp_path / "states").glob(f"*{SUFFIX}"))
        assert held == report.disk_bytes <= disk


async def test_a_request_cancelled_while_its_state_is_read_lets_it_go(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(21, 600)
    async with housed(tmp_path) as house:
        await house.generate(models / "full", prompt=prompt, max_tokens=2).end()
        await house.settled()
    async with housed(tmp_path) as house:
        cache = house.service._caches.cache
        assert cache is not None
        assert cache.tier is not None
        reading, go_on = asyncio.Event(), threading.Event()
        loop, load = asyncio.get_running_loop(), cache.tier.load

        def slow(node: Any) -> Any:
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(30)
            return load(node)

        monkeypatch.setattr(cache.tier, "load", slow)
        asked = house.generate(models / "full", prompt=prompt, max_tokens=2)
        await reading.wait()
        asked.job.cancel()
        assert (await asked.end()).reason == "cancelled"
        go_on.set()
        while cache.leases:
            await asyncio.sleep(0.001)


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """A directory that another daemon uses."""
    directory = Directory(tmp_path / "states")
    yield tmp_path
    directory.close()


async def test_a_directory_in_use_leaves_ram_and_a_note(models: Path, taken: Path) -> None:
    async with housed(taken) as house:
        for cached in (0, 299):
            done = await house.generate(models / "full", prompt=words(22, 300), max_tokens=2).end()
            assert done.usage.cached == cached
        status = await house.submit(wire.Status(id=7)).end()
        assert any("another daemon uses" in note for note in status.notes)
        assert "another daemon" in (await house.report()).trouble
