"""Owns the JSON of responses: what the daemon's frames look like to OpenAI's clients. Pure.

A `Shape` is one kind of response. It makes choices of frames, one at a time for a stream, or of everything at the end.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from mlxbc import __version__, wire

FINGERPRINT: Final = f"mlxbc-{__version__}"
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes that are no whole character."""

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Called(Struct, frozen=True):
    name: str
    arguments: str


class Call(Struct, frozen=True):
    """A tool call."""

    id: str
    function: Called
    type: Literal["function"] = "function"


class CallChunk(Struct, frozen=True):
    """A tool call in a stream: whole, since it is only known to be one when it is."""

    index: int
    id: str
    function: Called
    type: Literal["function"] = "function"


class Delta(Struct, frozen=True, omit_defaults=True):
    """What is new in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallChunk] | UnsetType = UNSET
    unparsed_tool_calls: list[str] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class Message(Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET
    unparsed_tool_calls: list[str] | UnsetType = UNSET
    """Calls that were cut off or made no sense, as the model wrote them. Not of OpenAI's."""


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


Choice: TypeAlias = ChatChunkChoice | ChatChoice | TextChoice


class Response(Struct, frozen=True, kw_only=True):
    """A whole response, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET


class ModelObject(Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"


class ModelObjects(Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class Alternative:
    """What has come of one choice so far.

    Attributes:
        index: its place among the choices.
        text: everything that was said, and `reasoning` what was thought, in pieces.
        reasoning_tokens: how many tokens that took.
        logprobs: of all tokens, if they were asked for.
        calls: of tools.
        unparsed: what was to be a call and is none.
        started: something of it has been told.
        offset: characters of its text that have been told.
    """

    __slots__ = (
        *("calls", "index", "logprobs", "offset", "reasoning"),
        *("reasoning_tokens", "started", "text", "unparsed"),
    )

    def __init__(self, index: int, prefix: str) -> None:
        self.index = index
        self.text: list[str] = [prefix] if prefix else []
        self.reasoning: list[str] = []
        self.reasoning_tokens = 0
        self.logprobs: list[wire.TokenLogprob] = []
        self.calls: list[wire.ToolCall] = []
        self.unparsed: list[str] = []
        self.started = False
        self.offset = len(prefix)

    def add(self, token: wire.Token) -> None:
        """Take what a frame brings."""
        if token.channel == "reasoning":
            self.reasoning.append(token.text)
            self.reasoning_tokens += token.n
        else:
            self.text.append(token.text)
        if token.call is not None:
            self.calls.append(token.call)
        self.logprobs += token.logprobs


class Shape(Protocol):
    """A kind of response.

    Attributes:
        name: how its ids begin.
        whole, chunk: what it calls itself, complete and in a stream.
    """

    name: str
    whole: str
    chunk: str

    def piece(self, alternative: Alternative, token: wire.Token, *, logprobs: bool) -> Choice:
        """The choice of a chunk that tells of a frame; `alternative` doesn't have it yet."""

    def last(self, alternative: Alternative, finish: Finish) -> Choice:
        """The choice of the chunk that ends an alternative."""

    def complete(self, alternative: Alternative, finish: Finish, *, logprobs: bool) -> Choice:
        """The choice of a whole response."""


class ChatShape:
    """Chat completions."""

    name = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def piece(self, alternative: Alternative, token: wire.Token, *, logprobs: bool) -> Choice:
        """See `Shape`."""
        first: Literal["assistant"] | UnsetType = UNSET if alternative.started else "assistant"
        if token.channel == "reasoning":
            delta = Delta(first, reasoning_content=token.text)
        elif token.call is not None:
            call = token.call
            delta = Delta(first, tool_calls=[CallChunk(call.index, call.id, Called(call.name, call.arguments))])
        else:
            delta = Delta(first, token.text)
        return ChatChunkChoice(alternative.index, delta, _chat_logprobs(token.logprobs) if logprobs else None, None)

    def last(self, alternative: Alternative, finish: Finish) -> Choice:
        """See `Shape`."""
        unparsed = alternative.unparsed or UNSET
        delta = (
            Delta(unparsed_tool_calls=unparsed)
            if alternative.started
            else Delta("assistant", "", UNSET, UNSET, unparsed)
        )
        return ChatChunkChoice(alternative.index, delta, None, finish)

    def complete(self, alternative: Alternative, finish: Finish, *, logprobs: bool) -> Choice:
        """See `Shape`."""
        text = "".join(alternative.text)
        message = Message(
            "assistant",
            None if alternative.calls and not text else text,
            reasoning_content="".join(alternative.reasoning) or UNSET,
            tool_calls=[Call(call.id, Called(call.name, call.arguments)) for call in alternative.calls] or UNSET,
            unparsed_tool_calls=alternative.unparsed or UNSET,
        )
        entries = _chat_logprobs(alternative.logprobs) if logprobs else None
        return ChatChoice(alternative.index, message, entries, finish)


class TextShape:
    """Completions of raw text, which have no place for reasoning: none is marked in them."""

    name = "cmpl"
    whole = chunk = "text_completion"

    def piece(self, alternative: Alternative, token: wire.Token, *, logprobs: bool) -> Choice:
        """See `Shape`."""
        before = "" if alternative.started else "".join(alternative.text)
        entries = _text_logprobs(token.logprobs, alternative) if logprobs else None
        return TextChoice(alternative.index, before + token.text, entries, None)

    def last(self, alternative: Alternative, finish: Finish) -> Choice:
        """See `Shape`."""
        before = "" if alternative.started else "".join(alternative.text)
        return TextChoice(alternative.index, before, None, finish)

    def complete(self, alternative: Alternative, finish: Finish, *, logprobs: bool) -> Choice:
        """See `Shape`."""
        entries = _text_logprobs(alternative.logprobs, alternative) if logprobs else None
        return TextChoice(alternative.index, "".join(alternative.text), entries, finish)


def finish(reason: wire.FinishReason, *, calls: bool) -> Finish:
    """OpenAI's word for why an alternative ended, with tool calls or without."""
    if reason in ("length", "deadline"):
        return "length"
    return "tool_calls" if calls else "stop"


def usage(parts: list[wire.Usage], reasoning: int, *, predicted: bool) -> Usage:
    """The counts of all generations of a response together.

    Args:
        reasoning: tokens of it.
        predicted: tell how many guesses were right.
    """
    prompt, generated = sum(part.prompt for part in parts), sum(part.generated for part in parts)
    cached = sum(part.cached for part in parts)
    details = CompletionDetails(reasoning)
    if predicted:
        accepted = sum(part.accepted for part in parts)
        details = CompletionDetails(reasoning, accepted, sum(part.drafted for part in parts) - accepted)
    return Usage(prompt, generated, prompt + generated, PromptDetails(cached), details)


def _chat_logprobs(entries: list[wire.TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                entry.text,
                entry.logprob,
                _bytes(entry.text),
                [TopLogprob(other.text, other.logprob, _bytes(other.text)) for other in entry.top],
            )
            for entry in entries
        ]
    )


def _text_logprobs(entries: list[wire.TokenLogprob], alternative: Alternative) -> TextLogprobs:
    offsets = []
    for entry in entries:
        offsets.append(alternative.offset)
        alternative.offset += len(entry.text)
    top = [{other.text: other.logprob for other in entry.top} for entry in entries]
    return TextLogprobs(
        [entry.text for entry in entries], [entry.logprob for entry in entries], top if any(top) else None, offsets
    )


def _bytes(text: str) -> list[int] | None:
    """A token's bytes, where its text tells them: half a character's are not known."""
    return None if _REPLACEMENT in text else list(text.encode())


encode: Final = msgspec.json.Encoder().encode
