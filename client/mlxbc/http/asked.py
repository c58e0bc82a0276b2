"""Owns what OpenAI's clients may send: the bodies of requests as Structs. Pure.

A field that is not here is refused by name. `null` means that a field is left out, for all of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from mlxbc import wire

Count: TypeAlias = Annotated[int, Meta(ge=1, le=10_000_000)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Stop: TypeAlias = wire.StopString | Annotated[list[wire.StopString], Meta(max_length=16)]


class _Object(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class Part(_Object, frozen=True):
    """A part of a message's content. Only `text` is understood; others are here to be refused by their type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None


class CalledFunction(_Object, frozen=True):
    """What a call was about."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | None = None


class ToolCall(_Object, frozen=True):
    """A call in an assistant message."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None
    custom: Any = None
    index: Any = None


class Message(_Object, frozen=True):
    """One message of a conversation, as it was sent or as a response gave it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None
    annotations: Any = None


class StreamOptions(_Object, frozen=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Sampling(_Object, frozen=True):
    """What both kinds of requests have."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Count | None = None
    stop: Stop | None = None
    seed: wire.Seed | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[wire.TokenId, Bias], Meta(max_length=1024)] | None = None
    # What OpenAI's own service doesn't have and other local servers call so.
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    keep_alive: wire.KeepAlive | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None
    # These name the caller to a service that has accounts. There are none here, so nothing is lost with them.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None


class Chat(_Sampling, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, wire.Scalar] | None = None
    prediction: dict[str, Any] | None = None
    modalities: list[str] | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


class Completion(_Sampling, frozen=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any] | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
