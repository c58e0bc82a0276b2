"""Owns what is measured of a generation on its way: when it reached which stage, and how its prompt was read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mlxbc import wire
from mlxbcd.trace import Fact, Tracer


@dataclass(slots=True)
class Clock:
    """When a request reached its stages, in seconds of the monotonic clock.

    Attributes:
        cached: tokens of the prompt that were there before any was read.
        pieces: tokens of the prompt that each forward has read, as far as the engine has told.
    """

    arrived: float = field(default_factory=time.monotonic)
    loaded: float | None = None
    queued: float | None = None
    started: float | None = None
    first: float | None = None
    cached: int = 0
    pieces: list[int] = field(default_factory=list)
    _read: list[float] = field(default_factory=list)
    _position: int = 0

    def read(self, position: int) -> None:
        """The prompt has been read up to here; the first time, it was found so."""
        if self.started is None:
            self.started = time.monotonic()
            self._position = self.cached = position
        if position > self._position:
            self.pieces.append(position - self._position)
            self._read.append(time.monotonic())
        self._position = position

    def follow(self, earlier: Clock) -> None:
        """Go on from another request's: what it had reached before this one came took this one no time."""
        self.cached = earlier.cached
        self.queued = self.arrived
        self.started = None if earlier.started is None else max(earlier.started, self.arrived)
        self.first = None if earlier.first is None else max(earlier.first, self.arrived)

    def timings(self) -> wire.Timings:
        """Spans in milliseconds; a stage never reached counts nothing."""
        now = time.monotonic()

        def span(begin: float | None, end: float | None) -> float:
            return 0.0 if begin is None else round(((now if end is None else end) - begin) * 1e3, 3)

        return wire.Timings(
            queue=span(self.queued, self.started),
            load=0.0 if self.loaded is None else span(self.arrived, self.loaded),
            prefill=span(self.started, self.first),
            first_token=0.0 if self.first is None else span(self.arrived, self.first),
            decode=span(self.first, None),
        )

    def trace(self, tracer: Tracer, track: str, **facts: Fact) -> None:
        """Tell of the stages, up to now, and of the pieces; `facts` are the whole request's."""
        now = time.monotonic()
        tracer.span("request", track, self.arrived, now, **facts)
        stages = (
            ("load", self.arrived if self.loaded is not None else None, self.loaded),
            ("prepare", self.loaded or self.arrived, self.queued),
            ("queue", self.queued, self.started),
            ("prefill", self.started, self.first),
            ("decode", self.first, now),
        )
        for name, begin, end in stages:
            if begin is not None and end is not None:
                tracer.span(name, track, begin, end)
        since = self.started or 0.0
        for tokens, at in zip(self.pieces, self._read, strict=True):
            tracer.span("piece", track, since, at, tokens=tokens)
            since = at
