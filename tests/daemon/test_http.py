"""OpenAI's client, the HTTP endpoint and a daemon with the default model: what comes out is what the daemon says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from real_daemon import Daemon

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from http_endpoint import TOKEN, Endpoint

from mlxbc.llm_plugin.models import Mlxbc

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def asking(shared: Daemon) -> Iterator[openai.OpenAI]:
    with (
        Endpoint(shared.path) as endpoint,
        openai.OpenAI(base_url=endpoint.url, api_key=TOKEN, max_retries=0, timeout=60) as client,
    ):
        yield client


def test_whole_and_streamed_it_is_the_daemons_own_answer(shared: Daemon, asking: openai.OpenAI) -> None:
    with shared.client() as client:
        expected = client.generate(messages=QUESTION, temperature=0, max_tokens=9).wait()
    whole = asking.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=9)
    chunks = list(
        asking.chat.completions.create(
            model="default",
            messages=QUESTION,
            temperature=0,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "Paris" in expected.text
    assert whole.choices[0].message.content == expected.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    for usage in (whole.usage, chunks[-1].usage):
        assert usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt, expected.usage.generated)
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == expected.reason


def test_a_seed_repeats_a_completion_and_stops_end_it(asking: openai.OpenAI) -> None:
    def complete(**fields: Any) -> Any:
        fields = {"model": "default", "prompt": "Once upon a time", "max_tokens": 8, **fields}
        return asking.completions.create(**fields).choices[0]

    first, again = (complete(temperature=1, seed=5).text for _ in range(2))
    assert first == again
    assert complete(temperature=1, seed=6).text != first
    greedy = complete(temperature=0)
    word = greedy.text.split()[2]
    stopped = complete(temperature=0, stop=[word])
    assert stopped.text == greedy.text[: greedy.text.index(word)]
    assert (greedy.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_log_probabilities_are_those_of_the_text(asking: openai.OpenAI) -> None:
    answer = asking.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


def test_closing_the_stream_ends_the_generation(shared: Daemon, asking: openai.OpenAI) -> None:
    for _ in range(2):
        with asking.completions.create(model="default", prompt="Once upon a time", max_tokens=2000, stream=True) as one:
            next(one)
            shared.until(lambda report: report.running == 1)
        shared.until(lambda report: report.running + report.queued == 0)


def test_errors_keep_their_kind(asking: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'nosuchmodel'"):
        asking.chat.completions.create(model="nosuchmodel", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        asking.completions.create(model="default", prompt="word " * 20_000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_the_models_are_those_of_the_daemon(shared: Daemon, asking: openai.OpenAI) -> None:
    with shared.client() as client:
        names = {entry.name for entry in client.models()}
    assert {model.id for model in asking.models.list()} == names


def test_a_real_model_keeps_to_a_format(asking: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = asking.chat.completions.create(
        model="default",
        messages=QUESTION,
        max_tokens=48,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    city = json.loads(answer.choices[0].message.content or "")
    assert city.keys() == {"city", "big"}
    assert isinstance(city["big"], bool)


def test_a_schema_that_makes_no_sense_says_where(asking: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asking.chat.completions.create(
            model="default",
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
        )
    assert caught.value.code == "grammar_invalid"


def test_the_text_before_a_gap_and_after_it_is_completed(asking: openai.OpenAI) -> None:
    answer = asking.completions.create(
        model="default",
        prompt="def add(a, b):\n    return",
        suffix="\n\nprint(add(1, 2))\n",
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].text


def test_llm_is_answered_too(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXBC_SOCKET", str(shared.path))
    response = Mlxbc(None).prompt("What is the capital of France?", temperature=0, max_tokens=9)
    assert "Paris" in response.text()
    assert response.usage().output == 9 or (response.response_json or {})["reason"] == "stop"
