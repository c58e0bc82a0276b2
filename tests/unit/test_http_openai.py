"""The HTTP endpoint, asked by OpenAI's own client: a real server before a scripted daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import openai
import pytest
from fake_daemon import FakeDaemon, Script, Session, accepted, answering, done
from http_endpoint import TOKEN, Endpoint

from mlxbc import wire

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """One server for all tests: daemons come and go."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory, Endpoint(Path(directory) / "s") as endpoint:
        yield endpoint


@contextmanager
def client(endpoint: Endpoint, script: Script | None, **options: Any) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server, before a daemon if there is a script for one."""
    with nullcontext() if script is None else FakeDaemon(endpoint.socket, script, hang_up=True):
        usual = {"base_url": endpoint.url, "api_key": TOKEN, "max_retries": 0, "timeout": 10.0}
        with openai.OpenAI(**{**usual, **options}) as asking:
            yield asking


class Recorder:
    """A script that keeps the requests and gives each the same answer."""

    def __init__(self, *pieces: str) -> None:
        self.requests: list[wire.Generate] = []
        self._pieces = pieces or ("ok",)

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            self.requests.append(request)
            session.send(accepted(request), *(wire.Token(id=request.id, text=piece) for piece in self._pieces))
            session.send(done(request, generated=len(self._pieces)))


# ------------------------------------------------------------ answers


def test_a_chat_is_answered(endpoint: Endpoint) -> None:
    with client(endpoint, answering("Par", "is.")) as asking:
        answer = asking.chat.completions.create(model="tiny", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content, choice.finish_reason) == (
        0,
        "assistant",
        "Paris.",
        "stop",
    )
    assert (answer.object, answer.model, answer.id) == ("chat.completion", "tiny", "chatcmpl-" + "0f" * 16)
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 2, 7)
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_a_stream_brings_each_piece_as_it_comes_and_the_counts_at_the_end(endpoint: Endpoint) -> None:
    seen = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="first"))
        assert seen.wait(10)
        session.send(wire.Token(id=request.id, text=" second"), done(request, "length", generated=2))

    with client(endpoint, script) as asking:
        stream = asking.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        first = next(stream)
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "first")
        assert first.usage is None
        seen.set()
        second, last, counts = stream
    assert (second.choices[0].delta.role, second.choices[0].delta.content) == (None, " second")
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "length")
    assert counts.choices == []
    assert counts.usage
    assert counts.usage.completion_tokens == 2
    assert {chunk.id for chunk in (first, second, last, counts)} == {"chatcmpl-" + "0f" * 16}


def test_an_empty_answer_is_an_answer(endpoint: Endpoint) -> None:
    with client(endpoint, answering()) as asking:
        assert asking.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == ""
        (only,) = asking.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        assert (only.choices[0].delta.role, only.choices[0].delta.content) == ("assistant", "")
        assert only.choices[0].finish_reason == "stop"


def test_reasoning_has_a_field_of_its_own(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        for _ in range(2):
            request = session.receive(wire.Generate)
            session.send(
                accepted(request),
                wire.Token(id=request.id, text="let me", channel="reasoning", n=2),
                wire.Token(id=request.id, text="Four."),
                done(request),
            )

    with client(endpoint, script) as asking:
        whole = asking.chat.completions.create(model="tiny", messages=HELLO)
        chunks = list(asking.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    message = whole.choices[0].message
    assert (message.content, message.model_extra) == ("Four.", {"reasoning_content": "let me"})
    assert whole.usage
    assert whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2
    assert [chunk.choices[0].delta.content for chunk in chunks] == [None, "Four.", None]
    assert chunks[0].choices[0].delta.model_extra == {"reasoning_content": "let me"}


def test_log_probabilities_come_with_their_tokens(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        for _ in range(3):
            request = session.receive(wire.Generate)
            assert (request.logprobs, request.top_logprobs) == (True, 2)
            half = wire.TokenLogprob(token=1, text="\N{REPLACEMENT CHARACTER}", logprob=-1.0)
            other = wire.TopToken(token=3, text="no", logprob=-2.5)
            whole = wire.TokenLogprob(token=2, text="é", logprob=-0.5, top=[other])
            session.send(
                accepted(request),
                wire.Token(id=request.id, text="", logprobs=[half]),
                wire.Token(id=request.id, text="é", logprobs=[whole]),
                done(request),
            )

    with client(endpoint, script) as asking:
        answer = asking.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
        chunks = list(
            asking.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=True)
        )
        text = asking.completions.create(model="tiny", prompt="caf", logprobs=2)
    assert answer.choices[0].logprobs
    entries = answer.choices[0].logprobs.content or []
    assert [(entry.bytes, entry.logprob) for entry in entries] == [(None, -1.0), ([0xC3, 0xA9], -0.5)]
    assert [(top.token, top.logprob) for top in entries[1].top_logprobs] == [("no", -2.5)]
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [len(one.content or []) if one else None for one in streamed] == [1, 1, None]
    assert text.choices[0].logprobs
    assert text.choices[0].logprobs.token_logprobs == [-1.0, -0.5]
    assert text.choices[0].logprobs.text_offset == [0, 1]
    assert text.choices[0].logprobs.top_logprobs == [{}, {"no": -2.5}]


def test_raw_text_is_completed(endpoint: Endpoint) -> None:
    record = Recorder(" upon", " a time")
    with client(endpoint, record) as asking:
        answer = asking.completions.create(model="tiny", prompt="Once", max_tokens=9, echo=True)
        chunks = list(asking.completions.create(model="tiny", prompt="Once", stream=True, echo=True))
    assert (answer.object, answer.choices[0].text) == ("text_completion", "Once upon a time")
    assert [chunk.choices[0].text for chunk in chunks] == ["Once upon", " a time", ""]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert [(request.prompt, request.max_tokens) for request in record.requests] == [("Once", 9), ("Once", None)]


def test_several_prompts_are_answered_together_each_in_its_place(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        for _ in range(2):
            requests = [session.receive(wire.Generate) for _ in range(3)]
            for request in reversed(requests):
                session.send(accepted(request), wire.Token(id=request.id, text=f"re {request.prompt}"))
            session.send(*(done(request, generated=1) for request in requests))

    with client(endpoint, script) as asking:
        whole = asking.completions.create(model="tiny", prompt=["a", "b", "c"])
        chunks = list(asking.completions.create(model="tiny", prompt=["a", "b", "c"], stream=True))
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "re a"), (1, "re b"), (2, "re c")]
    assert whole.usage
    assert whole.usage.total_tokens == 3 * 5 + 3
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["re a", "re b", "re c"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_choices_come_from_one_request_each_in_its_place(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        for _ in range(3):
            request = session.receive(wire.Generate)
            assert request.n == 2
            ends = [wire.Candidate(reason="stop", generated=2), wire.Candidate(reason="length", generated=1)]
            session.send(
                accepted(request),
                wire.Token(id=request.id, text="b", candidate=1),
                wire.Token(id=request.id, text="a"),
                wire.Token(id=request.id, text="a"),
                msgspec.structs.replace(done(request), candidates=ends),
            )

    with client(endpoint, script) as asking:
        whole = asking.chat.completions.create(model="tiny", messages=HELLO, n=2)
        chunks = list(asking.chat.completions.create(model="tiny", messages=HELLO, n=2, stream=True))
        text = asking.completions.create(model="tiny", prompt="x", n=2, best_of=2, echo=True)
    expected = [(0, "aa", "stop"), (1, "b", "length")]
    assert [(one.index, one.message.content, one.finish_reason) for one in whole.choices] == expected
    assert [(one.index, one.text) for one in text.choices] == [(0, "xaa"), (1, "xb")]
    streamed = {0: ["", ""], 1: ["", ""]}
    for choice in (chunk.choices[0] for chunk in chunks):
        streamed[choice.index][0] += choice.delta.content or ""
        streamed[choice.index][1] += choice.finish_reason or ""
    assert [(index, text, reason) for index, (text, reason) in streamed.items()] == expected


@pytest.mark.parametrize(
    ("tier", "priority"), [("auto", None), ("default", None), ("flex", "background"), ("priority", "interactive")]
)
def test_a_tier_is_a_priority(endpoint: Endpoint, tier: Any, priority: str | None) -> None:
    record = Recorder()
    with client(endpoint, record) as asking:
        asking.chat.completions.create(model="tiny", messages=HELLO, service_tier=tier)
    assert record.requests[0].priority == priority


def test_models_are_listed_and_looked_up(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        entries = [
            wire.ModelEntry(name="smollm2", source="embedded", path="/tmp", bytes=1, default=True),
            wire.ModelEntry(name="org/name", source="hub", path="/nowhere", bytes=2),
        ]
        while True:
            session.send(wire.ModelList(id=session.receive(wire.Models).id, models=entries))

    with client(endpoint, script) as asking:
        assert [(model.id, model.owned_by) for model in asking.models.list()] == [
            ("smollm2", "mlxbc"),
            ("org/name", "hub"),
        ]
        assert asking.models.retrieve("org/name").id == "org/name"
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            asking.models.retrieve("other")


# ------------------------------------------------------------ what is asked


def test_every_setting_reaches_the_daemon(endpoint: Endpoint) -> None:
    record = Recorder()
    with client(endpoint, record) as asking:
        asking.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two?"}]},
                {"role": "assistant", "content": "Three."},
                {"role": "user", "content": "Four?"},
            ],
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=7,
            stop=["\n", "###"],
            seed=11,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"42": -100},
            user="somebody",
            prompt_cache_key="a conversation",
            store=False,
            extra_body={
                "top_k": 40,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "keep_alive": 300,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        )
    (request,) = record.requests
    assert request == wire.Generate(
        id=request.id,
        messages=[
            wire.Message(role="system", content="Be brief."),
            wire.Message(role="user", content="One two?"),
            wire.Message(role="assistant", content="Three."),
            wire.Message(role="user", content="Four?"),
        ],
        model="tiny",
        template_options={"enable_thinking": False},
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        keep_alive=300,
        session="a conversation",
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={42: -100.0},
        seed=11,
        max_tokens=7,
        stop=["\n", "###"],
    )


def test_the_default_model_needs_no_name(endpoint: Endpoint) -> None:
    record = Recorder()
    with client(endpoint, record) as asking:
        asking.chat.completions.create(model="default", messages=HELLO, stop="x")
    assert (record.requests[0].model, record.requests[0].stop) == (None, ["x"])


@pytest.mark.parametrize(
    ("fields", "param", "complaint"),
    [
        ({"temperature": 11}, "temperature", "<= 10"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            "assistant, developer, function, system",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
            "send text",
        ),
        ({"extra_body": {"temprature": 1}}, "temprature", "no parameter temprature"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"store": True}, "store", "other than False"),
        ({"modalities": ["text", "audio"]}, "modalities", "other than"),
        ({"service_tier": "scale"}, "service_tier", "auto, default, flex, priority"),
        ({"n": 17}, "n", "<= 16"),
        ({"web_search_options": {}}, "web_search_options", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"extra_body": {"messages": [{"role": "user", "content": "x", "name": "Ada"}]}}, "messages[0].name", "names"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    endpoint: Endpoint, fields: dict[str, Any], param: str, complaint: str
) -> None:
    with client(endpoint, None) as asking, pytest.raises(openai.BadRequestError) as caught:
        asking.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
    body = caught.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["param"]) == ("invalid_request_error", param)
    assert complaint in body["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_completions_are_checked_too(endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    with client(endpoint, None) as asking, pytest.raises(openai.BadRequestError) as caught:
        asking.completions.create(**{"model": "tiny", "prompt": "x", **fields})
    assert caught.value.param == param


# ------------------------------------------------------------ how it ends


@pytest.mark.parametrize(
    ("code", "kind", "ours"),
    [
        ("bad_request", openai.BadRequestError, "bad_request"),
        ("context_too_long", openai.BadRequestError, "context_length_exceeded"),
        ("unknown_model", openai.NotFoundError, "model_not_found"),
        ("queue_full", openai.InternalServerError, "queue_full"),
        ("device_error", openai.InternalServerError, "device_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_has_its_status_as_long_as_nothing_was_said(
    endpoint: Endpoint, code: wire.ErrorCode, kind: type[openai.APIStatusError], ours: str, stream: bool
) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        load = wire.Progress(id=request.id, phase="load", done=1, total=2)
        session.send(accepted(request), load, wire.Error(id=request.id, code=code, message="because"))

    with client(endpoint, script) as asking, pytest.raises(kind, match="because") as caught:
        asking.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert caught.value.code == ours
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_what_may_succeed_later_is_tried_again_by_the_client(endpoint: Endpoint) -> None:
    refused = []

    def script(session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            if not refused:
                refused.append(request)
                session.send(wire.Error(id=request.id, code="queue_full", message="later", retryable=True))
            else:
                session.send(accepted(request), wire.Token(id=request.id, text="ok"), done(request))

    with client(endpoint, script, max_retries=1) as asking:
        assert asking.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "ok"
    assert len(refused) == 1


def test_an_error_in_a_stream_is_raised_after_the_text_before_it(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(
            accepted(request),
            wire.Token(id=request.id, text="half"),
            wire.Error(id=request.id, code="device_error", message="it broke"),
        )

    with client(endpoint, script) as asking:
        stream = asking.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        assert next(stream).choices[0].delta.content == "half"
        with pytest.raises(openai.APIError, match="it broke"):
            next(stream)


def cancelled_after(*replies: str) -> tuple[Script, threading.Event]:
    """A script that says something and then waits to be cancelled, and what it tells once it was."""
    heard = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), *(wire.Token(id=request.id, text=text) for text in replies))
        assert session.receive(wire.Cancel).id == request.id
        heard.set()
        session.send(done(request, "cancelled"))

    return script, heard


def test_closing_the_stream_cancels(endpoint: Endpoint) -> None:
    script, heard = cancelled_after("Once")
    with client(endpoint, script) as asking:
        with asking.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
            assert next(stream).choices[0].delta.content == "Once"
        assert heard.wait(10)


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_before_the_first_token_cancels_too(endpoint: Endpoint, stream: bool) -> None:
    script, heard = cancelled_after()
    with client(endpoint, script, timeout=0.2) as asking:
        with pytest.raises(openai.APITimeoutError):
            asking.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert heard.wait(10)


def test_one_of_several_prompts_that_fails_ends_the_others(endpoint: Endpoint) -> None:
    heard = threading.Event()

    def script(session: Session) -> None:
        first, second = session.receive(wire.Generate), session.receive(wire.Generate)
        session.send(accepted(first), accepted(second))
        session.send(wire.Error(id=second.id, code="device_error", message="it broke"))
        assert session.receive(wire.Cancel).id == first.id
        heard.set()

    with client(endpoint, script) as asking:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            asking.completions.create(model="tiny", prompt=["a", "b"])
        assert heard.wait(10)


def test_without_a_daemon_the_error_says_how_to_start_one_and_later_it_works(endpoint: Endpoint) -> None:
    with client(endpoint, None) as asking:
        with pytest.raises(openai.InternalServerError, match="mlxbc serve --detach") as caught:
            asking.chat.completions.create(model="tiny", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "daemon_unavailable")
        for answer in ("one", "two"):  # and it outlives a daemon
            with FakeDaemon(endpoint.socket, saying(answer)):
                reply = asking.chat.completions.create(model="tiny", messages=HELLO)
                assert reply.choices[0].message.content == answer


def saying(text: str) -> Script:
    """A script that answers one request and hangs up."""

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text=text), done(request))

    return script


def test_the_end_of_the_daemon_ends_an_answer_with_an_error(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="half"))

    with client(endpoint, script) as asking:
        stream = asking.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        assert next(stream).choices[0].delta.content == "half"
        with pytest.raises(openai.APIError, match="ended before the request did"):
            next(stream)
