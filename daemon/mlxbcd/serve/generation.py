"""Owns one generation from the wire's side: samples become text frames, and the request gets its one terminal frame."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

from mlxbc import wire
from mlxbcd.engine.engine import Engine
from mlxbcd.engine.entry import Held
from mlxbcd.errors import ServeError
from mlxbcd.methods.events import End
from mlxbcd.plan.request import Request
from mlxbcd.plan.resolve import Plan
from mlxbcd.sampling.sampler import Sample
from mlxbcd.serve.clock import Clock
from mlxbcd.serve.contract import Cause
from mlxbcd.serve.explaining import plan_reply, speculation_reply
from mlxbcd.serve.output import Output
from mlxbcd.serve.replies import error_reply
from mlxbcd.serve.resuming import Book, Recording
from mlxbcd.spec.statistics import Statistics, total
from mlxbcd.text.stage import Piece, TextStage
from mlxbcd.text.tokenizer import Tokenizer
from mlxbcd.text.tools import ToolCall
from mlxbcd.trace import Tracer

log = logging.getLogger(__name__)

_REPLACED: Final = frozenset({"superseded", "deadline"})
"""Ends after which a request much like it is likely to come."""
_AT_ONCE: Final = 256
"""Known tokens that are told before others get their turn."""
HANDED_OVER: Final = "resumed"
"""How a generation ends that another request of the same stream goes on with."""
PROGRESS_S: Final = 0.25
"""Progress frames of one request come no closer than this."""


class Generation:
    """A running generation: the engine's listener and the session's job.

    Everything here runs on the loop's thread. `reply` may call back into `cancel`.

    Args:
        reply: takes the frames.
        forget: called once, before the terminal frame is sent.

    Attributes:
        ended_with: why it ended (a finish reason or an error's code); None while it runs.
        recording: what is remembered of it, if it can be taken up again.
        keeper: holds it when its client has gone, if it is to go on.
    """

    def __init__(
        self,
        request: wire.Generate,
        reply: Callable[[wire.Reply], None],
        forget: Callable[[Generation], None],
        client: str = "",
    ) -> None:
        self.wire = request
        self.clock = Clock()
        self.ended_with: str | None = None
        self.recording: Recording | None = None
        self.keeper: Book | None = None
        self._attended = True
        self._client = client
        self._accepted: wire.Accepted | None = None
        self._reply = reply
        self._forget = forget
        self._preparation: asyncio.Task[None] | None = None
        self._prompt = 0
        self._engine: Engine | None = None
        self._key = 0
        self._tokenizer: Tokenizer | None = None
        self._outputs: list[Output] = []
        self._plan: Plan | None = None
        self._drafters: frozenset[str] = frozenset()
        self._reported = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        if request.deadline_ms is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(request.deadline_ms / 1e3, self._finish, "deadline")

    def __repr__(self) -> str:
        return f"Generation({self.wire.id}, {self.generated} tokens, {self.ended_with or 'running'})"

    @property
    def over(self) -> bool:
        """Nothing more will be sent than perhaps the terminal frame."""
        return self.ended_with is not None

    @property
    def generated(self) -> int:
        """Tokens drawn for all candidates, forced ones and end tokens included."""
        return sum(output.generated for output in self._outputs)

    @property
    def usage(self) -> wire.Usage:
        """Its tokens so far."""
        speculated = total([output.speculated for output in self._outputs])
        return wire.Usage(
            prompt=self._prompt,
            generated=self.generated,
            cached=min(self.clock.cached, self._prompt),
            drafted=speculated.drafted,
            accepted=speculated.accepted,
            forwards=speculated.forwards,
        )

    def preparing(self, task: asyncio.Task[None]) -> None:
        """The request is being made ready (load, template, tokens) by `task`, which ends it or calls `start`."""
        self._preparation = task

    def remember(self, recording: Recording, keeper: Book) -> None:
        """It can be taken up again, and goes on when its client has gone, if its request says so."""
        if not self.over:
            self.recording = recording
            self.keeper = keeper if recording.keep_s is not None else None

    def accept(self, accepted: wire.Accepted) -> None:
        """Tell the client that its request is taken."""
        if not self.over:
            self._accepted = accepted
            self._reply(accepted)

    def start(
        self,
        engine: Engine,
        request: Request,
        tokenizer: Tokenizer,
        stages: Sequence[TextStage],
        *,
        client: str = "",
        plan: Plan | None = None,
        held: Held | None = None,
        replay: Sequence[int] = (),
        whole: wire.FinishReason | None = None,
    ) -> None:
        """Hand the request to the engine; from here its listener calls drive everything.

        Args:
            stages: one for each candidate; they have seen the forced tokens.
            client: who asks, for fairness between clients.
            plan: how it runs, for a client that asked.
            held: what its prompt is restored from; released here, or by the engine.
            replay: the last ones of the forced tokens, which the stages have not seen: the client lacks them.
            whole: why it ended after those, if it has.

        Raises:
            ServeError: the engine takes no more requests, or could never run this one.
        """
        if self.over:
            _let_go(held)
            return
        self._begin(request, tokenizer, stages, plan, len(request.forced) - len(replay))
        (first, *_) = self._outputs
        if self._replay(first, replay):
            _let_go(held)
            return
        if whole is not None:
            _let_go(held)
            self._finish(whole)
            return
        if first.stage.hit is not None or _said_all(request):
            _let_go(held)
            self._finish("stop")
        elif first.generated >= request.max_tokens:
            _let_go(held)
            self._finish("length")
        else:
            self.clock.queued = time.monotonic()
            self._key = engine.submit(request, self, client, held=held)
            self._engine = engine

    async def take_over(
        self,
        other: Generation,
        request: Request,
        tokenizer: Tokenizer,
        stages: Sequence[TextStage],
        *,
        plan: Plan | None = None,
    ) -> None:
        """Go on in place of one that has lost its client: tell what this client lacks, then what comes.

        Args:
            stages, plan: as for `start`; the forced tokens are those that the client has.
        """
        assert other.recording is not None
        self._begin(request, tokenizer, stages, plan, len(request.forced))
        (output,) = self._outputs
        known, at = other.recording.tokens, len(request.forced)
        try:
            while at < len(known):
                if self._replay(output, known[at : at + _AT_ONCE]):
                    other.expire()
                    return
                at = min(at + _AT_ONCE, len(known))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            other.expire()
            raise
        self.clock.follow(other.clock)
        output.generated = other._outputs[0].generated
        engine, key, outcome = other._engine, other._key, other.ended_with
        if outcome is None and engine is not None:
            engine.rehear(key, self)
            self._engine, self._key = engine, key
            other._engine = None
            other._close(HANDED_OVER)
        else:
            self._finish("length" if outcome == "length" else "stop")

    def cancel(self, reason: Cause = "cancelled") -> None:
        """End now, with what has been generated; or, if its client has gone and it is to go on, do that. Idempotent."""
        if reason != "disconnected":
            self._finish(reason)
        elif self.keeper is not None and self.recording is not None and not self.over:
            self._attended, self._reply = False, _nobody
            self.keeper.keep(self.recording, self)
        else:
            self._finish("cancelled")

    @property
    def resumable(self) -> bool:
        """It draws, or has ended as it should: somebody may take it over."""
        return self.ended_with in ("stop", "length") or (self.ended_with is None and self._engine is not None)

    def expire(self) -> None:
        """Nobody has come back for it."""
        self._finish("cancelled")
        if self.recording is not None:
            self.recording.ended("cancelled", None, attended=True)

    def progress(self, phase: Literal["load", "prefill"], done: int, total: int) -> None:
        """Tell how far loading or prefill is, at most every 250 ms."""
        now = time.monotonic()
        if not self.over and now - self._reported >= PROGRESS_S:
            self._reported = now
            self._reply(wire.Progress(id=self.wire.id, phase=phase, done=done, total=total))

    def log(self) -> None:
        """One line on how it went: counts and times, never text."""
        known, times = self._accepted, self.clock.timings()
        log.info(
            "%s for %s: %d prompt and %d generated tokens, first after %.0f ms",
            self.ended_with,
            self._client or "somebody",
            self._prompt,
            self.generated,
            times.first_token,
            extra={
                "request": known.stream if known else "",
                "model": known.model if known else "",
                "outcome": self.ended_with,
                "client": self._client,
                "prompt_tokens": self._prompt,
                "generated_tokens": self.generated,
                "queue_ms": times.queue,
                "prefill_ms": times.prefill,
                "first_token_ms": times.first_token,
                "decode_ms": times.decode,
            },
        )

    def trace(self, tracer: Tracer) -> None:
        """Tell of its stages, if somebody listens."""
        if not tracer.on:
            return
        track = self._accepted.stream if self._accepted is not None else f"refused {self.wire.id}"
        usage = self.usage
        guessed = {"forwards": usage.forwards, "drafted": usage.drafted, "accepted": usage.accepted}
        self.clock.trace(
            tracer,
            track,
            client=self._client,
            key=self._key,
            outcome=self.ended_with or "",
            prompt=self._prompt,
            generated=self.generated,
            **(guessed if usage.drafted else {}),
        )

    # -- the engine's listener

    def prefilled(self, position: int, total: int) -> None:
        self.clock.read(position)
        if 0 < position < total:
            self.progress("prefill", position, total)

    def sampled(self, sample: Sample, *, eos: bool, candidate: int = 0) -> None:
        if self.over or self._outputs[candidate].reason is not None:
            return
        output = self._outputs[candidate]
        if self.clock.first is None:
            self.clock.first = time.monotonic()
        if eos:
            output.generated += 1
            return
        assert self._tokenizer is not None
        output.score(sample, self._tokenizer)
        self._draw(output, sample.token)

    def speculated(self, statistics: Statistics, candidate: int = 0) -> None:
        self._outputs[candidate].speculated = statistics

    def ended(self, reason: End, candidate: int = 0) -> None:
        if not self.over:
            self._end(self._outputs[candidate], "length" if reason == "length" else "stop")

    def failed(self, error: ServeError) -> None:
        """End with an error. Idempotent."""
        if not self.over:
            self._close(error.code)
            self._reply(error_reply(error, self.wire.id))

    # -- frames

    def _begin(
        self, request: Request, tokenizer: Tokenizer, stages: Sequence[TextStage], plan: Plan | None, had: int
    ) -> None:
        # The text has become tokens: nobody needs megabytes of it while others are drawn.
        self.wire = wire.Generate(id=self.wire.id, resumable=self.wire.resumable)
        self._prompt = len(request.prompt)
        self._tokenizer = tokenizer
        self._plan = plan
        self._drafters = request.drafts
        self._outputs = [Output(number, stage, had) for number, stage in enumerate(stages)]

    def _replay(self, output: Output, tokens: Sequence[int]) -> bool:
        """Tell tokens that were drawn before; whether it is over with them, or was before."""
        for token in tokens:
            if self.over:
                break
            self._draw(output, token)
        return self.over

    def _draw(self, output: Output, token: int) -> None:
        """A token that has text is part of an output now."""
        output.draw(token, tell=self.wire.resumable)
        if self.recording is not None:
            self.recording.drawn(token)
        self._send(output, output.stage.push(token))
        if output.stage.hit is not None:
            self._end(output, "stop")

    def _send(self, output: Output, pieces: list[Piece]) -> None:
        """One frame per run of text and per call; the tokens and ids since the last frame ride on the first."""
        for channel, piece in pieces:
            self._flush(output, channel, piece)

    def _flush(self, output: Output, channel: wire.Channel, piece: str | ToolCall) -> None:
        if not self.over:
            self._reply(output.frame(self.wire.id, channel, piece))

    def _finish(self, reason: wire.FinishReason) -> None:
        """End every output that still runs, and with them the request."""
        if self.over:
            return
        for output in self._outputs:
            self._complete(output, reason)
        self._done(reason)

    def _end(self, output: Output, reason: wire.FinishReason) -> None:
        """End one output, and the request if it was the last."""
        if self.over or output.reason is not None:
            return
        self._complete(output, reason)
        # The token that completed a stop string is nobody's.
        stopped = output.generated - 1 if output.stage.hit is not None else None
        if all(other.reason is not None for other in self._outputs):
            self._done(self._outputs[0].reason or reason, stopped)
        elif self._engine is not None:
            self._engine.cancel(self._key, output.candidate, stopped=stopped)

    def _complete(self, output: Output, reason: wire.FinishReason) -> None:
        if output.reason is not None:
            return
        output.reason = reason
        # Also when cancelled: what might have become a stop string is plain text now.
        self._send(output, output.stage.finish())
        if not output.told:
            self._flush(output, "text", "")

    def _done(self, reason: wire.FinishReason, stopped: int | None = None) -> None:
        if self.over:
            return
        self._close(reason, stopped)
        several = len(self._outputs) > 1
        first = self._outputs[0].summary() if self._outputs else None
        self._reply(
            wire.Done(
                id=self.wire.id,
                reason=reason,
                usage=self.usage,
                timings=self.clock.timings(),
                stop=first.stop if first is not None else None,
                mean_logprob=first.mean_logprob if first is not None else None,
                unparsed=first.unparsed if first is not None else [],
                candidates=[output.summary() for output in self._outputs] if several else [],
                plan=plan_reply(self._plan, self.clock.pieces, self._drafters) if self._plan is not None else None,
                speculation=speculation_reply(self._speculated()) if self._plan is not None else None,
            )
        )

    def _speculated(self) -> Statistics:
        """What guessing did for all outputs."""
        return total([output.speculated for output in self._outputs])

    def _close(self, outcome: str, stopped: int | None = None) -> None:
        """No frame but the terminal one may follow."""
        self.ended_with = outcome
        if self.recording is not None and outcome != "resumed":
            hit = self._outputs[0].stage.hit if self._outputs else None
            self.recording.ended(outcome, hit, attended=self._attended)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._engine is not None:
            self._engine.cancel(self._key, stopped=stopped, superseded=outcome in _REPLACED)
        if self._preparation is not None and self._preparation is not asyncio.current_task():
            self._preparation.cancel()
        self._forget(self)


def _nobody(frame: wire.Reply) -> None:
    """Nobody is told."""


def _let_go(held: Held | None) -> None:
    if held is not None:
        held.release()


def _said_all(request: Request) -> bool:
    """Nothing may follow the tokens of an earlier run."""
    if not request.forced:
        return False
    return request.forced[-1] in request.eos or (request.constraint is not None and request.constraint().complete)
