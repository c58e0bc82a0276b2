"""Owns what one client is told: written at once, or kept within bounds while the client doesn't read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from mlxbc import wire
from mlxbc.framing import Codec, frame
from mlxbcd.serve.backlog import Backlog
from mlxbcd.serve.limits import Limits
from mlxbcd.serve.patience import Patience


class Outbox:
    """The outgoing half of a connection.

    Args:
        transport: where frames are written.
        limits: how much may wait for the client, and for how long.
        give_up: called with the reason when that is exceeded; it must close the connection.
        changed: called when `held` has changed.

    Attributes:
        codec: how frames are written.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: Limits,
        give_up: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        self.codec = Codec.MSGPACK
        self._transport = transport
        self._limits = limits
        self._give_up = give_up
        self._changed = changed
        self._backlog = Backlog(self._encode)
        self._paused = False
        self._closed = False
        self._stall: Patience | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "paused" if self._paused else "open"
        return f"Outbox({state}, {self._backlog})"

    @property
    def empty(self) -> bool:
        """Nothing waits here; what was written may still be on its way."""
        return not self._paused and not self._backlog

    @property
    def clogged(self) -> bool:
        """So many replies wait that the client may not ask for more."""
        return self._backlog.replies > self._limits.held

    @property
    def held(self) -> int:
        """Bytes that wait for the client."""
        return self._backlog.held + self._transport.get_write_buffer_size() if self._paused else 0

    def send(self, message: wire.Reply) -> None:
        """Write a reply, or keep it while the client doesn't read; drop it after `close`.

        Raises:
            FrameError: it is too long for a frame.
        """
        if self._closed:
            return
        if not self._paused:
            self._transport.write(frame(message, self.codec))
            return
        self._backlog.push(message)
        if self._backlog.text > self._limits.held:
            self._give_up(f"it leaves {self._backlog.text} bytes of text unread")
        else:
            self._changed()

    def close(self, last: wire.Reply | None = None) -> None:
        """Drop what waits and whatever is sent from now on, but write `last` behind what has been written."""
        if not self._closed and last is not None:
            self._transport.write(frame(last, self.codec))
        self._closed = True
        self._backlog.clear()
        self._stop_clock()

    def pause(self) -> None:
        """The transport holds enough unsent bytes."""
        self._paused = True
        if not self._closed:
            seconds = self._limits.stall_s
            silent = partial(self._give_up, f"it has read nothing for {seconds:g} s")
            self._stall = Patience(asyncio.get_running_loop(), seconds, silent)
            self._changed()

    def resume(self) -> None:
        """The client reads again: write what waited, until the transport has enough once more."""
        self._paused = False
        self._stop_clock()
        while self._backlog and not self._paused:
            self._transport.write(self._backlog.pop())
        self._changed()

    def _encode(self, message: wire.Reply) -> bytes:
        return frame(message, self.codec)

    def _stop_clock(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
