"""Owns the daemon's models as `llm` wants them: what it asks becomes a generation, what comes becomes its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import llm
import msgspec
from llm.parts import ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart
from pydantic import ConfigDict, Field

from mlxbc import wire
from mlxbc.aio import AsyncClient
from mlxbc.client import Client
from mlxbc.errors import MlxbcError
from mlxbc.result import Event, Result

_CLIENT = "mlxbc-llm"


class Options(llm.Options):
    """What `-o` may set. The ranges are the daemon's; what is left out comes from the model."""

    model_config = ConfigDict(extra="forbid")

    temperature: float | None = Field(None, description="0 always takes the likeliest token")
    top_p: float | None = Field(None, description="the share of probability to draw from")
    top_k: int | None = Field(None, description="how many of the likeliest tokens to draw from; 0 is all")
    min_p: float | None = Field(None, description="the least probability, as a share of the likeliest token's")
    repetition_penalty: float | None = Field(None, description="above 1 makes what was said less likely")
    presence_penalty: float | None = Field(None, description="taken off every token that was said")
    frequency_penalty: float | None = Field(None, description="taken off a token each time it was said")
    seed: int | None = Field(None, description="repeats an answer")
    max_tokens: int | None = Field(None, description="longest answer")
    stop: str | list[str] | None = Field(None, description="text that ends the answer, or a JSON list of several")
    thinking: bool | None = Field(None, description="think first, or don't")
    thinking_budget: int | None = Field(None, description="tokens of reasoning before the answer has to begin")
    template_options: dict[str, Any] | None = Field(None, description="JSON for the model's chat template")


class _Shared:
    """What both kinds of models have in common.

    Attributes:
        model_id: how people call it.
        name: how the daemon does; None is its default model.
    """

    can_stream = True
    supports_schema = True
    supports_tools = True
    model_id: str
    name: str | None

    def _fields(self, prompt: llm.Prompt) -> dict[str, Any]:
        fields: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
        if prompt.schema is not None:
            fields["schema"] = prompt.schema
        if prompt.tools:
            fields["tools"] = [_tool(tool) for tool in prompt.tools]
        if isinstance(stop := fields.get("stop"), str):
            fields["stop"] = [stop]
        if self.name is not None:
            fields["model"] = self.name
        return {**fields, "messages": [message for one in prompt.messages for message in _messages(one)]}


class Mlxbc(_Shared, llm.Model):
    """A model, waited for."""

    class Options(Options):
        pass

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.model_id = _model_id(name)

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[str | StreamEvent]:
        """Generate; a consumer that stops early cancels.

        Raises:
            llm.ModelError: it failed; the message says what to do.
        """
        try:
            with Client(client_name=_CLIENT) as client, client.generate(**self._fields(prompt)) as generation:
                for event in generation:
                    yield from _told(event, prompt, response)
                _record(response, generation.result)
        except MlxbcError as error:
            raise llm.ModelError(str(error)) from error


class AsyncMlxbc(_Shared, llm.AsyncModel):
    """A model, awaited."""

    class Options(Options):
        pass

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.model_id = _model_id(name)

    async def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.AsyncResponse, conversation: Any
    ) -> AsyncGenerator[str | StreamEvent, None]:
        """See `Mlxbc.execute`."""
        try:
            async with (
                AsyncClient(client_name=_CLIENT) as client,
                client.generate(**self._fields(prompt)) as generation,
            ):
                async for event in generation:
                    for told in _told(event, prompt, response):
                        yield told
                _record(response, generation.result)
        except MlxbcError as error:
            raise llm.ModelError(str(error)) from error


def _model_id(name: str | None) -> str:
    return "mlxbc" if name is None else f"mlxbc/{name}"


def _messages(message: Any) -> Iterator[Mapping[str, Any]]:
    """A message of the conversation for the wire; several where it brings the results of several calls.

    Raises:
        llm.ModelError: it has parts that the daemon doesn't take.
    """
    pieces, calls = [], []
    for part in message.parts:
        match part:
            case TextPart():
                pieces.append(part.text)
            case ToolCallPart():
                calls.append(
                    {
                        "name": part.name,
                        "arguments": msgspec.json.encode(part.arguments).decode(),
                        "id": part.tool_call_id or "",
                    }
                )
            case ToolResultPart():
                yield {"role": "tool", "content": part.output, "tool_call_id": part.tool_call_id, "name": part.name}
            case ReasoningPart():
                pass  # what was thought is not told again: chat templates leave it out
            case _:
                raise llm.ModelError(f"the daemon does not take {type(part).__name__} in conversations")
    if pieces or calls:
        yield {"role": message.role, "content": "".join(pieces), "tool_calls": calls}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, llm.Tool):
        raise llm.ModelError(f"the daemon runs no tools of its own, {type(tool).__name__} among them")
    definition = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
    return {"type": "function", "function": definition}


def _told(event: Event, prompt: llm.Prompt, response: Any) -> Iterator[str | StreamEvent]:
    if not isinstance(event, wire.Token):
        return
    if (call := event.call) is not None:
        arguments = msgspec.json.decode(call.arguments)
        response.add_tool_call(llm.ToolCall(name=call.name, arguments=arguments, tool_call_id=call.id))
        yield StreamEvent(type="tool_call_name", chunk=call.name, tool_call_id=call.id)
        yield StreamEvent(type="tool_call_args", chunk=call.arguments, tool_call_id=call.id)
    elif event.channel == "text" and event.text:
        yield event.text
    elif event.channel == "reasoning" and event.text and not prompt.hide_reasoning:
        yield StreamEvent(type="reasoning", chunk=event.text)


def _record(response: Any, result: Result) -> None:
    response.set_usage(
        input=result.usage.prompt,
        output=result.usage.generated,
        details={"cached_tokens": result.usage.cached} if result.usage.cached else None,
    )
    response.set_resolved_model(result.model)
    response.response_json = {
        "reason": result.reason,
        "seed": result.seed,
        "timings": msgspec.to_builtins(result.timings),
    }
