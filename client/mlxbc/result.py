"""Owns what a generation amounts to: the frames of one stream, put together."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from mlxbc import wire

Event: TypeAlias = wire.Accepted | wire.Progress | wire.Token
"""What a stream yields before its end."""


class Output(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of several outputs of a generation; see `Result` for its attributes."""

    text: str
    reason: wire.FinishReason
    stop: str | None = None
    reasoning: str = ""
    ids: list[int] = []
    logprobs: list[wire.TokenLogprob] = []
    mean_logprob: float | None = None
    tool_calls: list[wire.ToolCall] = []
    unparsed: list[str] = []


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished generation.

    Attributes:
        text: everything the model said, without its reasoning.
        reason: why it ended; `cancelled` results hold what came before the cancellation.
        stop: the stop string that ended it, if one did.
        model: the model that answered.
        seed: repeats this generation, with the same request.
        stream: names this generation across connections.
        usage: token counts.
        timings: milliseconds.
        reasoning: what the model thought, for models that mark it.
        ids: token ids of the output, if the request was resumable.
        logprobs: one entry for each token, if the request asked for them.
        mean_logprob: of these tokens.
        tool_calls: what the model wants called.
        unparsed: calls that were cut off or made no sense, in the model's words.
        outputs: all outputs, if the request asked for several; the rest of this result is then the first one's.
        plan: how it was run, if the request asked to be told.
    """

    text: str
    reason: wire.FinishReason
    stop: str | None = None
    model: str
    seed: int
    stream: str
    usage: wire.Usage
    timings: wire.Timings
    reasoning: str = ""
    ids: list[int] = []
    logprobs: list[wire.TokenLogprob] = []
    mean_logprob: float | None = None
    tool_calls: list[wire.ToolCall] = []
    unparsed: list[str] = []
    outputs: list[Output] = []
    plan: wire.Plan | None = None


class _Parts:
    """What has come of one output."""

    __slots__ = ("calls", "ids", "logprobs", "reasoning", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[wire.TokenLogprob] = []
        self.calls: list[wire.ToolCall] = []

    def add(self, token: wire.Token) -> None:
        (self.reasoning if token.channel == "reasoning" else self.text).append(token.text)
        if token.call is not None:
            self.calls.append(token.call)
        self.ids += token.ids
        self.logprobs += token.logprobs

    def output(self, end: wire.Done | wire.Candidate) -> Output:
        return Output(
            text="".join(self.text),
            reason=end.reason,
            stop=end.stop,
            reasoning="".join(self.reasoning),
            ids=self.ids,
            logprobs=self.logprobs,
            mean_logprob=end.mean_logprob,
            tool_calls=self.calls,
            unparsed=end.unparsed,
        )


class Collector:
    """Builds a `Result` from the frames of one stream."""

    def __init__(self) -> None:
        self._accepted: wire.Accepted | None = None
        self._first = _Parts()
        self._others: dict[int, _Parts] = {}

    def add(self, event: Event) -> None:
        """Take the next event of the stream."""
        if type(event) is wire.Token:
            parts = self._others.setdefault(event.candidate, _Parts()) if event.candidate else self._first
            parts.add(event)
        elif type(event) is wire.Accepted:
            self._accepted = event

    def result(self, done: wire.Done) -> Result:
        """The whole, once the last frame is there."""
        accepted = self._accepted
        first = self._first.output(done)
        return Result(
            text=first.text,
            reason=first.reason,
            stop=first.stop,
            model=accepted.model if accepted else "",
            seed=accepted.seed if accepted else 0,
            stream=accepted.stream if accepted else "",
            usage=done.usage,
            timings=done.timings,
            reasoning=first.reasoning,
            ids=first.ids,
            logprobs=first.logprobs,
            mean_logprob=first.mean_logprob,
            tool_calls=first.tool_calls,
            unparsed=first.unparsed,
            outputs=[
                (self._others.get(number, _Parts()) if number else self._first).output(one)
                for number, one in enumerate(done.candidates)
            ],
            plan=done.plan,
        )
