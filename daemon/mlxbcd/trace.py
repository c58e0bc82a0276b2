"""Owns the trace: spans of what happens, made only while somebody listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Fact: TypeAlias = int | float | str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        name: what it was.
        track: whose it was: a request's stream id, or a device's work.
        begin: seconds of the monotonic clock.
        seconds: how long it took.
        facts: numbers and names that belong to it; never text of a prompt or an answer.
    """

    name: str
    track: str
    begin: float
    seconds: float
    facts: dict[str, Fact]


Sink: TypeAlias = Callable[[Span], None]


class Tracer:
    """Passes spans to whoever listens. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def __repr__(self) -> str:
        return f"Tracer({len(self._sinks)} listeners)"

    @property
    def on(self) -> bool:
        """Somebody listens; if not, there is no reason to gather facts."""
        return bool(self._sinks)

    def listen(self, sink: Sink) -> Callable[[], None]:
        """Have `sink` told of every span; what is returned ends that."""
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def span(self, name: str, track: str, begin: float, end: float | None = None, **facts: Fact) -> None:
        """Tell of something that began at `begin` and has ended, at `end` or just now. Costs nothing unheard."""
        if self._sinks:
            seconds = (time.monotonic() if end is None else end) - begin
            span = Span(name, track, begin, max(0.0, seconds), facts)
            for sink in list(self._sinks):
                sink(span)
