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


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "seeded"])
def test_drafts_save_forwards_and_change_no_token(serving: Daemon, settings: dict[str, float]) -> None:
    with serving.client() as client:
        asked = {"prompt": STORY, "max_tokens": LENGTH, "resumable": True, **settings}
        plain = client.generate(**asked, draft="off").wait()
        drafted = client.generate(**asked, draft="model", explain=True).wait()
    assert drafted.ids == plain.ids
    assert (plain.usage.drafted, plain.usage.forwards) == (0, LENGTH - 1)
    # A draft as large as its target never pays for itself. It is tried now and then all the same, and always right.
    assert drafted.usage.accepted == drafted.usage.drafted > 0
    assert drafted.usage.forwards == LENGTH - 1 - drafted.usage.accepted


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
