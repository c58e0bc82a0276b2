"""Owns a generation that outlives its connection: when the daemon goes away, it is continued where it was, once.

The daemon comes back with a service manager, or with the next version of itself. Since it is told the tokens that have
arrived, it need remember nothing: it continues after them, with the same draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from mlxbc import wire
from mlxbc.client import Client, Stream
from mlxbc.errors import ConnectionLost, DaemonUnavailable, DeviceError, MlxbcError, RequestTimeout, ShuttingDown
from mlxbc.request import MessageLike
from mlxbc.result import Collector, Event
from mlxbc.stream import EventStream

PATIENCE_S = 30.0
"""How long to wait for a daemon to come back."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5


class Resumable(EventStream):
    """One generation, like `Stream`, on connections of its own.

    Args:
        connect: makes a connection.
        lost: called when the daemon has gone and is being waited for.
        fields: of `Client.generate`; one output (`n` is 1).
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        lost: Callable[[], None] = lambda: None,
        patience: float = PATIENCE_S,
        **fields: Any,
    ) -> None:
        super().__init__()
        self._connect = connect
        self._prompt = prompt
        self._messages = messages
        self._fields = {**fields, "resumable": True}
        self._tells_ids = bool(fields.get("resumable"))
        self._lost = lost
        self._patience = patience
        self._collector = Collector()
        self._accepted: wire.Accepted | None = None
        self._ids: list[int] = []
        self._attempts = 0
        self._cancelled = False
        self._client = connect()
        self._stream = self._start()

    def __repr__(self) -> str:
        return f"Resumable({self._stream}, {self._attempts} attempts)"

    def __next__(self) -> Event:
        while True:
            try:
                event = next(self._stream)
            except StopIteration:
                done = self._stream.done
                if done is not None:
                    result = self._collector.result(done)
                    self._result = result if self._tells_ids else msgspec.structs.replace(result, ids=[])
                raise
            except (ConnectionLost, DeviceError, ShuttingDown) as error:
                if not error.retryable or self._attempts > 1 or self._cancelled:
                    raise
                self._come_back(error)
                continue
            new = self._sort(event)
            if new is not None:
                return new

    def cancel(self) -> None:
        """See `EventStream.cancel`. While the daemon is away, it ends the waiting."""
        self._cancelled = True
        self._stream.cancel()

    def close(self) -> None:
        """See `EventStream.close`. Its connection is closed too."""
        self._stream.close()
        self._client.close()

    def _start(self) -> Stream:
        fields = dict(self._fields)
        if self._accepted is not None:
            fields["seed"] = self._accepted.seed
            fields["resume"] = {"stream": self._accepted.stream, "tokens": self._ids}
        self._attempts += 1
        return self._client.generate(self._prompt, messages=self._messages, **fields)

    def _sort(self, event: Event) -> Event | None:
        """Take an event in; None if the caller has heard it before the connection was lost."""
        if isinstance(event, wire.Accepted):
            if self._accepted is not None:
                return None
            self._accepted = event
        elif isinstance(event, wire.Token):
            self._ids += event.ids
        self._collector.add(event)
        return event

    def _come_back(self, error: MlxbcError) -> None:
        """Wait for the daemon, and ask it for the rest.

        Raises:
            MlxbcError: the one that ended the connection; nobody came back in time.
        """
        self._lost()
        self._client.close()
        deadline, pause = time.monotonic() + self._patience, _FIRST_PAUSE_S
        while not self._cancelled and time.monotonic() < deadline:
            try:
                self._client = self._connect()
                self._stream = self._start()
                return
            except (DaemonUnavailable, ConnectionLost, RequestTimeout):
                with suppress(MlxbcError):
                    self._client.close()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise error
