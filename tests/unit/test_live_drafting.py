"""A draft model in the daemon: settings name it, it is loaded with its model and counted, and tokens stay the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from test_live import House, housed
from tiny_directory import make_tokenizer, write_model

from mlxbc import wire
from mlxbcd.residency import build as build_module
from mlxbcd.spec.depth import MOST_DRAFTED

LETTERS = {make_tokenizer().encode(letter).ids[0]: 60.0 for letter in "bcdfgklmopqrsuvw"}
"""Only letters are drawn, so that no answer ends early."""
LENGTH = 1 + 3 * (MOST_DRAFTED + 1)
"""Tokens of an answer: one of the prompt's forward, and those of three rounds."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_model(data / "models" / "one", seed=0)
    write_model(data / "models" / "twin", seed=0)
    write_model(data / "models" / "other", seed=1)
    strange = write_model(data / "models" / "strange", seed=0)
    text = json.loads((strange / "tokenizer.json").read_text())
    swapped = text["model"]["vocab"]
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    (strange / "tokenizer.json").write_text(json.dumps(text))
    return data


def drafted_by(store: Path, draft: str) -> dict[str, str]:
    """The setting by which a model of the store drafts for the one that is asked."""
    return {str(store / "models" / "one"): str(store / "models" / draft)}


@pytest_asyncio.fixture
async def house(store: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    # Nobody has measured what verifying costs: every draft is as deep as may be.
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {})
    async with housed(store, drafts=drafted_by(store, "twin")) as house:
        yield house


async def answer(house: House, **fields: object) -> tuple[list[int], wire.Usage]:
    asked = house.ask(prompt="the old lighthouse", max_tokens=LENGTH, logit_bias=LETTERS, **fields)
    done = await asked.end()
    assert isinstance(done, wire.Done), done
    return asked.ids, done.usage


async def test_a_model_that_drafts_for_one_of_the_same_weights_is_always_right(house: House) -> None:
    plain, usage = await answer(house, draft="off")
    assert (usage.drafted, usage.forwards) == (0, LENGTH - 1)
    drafted, usage = await answer(house, draft="model")
    assert drafted == plain
    assert (usage.drafted, usage.accepted, usage.forwards) == (3 * MOST_DRAFTED, 3 * MOST_DRAFTED, 3)
    status = await house.submit(wire.Status(id=2)).end()
    assert (status.drafted_tokens, status.accepted_tokens) == (usage.drafted, usage.accepted)
    await house.empty()


async def test_by_default_the_model_is_drafted_for_and_lookup_alone_leaves_it_idle(house: House) -> None:
    plain, _ = await answer(house, draft="off", temperature=0.9, seed=3)
    drafted, usage = await answer(house, temperature=0.9, seed=3)
    assert drafted == plain
    assert usage.accepted > MOST_DRAFTED
    looked_up, usage = await answer(house, draft="lookup", temperature=0.9, seed=3)
    assert looked_up == plain
    assert usage.drafted < MOST_DRAFTED


async def test_ps_and_explain_tell_of_it_and_its_bytes_are_counted(house: House, store: Path) -> None:
    await answer(house)
    (process,) = (await house.submit(wire.Ps(id=2)).end()).models
    assert process.draft == "twin"
    budget = house.service._residency.budget
    async with housed(store) as without:
        await answer(without)
        (alone,) = (await without.submit(wire.Ps(id=2)).end()).models
        assert (alone.draft, process.bytes) == ("", 2 * alone.bytes)
        assert budget.held(store / "models" / "one", "weights") == process.bytes
    explained = await house.submit(wire.Explain(id=3, prompt="x")).end()
    assert explained.plan.drafters == ["lookup", "model"]
    named = await house.submit(wire.Explain(id=4, prompt="x", draft="model")).end()
    assert named.plan.drafters == ["model"]
    off = await house.submit(wire.Explain(id=5, prompt="x", draft="off")).end()
    assert off.plan.drafters == []


async def test_what_a_row_may_come_to_need_includes_its_draft(house: House, store: Path) -> None:
    def token_bytes(house: House) -> float:
        (resident,) = house.service._residency.models.values()
        return resident.engine._token_bytes

    await answer(house)
    async with housed(store) as without:
        await answer(without)
        assert token_bytes(house) == 2 * token_bytes(without) > 0


async def test_one_of_other_weights_changes_no_token(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {})
    async with housed(store, drafts=drafted_by(store, "other")) as house:
        plain, _ = await answer(house, draft="off")
        drafted, usage = await answer(house, draft="model")
        assert drafted == plain
        assert usage.accepted < usage.drafted


@pytest.mark.parametrize(
    ("draft", "code", "said"),
    [
        ("strange", "load_failed", "their tokenizers differ"),
        ("missing", "unknown_model", "models/missing' draft for one, but"),
    ],
)
async def test_one_that_does_not_fit_is_refused_with_what_to_do(store: Path, draft: str, code: str, said: str) -> None:
    async with housed(store, drafts=drafted_by(store, draft)) as house:
        error = await house.ask(prompt="x").end()
        assert isinstance(error, wire.Error)
        assert error.code == code
        assert said in error.message


async def test_an_entry_for_a_model_that_is_not_here_is_nobodys(store: Path) -> None:
    async with housed(store, drafts={"org/gone": "org/small"}) as house:
        await answer(house)
        (process,) = (await house.submit(wire.Ps(id=2)).end()).models
        assert process.draft == ""
