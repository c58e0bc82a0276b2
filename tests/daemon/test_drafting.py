"""A real daemon whose model is drafted for: the default model drafts for itself, so every guess is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_daemon import Daemon, ask, daemon, socket_path, tokens

from mlxbc import RequestFailed, wire

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

STORY = "Once upon a time there was"
LENGTH = 20


@pytest.fixture(scope="module")
def serving(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    file = tmp_path_factory.mktemp("settings") / "config.toml"
    named = json.dumps(str(model_directory))
    file.write_text(f"[drafts]\n{named} = {named}\n")
    with socket_path() as path, daemon(path, model_directory, "--config", str(file)) as serving:
        yield serving


def test_drafts_save_forwards_and_change_no_token(serving: Daemon) -> None:
    drafted = 0
    with serving.client() as client:
        for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            asked = {"prompt": STORY, "max_tokens": LENGTH, "resumable": True, **settings}
            guessed = client.generate(**asked, draft="model").wait()
            plain = client.generate(**asked, draft="off").wait()
            assert guessed.ids == plain.ids
            assert (plain.usage.drafted, plain.usage.forwards) == (0, LENGTH - 1)
            assert guessed.usage.accepted == guessed.usage.drafted, "a model knows what it would say itself"
            assert guessed.usage.forwards == LENGTH - 1 - guessed.usage.accepted
            drafted += guessed.usage.drafted
    # One as large as its target doesn't pay for itself, which is known once it has been tried.
    assert drafted > 0


def test_rows_that_are_drafted_for_join_rows_that_are_not(serving: Daemon) -> None:
    asked = {"prompt": STORY, "temperature": 0.0}
    with serving.frames() as frames:
        frames.say(*(ask(n, asked, max_tokens=8 + 4 * n, draft=("model", "off")[n % 2]) for n in range(4)))
        journal: list[wire.Reply] = []
        while sum(isinstance(frame, wire.Done) for frame in journal) < 4:
            frame = frames.read()
            assert frame is not None
            journal.append(frame)
    longest = tokens(journal, 3)
    assert len(longest) == 20
    assert [tokens(journal, n) for n in range(4)] == [longest[: 8 + 4 * n] for n in range(4)]


def test_the_daemon_tells_who_drafts(serving: Daemon, model_directory: Path) -> None:
    with serving.client() as client:
        (process,) = client.ps()
        explained = client.explain(prompt=STORY)
        with pytest.raises(RequestFailed, match="no such drafter"):
            client.generate(STORY, draft="mtp").wait()
    assert process.draft == str(model_directory)
    assert process.bytes > 2 * (model_directory / "model.safetensors").stat().st_size
    assert explained.plan.drafters == ["lookup", "model"]
