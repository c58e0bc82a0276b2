"""Tools, formats, reasoning and filling in over HTTP, asked by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from fake_daemon import FakeDaemon, Session, accepted, done
from http_endpoint import TOKEN, Endpoint
from openai.lib.streaming.chat import ChunkEvent

from mlxbc import wire

HELLO: Any = [{"role": "user", "content": "What is the weather in Rome and Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ROME, OSLO = (
    wire.ToolCall(index=i, id=f"call_{i}", name="weather", arguments=f'{{"city": "{city}"}}')
    for i, city in enumerate(("Rome", "Oslo"))
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """One server for all tests: daemons come and go."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory, Endpoint(Path(directory) / "s") as endpoint:
        yield endpoint


@pytest.fixture
def asking(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint.url, api_key=TOKEN, max_retries=0, timeout=10.0) as client:
        yield client


class Caller:
    """A script that says something, calls the tool for two cities, and keeps what it was asked."""

    def __init__(self, text: str = "", *, unparsed: tuple[str, ...] = ()) -> None:
        self.requests: list[wire.Generate] = []
        self.cancelled = 0
        self._text = text
        self._unparsed = list(unparsed)

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Request)
            if isinstance(request, wire.Cancel):
                self.cancelled += 1
                continue
            assert isinstance(request, wire.Generate)
            self.requests.append(request)
            said = [wire.Token(id=request.id, text=self._text)] if self._text else []
            calls = [wire.Token(id=request.id, text="", channel="tool_calls", call=call) for call in (ROME, OSLO)]
            end = wire.Done(
                id=request.id,
                reason="stop",
                usage=wire.Usage(prompt=5, generated=9),
                timings=wire.Timings(),
                unparsed=self._unparsed,
            )
            session.send(accepted(request), *said, *calls, end)


def test_calls_are_part_of_the_message(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    caller = Caller()
    with FakeDaemon(endpoint.socket, caller, hang_up=True):
        answer = asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="auto")
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [
        (call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ] == [
        ("call_0", "function", "weather", '{"city": "Rome"}'),
        ("call_1", "function", "weather", '{"city": "Oslo"}'),
    ]
    (request,) = caller.requests
    (tool,) = request.tools
    assert tool.function == wire.Function(**WEATHER["function"])


def test_calls_stream_whole_after_the_text(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    with FakeDaemon(endpoint.socket, Caller("Let me see."), hang_up=True):
        chunks = list(asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], stream=True))
        with asking.chat.completions.stream(model="tiny", messages=HELLO, tools=[WEATHER]) as stream:
            kinds = {type(event) for event in stream}
            final = stream.get_final_completion().choices[0]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "Let me see.")
    assert [(call.index, call.id, call.function.arguments) for delta in deltas for call in delta.tool_calls or ()] == [
        (0, "call_0", '{"city": "Rome"}'),
        (1, "call_1", '{"city": "Oslo"}'),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # OpenAI's own accumulator agrees.
    assert ChunkEvent in kinds
    assert (final.message.content, final.finish_reason) == ("Let me see.", "tool_calls")
    assert [call.function.arguments for call in final.message.tool_calls] == ['{"city": "Rome"}', '{"city": "Oslo"}']


def test_what_came_of_calls_goes_back(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    caller = Caller()
    with FakeDaemon(endpoint.socket, caller, hang_up=True):
        first = asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER]).choices[0].message
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls or ()
        ]
        # As the client gives it, with all its empty fields.
        asking.chat.completions.create(model="tiny", messages=[*HELLO, first, *results], tools=[WEATHER])
        asking.chat.completions.create(model="tiny", messages=[*HELLO, first.model_dump(), *results], tools=[WEATHER])
    for request in caller.requests[1:]:
        _, called, rome, oslo = request.messages or []
        assert called.tool_calls == [
            wire.PastCall(name="weather", arguments='{"city": "Rome"}', id="call_0"),
            wire.PastCall(name="weather", arguments='{"city": "Oslo"}', id="call_1"),
        ]
        assert (rome.role, rome.tool_call_id, oslo.tool_call_id) == ("tool", "call_0", "call_1")


@pytest.mark.parametrize(
    ("choice", "asked"),
    [("none", "none"), ("required", "required"), ({"type": "function", "function": {"name": "weather"}}, "weather")],
)
def test_the_choice_of_a_tool_reaches_the_daemon(
    endpoint: Endpoint, asking: openai.OpenAI, choice: Any, asked: str
) -> None:
    caller = Caller()
    with FakeDaemon(endpoint.socket, caller, hang_up=True):
        asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], tool_choice=choice)
    assert caller.requests[0].tool_choice == asked


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time_ends_with_the_first(endpoint: Endpoint, asking: openai.OpenAI, stream: bool) -> None:
    caller = Caller()
    fields: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "parallel_tool_calls": False}
    with FakeDaemon(endpoint.socket, caller, hang_up=True):
        if stream:
            chunks = list(asking.chat.completions.create(**fields, stream=True))
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            reason = chunks[-1].choices[0].finish_reason
        else:
            choice = asking.chat.completions.create(**fields).choices[0]
            calls, reason = choice.message.tool_calls, choice.finish_reason
    assert [call.id for call in calls] == ["call_0"]
    assert reason == "tool_calls"


def test_what_was_to_be_a_call_is_reported(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    with FakeDaemon(endpoint.socket, Caller(unparsed=('{"name": "weat',)), hang_up=True):
        answer = asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER])
        *_, last = asking.chat.completions.create(model="tiny", messages=HELLO, tools=[WEATHER], stream=True)
    assert (answer.choices[0].message.model_extra or {})["unparsed_tool_calls"] == ['{"name": "weat']
    assert (last.choices[0].delta.model_extra or {})["unparsed_tool_calls"] == ['{"name": "weat']


# ------------------------------------------------------------ formats, reasoning, filling in


class Recorder:
    """A script that keeps the requests and gives each the same answer."""

    def __init__(self, text: str, usage: wire.Usage | None = None) -> None:
        self.requests: list[wire.Generate] = []
        self._text = text
        self._usage = usage

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            self.requests.append(request)
            end = done(request)
            if self._usage is not None:
                end = msgspec.structs.replace(end, usage=self._usage)
            session.send(accepted(request), wire.Token(id=request.id, text=self._text), end)


class City(pydantic.BaseModel):
    name: str
    population: int


def test_a_response_is_held_to_its_format(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    record = Recorder('{"name": "Rome", "population": 2800000}')
    with FakeDaemon(endpoint.socket, record, hang_up=True):
        parsed = asking.chat.completions.parse(model="tiny", messages=HELLO, response_format=City)
        asking.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "json_object"})
        asking.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "text"})
    assert parsed.choices[0].message.parsed == City(name="Rome", population=2_800_000)
    schemas = [request.schema for request in record.requests]
    assert isinstance(schemas[0], dict)
    assert schemas[0]["properties"]["population"]["type"] == "integer"
    assert schemas[1:] == [{"type": "object"}, None]


@pytest.mark.parametrize("content", ["x = 1\n", [{"type": "text", "text": "x = "}, {"type": "text", "text": "1\n"}]])
def test_a_prediction_is_text_that_may_be_repeated(endpoint: Endpoint, asking: openai.OpenAI, content: Any) -> None:
    record = Recorder("x = 2\n", wire.Usage(prompt=5, generated=9, drafted=8, accepted=6))
    with FakeDaemon(endpoint.socket, record, hang_up=True):
        answer = asking.chat.completions.create(
            model="tiny", messages=HELLO, prediction={"type": "content", "content": content}
        )
    assert record.requests[0].echo == ["x = 1\n"]
    assert answer.usage
    details = answer.usage.completion_tokens_details
    assert details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 2)


@pytest.mark.parametrize(
    ("effort", "thinking", "budget"), [("none", False, None), ("low", True, 1024), ("high", True, None)]
)
def test_effort_is_a_budget(
    endpoint: Endpoint, asking: openai.OpenAI, effort: Any, thinking: bool, budget: int | None
) -> None:
    record = Recorder("ok")
    with FakeDaemon(endpoint.socket, record, hang_up=True):
        asking.chat.completions.create(model="tiny", messages=HELLO, reasoning_effort=effort)
    assert (record.requests[0].thinking, record.requests[0].thinking_budget) == (thinking, budget)


@pytest.mark.parametrize(
    ("asks", "fields", "why", "param"),
    [
        ({"reasoning_effort": "none"}, ["thinking"], "this model can't stop thinking", "reasoning_effort"),
        ({"reasoning_effort": "low"}, ["thinking_budget"], "this model marks no reasoning", "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, ["template_options"], "no x", "chat_template_kwargs"),
        ({"response_format": {"type": "json_object"}}, ["schema", "regex"], "no grammars", "response_format"),
        ({"tools": [WEATHER], "tool_choice": "required"}, ["schema", "tool_choice"], "no grammars", "tool_choice"),
        ({"max_completion_tokens": 9, "max_tokens": 5}, ["max_tokens"], "too much", "max_completion_tokens"),
        ({"max_tokens": 9}, ["max_tokens"], "too much", "max_tokens"),
    ],
)
def test_an_error_names_what_the_client_sent(
    endpoint: Endpoint, asking: openai.OpenAI, asks: dict[str, Any], fields: list[str], why: str, param: str
) -> None:
    def refusing(session: Session) -> None:
        request = session.receive(wire.Generate)
        assert set(fields) & {name for name in request.__struct_fields__ if getattr(request, name) not in (None, {})}
        message, data = f"{why}; leave {fields[0]} out", {"fields": fields, "why": why}
        session.send(wire.Error(id=request.id, code="bad_request", message=message, data=data))

    with (
        FakeDaemon(endpoint.socket, refusing, hang_up=True),
        pytest.raises(openai.BadRequestError, match=f"{why}; leave {param} out") as caught,
    ):
        asking.chat.completions.create(model="tiny", messages=HELLO, **asks)
    assert caught.value.param == param


def test_so_does_one_that_is_found_before_the_daemon_is_asked(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    prediction: Any = {"type": "content", "content": "x" * 1_000_001}
    with (
        FakeDaemon(endpoint.socket, Session.until_gone, hang_up=True),
        pytest.raises(openai.BadRequestError, match="length <= 1000000 - at `prediction`") as caught,
    ):
        asking.chat.completions.create(model="tiny", messages=HELLO, prediction=prediction)
    assert caught.value.param == "prediction"


def test_a_suffix_is_text_after_the_gap(endpoint: Endpoint, asking: openai.OpenAI) -> None:
    record = Recorder("b")
    with FakeDaemon(endpoint.socket, record, hang_up=True):
        answer = asking.completions.create(model="tiny", prompt="a", suffix="c", echo=True)
        asking.completions.create(model="tiny", prompt="a", suffix="")
    assert answer.choices[0].text == "ab"
    assert record.requests[0].fim == wire.Fim(prefix="a", suffix="c")
    assert (record.requests[1].fim, record.requests[1].prompt) == (None, "a")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "parallel_tool_calls": False, "n": 2}, "parallel_tool_calls"),
        ({"prediction": {"type": "content", "content": 3}}, "prediction"),
        ({"reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "description": "x"}}},
            "response_format.json_schema.description",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "type": "custom"}]}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asking: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asking.chat.completions.create(**{"model": "tiny", "messages": HELLO, **fields})
    assert caught.value.param == param
