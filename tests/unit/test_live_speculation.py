"""Speculation through the service: what a request may say about it, what comes back, and that tokens stay the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from test_live import House, housed
from tiny_directory import make_tokenizer, write_model

from mlxbc import wire
from mlxbcd.residency import build as build_module

LENGTH = 60
LETTERS = {make_tokenizer().encode(letter).ids[0]: 60.0 for letter in "bcdfgklmopqrsuvw"}
"""Only letters are drawn, which no two of are one token, so that a text has the tokens it came from."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_model(data / "models" / "one", seed=0)
    return data


@pytest_asyncio.fixture
async def house(store: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    # A machine on which windows cost next to nothing: whatever is likely is verified.
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {1: 1e-9, 32: 1.1e-9})
    async with housed(store) as house:
        yield house


async def answer(house: House, **fields: object) -> tuple[list[int], str, wire.Usage]:
    asked = house.ask(**{"prompt": "the old lighthouse", "max_tokens": LENGTH, "logit_bias": LETTERS, **fields})
    done = await asked.end()
    assert isinstance(done, wire.Done), done
    return asked.ids, asked.text(), done.usage


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.2}])
async def test_a_text_to_echo_saves_forwards_and_changes_no_token(house: House, settings: dict[str, object]) -> None:
    plain, text, usage = await answer(house, draft="off", **settings)
    assert (usage.drafted, usage.forwards) == (0, usage.generated - 1)
    echoed, _, usage = await answer(house, draft="off", echo=["something else", text], **settings)
    assert echoed == plain
    assert usage.accepted > LENGTH / 3
    assert usage.drafted >= usage.accepted
    assert usage.forwards < usage.generated - usage.accepted + 1
    assert (await answer(house, draft="lookup", **settings))[0] == plain


async def test_what_an_answer_repeats_of_itself_is_guessed_by_default(house: House) -> None:
    (letter,) = make_tokenizer().encode("b").ids
    ids, _, usage = await answer(house, logit_bias={letter: 100.0})
    assert ids == [letter] * LENGTH
    assert usage.accepted > LENGTH / 2
    assert usage.forwards < LENGTH / 2


async def test_several_outputs_count_together(house: House) -> None:
    _, text, _ = await answer(house, draft="off")
    ids, _, usage = await answer(house, echo=[text], n=2, resumable=False)
    assert not ids
    assert usage.generated == 2 * LENGTH
    assert usage.accepted > LENGTH / 3


async def test_the_figures_of_a_request_come_with_explain_and_the_status_sums_them_up(house: House) -> None:
    _, text, _ = await answer(house, draft="off")
    done = await house.ask(
        prompt="the old lighthouse", max_tokens=LENGTH, logit_bias=LETTERS, draft="off", echo=[text], explain=True
    ).end()
    figures = done.speculation
    assert (figures.drafts.drafted, figures.echo.drafted) == (0, done.usage.drafted)
    assert figures.echo.accepted == sum(figures.echo.accepted_at) == done.usage.accepted
    assert sum(int(right) * rounds for right, rounds in figures.echo.lengths.items()) == figures.echo.accepted
    assert figures.forwards + figures.forwards_saved == LENGTH - 1
    assert figures.verify_ms > 0
    status = await house.submit(wire.Status(id=2)).end()
    assert (status.drafted_tokens, status.accepted_tokens) == (done.usage.drafted, done.usage.accepted)


async def test_a_trace_tells_each_round_and_what_came_of_it(house: House) -> None:
    (letter,) = make_tokenizer().encode("b").ids
    tracing = house.submit(wire.Trace(id=7))
    _, _, usage = await answer(house, logit_bias={letter: 100.0})
    # The answer is over before its last forward is told.
    await house.empty()
    tracing.job.cancel()
    await tracing.end()
    spans = [span for batch in tracing.of(wire.Spans) for span in batch.spans]
    rounds = [span.facts for span in spans if span.name == "round"]
    assert rounds
    assert all(facts["rows"] == 1 and facts["width"] == 1 + facts["drafted"] for facts in rounds)
    assert sum(facts["drafted"] for facts in rounds) == usage.drafted
    assert sum(facts["accepted"] for facts in rounds) == usage.accepted
    (request,) = (span.facts for span in spans if span.name == "request")
    told = {name: request[name] for name in ("forwards", "drafted", "accepted")}
    assert told == {"forwards": usage.forwards, "drafted": usage.drafted, "accepted": usage.accepted}


async def test_an_unknown_drafter_is_refused_by_name(house: House) -> None:
    error = await house.ask(prompt="x", draft="oracle").end()
    assert error.code == "bad_request"
    assert error.message == "this model has no such drafter as 'oracle', only lookup; draft auto takes what there is"


async def test_a_plan_tells_how_a_model_gets_the_drafter_that_it_lacks(house: House) -> None:
    explained = await house.submit(wire.Explain(id=7, prompt="x", draft="model")).end()
    assert explained.plan.mechanism == "unsupported"
    assert explained.plan.reason == (
        "this model has no such drafter as 'model', only lookup; draft auto takes what there is, "
        "and a line in the table [drafts] of the settings gives it a draft model"
    )


@pytest.mark.parametrize(
    ("fields", "on", "off"),
    [
        ({}, {"drafts"}, {"echo": "the request doesn't ask for it"}),
        ({"draft": "off"}, set(), {"drafts": "the request turned it off"}),
        ({"draft": "off", "echo": ["x"]}, {"echo"}, {"drafts": "the request turned it off"}),
        ({"draft": "lookup", "echo": ["x"]}, {"echo", "drafts"}, {}),
        ({"draft": "oracle"}, set(), {}),
        ({"logprobs": True}, set(), {"drafts": "not proven beside logprobs"}),
    ],
)
async def test_explain_tells_what_is_guessed_and_why_not(
    house: House, fields: dict[str, object], on: set[str], off: dict[str, str]
) -> None:
    explained = await house.submit(wire.Explain(id=1, prompt="x", **fields)).end()
    assert isinstance(explained, wire.Explained)
    plan = explained.plan
    assert set(plan.on) & {"drafts", "echo"} == on
    assert off.items() <= plan.off.items()
    assert plan.method == ("speculative" if on else "autoregressive") or plan.reason


async def test_the_empty_text_is_no_text_to_echo(house: House) -> None:
    with pytest.raises(Exception, match="length >= 1"):
        wire_echo([""])


def wire_echo(texts: list[str]) -> wire.Generate:
    from mlxbc import request

    return request.build(wire.Generate, 1, prompt="x", echo=texts)


async def test_what_was_measured_at_a_load_is_not_measured_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def curve(*model: object) -> dict[int, float]:
        tried.append(model)
        return {1: 0.5, 32: 0.75}

    monkeypatch.setattr(build_module, "verify_curve", curve)
    write_model(tmp_path / "models" / "one", seed=0)
    for _ in range(2):
        async with housed(tmp_path) as house:
            await answer(house)
            (resident,) = house.service._residency.models.values()
            assert resident.built.verify is not None
            assert resident.built.verify.curve == {1: 0.5, 32: 0.75}
    assert len(tried) == 1
