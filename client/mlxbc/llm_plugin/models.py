"""Owns the daemon's models as `llm` wants them: what it asks becomes a generation, what comes becomes its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import llm
from llm.parts import ReasoningPart, StreamEvent, TextPart
from msgspec import to_builtins
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
    template_options: dict[str, Any] | None = Field(None, description="JSON for the model's chat template")


class _Shared:
    """What both kinds of models have in common.

    Attributes:
        model_id: how people call it.
        name: how the daemon does; None is its default model.
    """

    can_stream = True
    model_id: str
    name: str | None

    def _fields(self, prompt: llm.Prompt) -> dict[str, Any]:
        fields: dict[str, Any] = prompt.options.model_dump(exclude_none=True)
        if isinstance(stop := fields.get("stop"), str):
            fields["stop"] = [stop]
        if self.name is not None:
            fields["model"] = self.name
        return {**fields, "messages": [message for one in prompt.messages if (message := _message(one))]}


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
                    if (told := _told(event, prompt)) is not None:
                        yield told
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
                    if (told := _told(event, prompt)) is not None:
                        yield told
                _record(response, generation.result)
        except MlxbcError as error:
            raise llm.ModelError(str(error)) from error


def _model_id(name: str | None) -> str:
    return "mlxbc" if name is None else f"mlxbc/{name}"


def _message(message: Any) -> Mapping[str, str] | None:
    """A message of the conversation for the wire; None if nothing of it is for the model.

    Raises:
        llm.ModelError: it has parts that the daemon doesn't take.
    """
    pieces = []
    for part in message.parts:
        if isinstance(part, TextPart):
            pieces.append(part.text)
        elif not isinstance(part, ReasoningPart):  # what was thought is not told again: chat templates leave it out
            raise llm.ModelError(f"the daemon does not take {type(part).__name__} in conversations yet")
    return {"role": message.role, "content": "".join(pieces)} if pieces else None


def _told(event: Event, prompt: llm.Prompt) -> str | StreamEvent | None:
    if not isinstance(event, wire.Token) or not event.text:
        return None
    if event.channel == "text":
        return event.text
    return None if prompt.hide_reasoning else StreamEvent(type="reasoning", chunk=event.text)


def _record(response: Any, result: Result) -> None:
    response.set_usage(
        input=result.usage.prompt,
        output=result.usage.generated,
        details={"cached_tokens": result.usage.cached} if result.usage.cached else None,
    )
    response.set_resolved_model(result.model)
    response.response_json = {"reason": result.reason, "seed": result.seed, "timings": to_builtins(result.timings)}
