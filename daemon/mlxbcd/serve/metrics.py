"""Owns what is counted over the daemon's life: how requests ended, their tokens, and how long they took."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from mlxbc import wire

BOUNDS_MS: Final = (10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0)
"""Upper bounds of the buckets that times fall into; there is one more above them."""


@dataclass(slots=True)
class Histogram:
    """How many times fell between which bounds, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_MS) + 1))
    total: float = 0.0

    def see(self, milliseconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS_MS, milliseconds)] += 1
        self.total += milliseconds

    def report(self) -> wire.Histogram:
        """As the wire tells it."""
        return wire.Histogram(bounds=list(BOUNDS_MS), counts=list(self.counts), sum=round(self.total, 3))


@dataclass(slots=True)
class Metrics:
    """Counters that only grow."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    decode_token: Histogram = field(default_factory=Histogram)

    def see(self, outcome: str, usage: wire.Usage, timings: wire.Timings) -> None:
        """A generation has ended."""
        self.outcomes[outcome] += 1
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.generated_tokens += usage.generated
        self.queue.see(timings.queue)
        if timings.first_token:
            self.first_token.see(timings.first_token)
        if usage.generated > 1 and timings.decode:
            self.decode_token.see(timings.decode / (usage.generated - 1))

    def report(self) -> wire.Metrics:
        """As the wire tells it."""
        return wire.Metrics(
            outcomes=dict(self.outcomes),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            queue_ms=self.queue.report(),
            first_token_ms=self.first_token.report(),
            decode_token_ms=self.decode_token.report(),
        )
