"""A draft model in the daemon that goes on where it was: in the next turn, and after a restart."""

from __future__ import annotations

import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from test_live_cache import LETTERS, House, housed, words
from tiny_directory import make_tokenizer, write_model

from mlxbc import wire
from mlxbcd.residency import build as build_module
from mlxbcd.spec.depth import MOST_DRAFTED

BIAS = {make_tokenizer().token_to_id(letter): 100.0 for letter in LETTERS}
"""Only letters are drawn, so that no answer ends early and its text has the tokens it was made of."""
ROUNDS = 3
LENGTH = 1 + ROUNDS * (MOST_DRAFTED + 1)
"""Tokens of an answer: one of the prompt's forward, and those of three rounds that are drafted in full."""
PROMPT = words(1, 280)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "one", seed=0)
    write_model(root / "twin", seed=0)
    return root


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has measured what verifying costs: every draft is as deep as may be."""
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {})


def drafting(models: Path, directory: Path) -> AbstractAsyncContextManager[House]:
    return housed(directory, drafts={str(models / "one"): str(models / "twin")})


async def answer(house: House, models: Path, prompt: str, **fields: object) -> tuple[str, wire.Usage]:
    wanted = {"prompt": prompt, "max_tokens": LENGTH, "logit_bias": BIAS, "draft": "model"} | fields
    asked = house.generate(models / "one", **wanted)
    done = await asked.end()
    assert isinstance(done, wire.Done), done
    return asked.text(), done.usage


async def known(house: House, models: Path) -> None:
    """Load the model, and wait until its part of the cache is known."""
    await answer(house, models, "xyz")
    (model,) = house.service._caches._models.values()
    await model.space


async def test_every_later_turn_is_drafted_for_from_its_first_round_on(models: Path, tmp_path: Path) -> None:
    async with drafting(models, tmp_path) as house:
        await known(house, models)
        drawn, usage = await answer(house, models, PROMPT)
        assert usage.forwards > ROUNDS, "the draft model has read the prompt first"
        text = PROMPT + drawn + "gk"
        plain, _ = await answer(house, models, text, draft="off", cache="none")
        second, usage = await answer(house, models, text)
        assert (second, usage.forwards) == (plain, ROUNDS)
        await house.settled()
    text += second + "v"
    async with drafting(models, tmp_path) as house:
        await known(house, models)
        plain, _ = await answer(house, models, text, draft="off", cache="none")
        third, usage = await answer(house, models, text)
        assert usage.cached > len(PROMPT)
        assert (third, usage.forwards) == (plain, ROUNDS), "from the disk"


async def test_a_draft_model_with_other_contents_begins_anew(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    async with drafting(tmp_path, tmp_path / "cache") as house:
        await known(house, tmp_path)
        drawn, _ = await answer(house, tmp_path, PROMPT)
        await house.settled()
    write_model(tmp_path / "twin", seed=1)
    async with drafting(tmp_path, tmp_path / "cache") as house:
        await known(house, tmp_path)
        (resident,) = house.service._residency.models.values()
        space = resident.built.executor.reuse.space
        assert space is not None
        assert space.companions is not None
        text = make_tokenizer().encode(PROMPT + drawn).ids
        assert space.explain(text).disk > len(PROMPT)
        assert space.companions.explain(text).disk == 0
