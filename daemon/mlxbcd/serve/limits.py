"""Owns the front's bounds: what one connection and all of them may hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a server. Times are seconds, sizes bytes.

    Attributes:
        connections: open at once; more are told `queue_full`.
        requests: running at once on one connection; more are told `queue_full`.
        held: of generated text kept for a client that does not read; past it the client is dropped. Also of
            other replies; past that nothing more is read from the client until it reads.
        buffered: read but incomplete, or written but unread, over all connections; past it the connection
            that holds most is dropped.
        stall_s: how long a client may read nothing while replies wait.
        hello_s: how long a msgpack client may take from its first byte to a whole `hello`.
        linger_s: how long a connection that has been told why it ends may take to go.
        drain_s: how long a stop signal waits for running requests; below the time after which service
            managers kill.
        close_s: how long the service may take to close.
    """

    connections: int = 512
    requests: int = 256
    held: int = 1024 * 1024
    buffered: int = 256 * 1024 * 1024
    stall_s: float = 30.0
    hello_s: float = 5.0
    linger_s: float = 2.0
    drain_s: float = 45.0
    close_s: float = 10.0


class Holder(Protocol):
    """Somebody who holds bytes."""

    def overflow(self) -> None:
        """Let go of everything held: the total is over its bound, and nobody holds more."""


class Ledger:
    """How many bytes each connection holds, and that all together stay under a bound."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[Holder, int] = {}

    def __repr__(self) -> str:
        return f"Ledger({self.total} of {self.limit} bytes, {len(self._held)} holders)"

    def hold(self, holder: Holder, size: int) -> None:
        """Say that `holder` now holds `size` bytes; zero forgets it."""
        before = self._held.pop(holder, 0)
        if size:
            self._held[holder] = size
        self.total += size - before
        if self.total > self.limit:
            largest = max(self._held, key=self._held.__getitem__)
            self.hold(largest, 0)
            largest.overflow()
