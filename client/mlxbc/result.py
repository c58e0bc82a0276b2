"""Owns what a generation amounts to: the frames of one stream, put together."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from mlxbc import wire

Event: TypeAlias = wire.Accepted | wire.Progress | wire.Token
"""What a stream yields before its end."""


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


class Collector:
    """Builds a `Result` from the frames of one stream."""

    def __init__(self) -> None:
        self._accepted: wire.Accepted | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[wire.TokenLogprob] = []

    def add(self, event: Event) -> None:
        """Take the next event of the stream."""
        if type(event) is wire.Token:
            (self._text if event.channel == "text" else self._reasoning).append(event.text)
            self._ids += event.ids
            self._logprobs += event.logprobs
        elif type(event) is wire.Accepted:
            self._accepted = event

    def result(self, done: wire.Done) -> Result:
        """The whole, once the last frame is there."""
        accepted = self._accepted
        return Result(
            text="".join(self._text),
            reason=done.reason,
            stop=done.stop,
            model=accepted.model if accepted else "",
            seed=accepted.seed if accepted else 0,
            stream=accepted.stream if accepted else "",
            usage=done.usage,
            timings=done.timings,
            reasoning="".join(self._reasoning),
            ids=self._ids,
            logprobs=self._logprobs,
        )
