"""Owns one output of a generation: the text of its tokens, and what of them no frame has told yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxbc import wire
from mlxbcd.sampling.sampler import Sample
from mlxbcd.spec.statistics import Statistics
from mlxbcd.text.stage import TextStage
from mlxbcd.text.tokenizer import Tokenizer
from mlxbcd.text.tools import ToolCall


@dataclass(slots=True)
class _Unsent:
    """Tokens drawn since the last frame; their text may still be on its way."""

    n: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Output:
    """One candidate's text.

    Attributes:
        generated: tokens drawn, forced ones and the end token included.
        reason: why it ended; None while it runs.
        speculated: what guessing its tokens has done, as far as it was told.
    """

    candidate: int
    stage: TextStage
    generated: int = 0
    reason: wire.FinishReason | None = None
    speculated: Statistics = field(default_factory=Statistics)
    _unsent: _Unsent = field(default_factory=_Unsent)
    _logprobs: float = 0.0
    _scored: int = 0

    @property
    def mean_logprob(self) -> float | None:
        """Of the tokens since this run began; None if none has a log-probability."""
        return self._logprobs / self._scored if self._scored else None

    @property
    def told(self) -> bool:
        """No token waits for a frame."""
        return self._unsent.n == 0

    def draw(self, token: int, *, tell: bool) -> None:
        """A token that has text is part of the output now; with `tell`, the next frame has its id."""
        self.generated += 1
        self._unsent.n += 1
        if tell:
            self._unsent.ids.append(token)

    def score(self, sample: Sample, tokenizer: Tokenizer) -> None:
        """The log-probabilities of a sample, if it has any, go with the next frame."""
        if sample.logprob is None:
            return
        text = tokenizer.token_text
        top = [wire.TopToken(token, text(token), logprob) for token, logprob in sample.top]
        self._unsent.logprobs.append(wire.TokenLogprob(sample.token, text(sample.token), sample.logprob, top))
        self._logprobs += sample.logprob
        self._scored += 1

    def frame(self, request: int, channel: wire.Channel, piece: str | ToolCall) -> wire.Token:
        """A run of text or a call as a frame; the tokens since the last one ride on it."""
        unsent, self._unsent = self._unsent, _Unsent()
        return wire.Token(
            id=request,
            text=piece if isinstance(piece, str) else "",
            n=unsent.n,
            channel=channel,
            call=_call(piece) if isinstance(piece, ToolCall) else None,
            candidate=self.candidate,
            ids=unsent.ids,
            logprobs=unsent.logprobs,
        )

    def summary(self) -> wire.Candidate:
        """What `done` says of it."""
        return wire.Candidate(
            self.reason or "cancelled", self.generated, self.stage.hit, self.mean_logprob, self.stage.unparsed
        )


def _call(call: ToolCall) -> wire.ToolCall:
    return wire.ToolCall(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
