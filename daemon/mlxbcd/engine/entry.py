"""Owns a submitted request on the loop's side: what is known of it, what it holds, and who hears of it."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

from mlxbcd.errors import ServeError, outline
from mlxbcd.methods.events import End
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import Sample
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.geometry import capacity_for

log = logging.getLogger(__name__)


class Listener(Protocol):
    """What the owner of a request hears, on the loop's thread.

    `ended` once for each candidate, or `failed` once, is the last thing it hears.

    One that raises is told `failed` whatever it has heard, and nothing more.
    """

    def prefilled(self, position: int, total: int) -> None:
        """Prompt tokens processed so far; 0 when the row begins."""
        ...

    def sampled(self, sample: Sample, *, eos: bool, candidate: int) -> None:
        """A token of a candidate was drawn. With `eos` it ends the row and has no text."""
        ...

    def speculated(self, statistics: Statistics, candidate: int) -> None:
        """What guessing tokens has done for a candidate so far."""
        ...

    def ended(self, reason: End, candidate: int) -> None:
        """A candidate's row has drawn its last token."""
        ...

    def failed(self, error: ServeError) -> None:
        """The request's rows are gone."""
        ...


class Held(Protocol):
    """A prefix of a prompt that is ready to be restored, for as long as somebody holds it."""

    @property
    def length(self) -> int:
        """Tokens it covers."""
        ...

    def release(self) -> None:
        """Let it go. Idempotent."""
        ...


@dataclass(slots=True)
class Entry:
    """A submitted request on the loop's side.

    Attributes:
        client: who asked, for fairness between clients.
        since: when it was submitted, in seconds of the monotonic clock.
        total: prompt tokens, forced ones included.
        alive: its candidates that may still draw.
        position: how many of the prompt's tokens have been processed.
        started: it has, or is about to get, a state on the device.
        prefilled: its first token is out.
        held: what it will be restored from, until it has been.
    """

    key: int
    request: Request
    listener: Listener
    client: str
    since: float
    total: int
    alive: set[int]
    position: int = 0
    started: bool = False
    prefilled: bool = False
    held: Held | None = None

    def __repr__(self) -> str:
        phase = "decoding" if self.prefilled else f"{self.position}/{self.total}" if self.started else "queued"
        return f"Entry({self.key}, {phase})"

    def release(self) -> None:
        """Let what it was to be restored from go."""
        held, self.held = self.held, None
        if held is not None:
            held.release()

    def need(self, token_bytes: float) -> int:
        """Bytes that its rows' states may come to need."""
        grown = self.total + self.request.max_tokens - len(self.request.forced)
        return math.ceil(capacity_for(grown) * token_bytes) * self.request.candidates

    def fail(self, error: ServeError) -> None:
        """Tell its listener that it has failed, whatever the listener makes of that."""
        try:
            self.listener.failed(error)
        except Exception as fault:
            log.error("the listener of %r failed: %s", self, outline(fault))
