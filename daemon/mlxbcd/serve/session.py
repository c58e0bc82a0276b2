"""Owns one connection: what its client may say when, the requests it runs, and how it ends.

The rules, in the order in which they matter:

* The first byte chooses the codec. A msgpack client says `hello` first; on JSON lines it is optional.
* Every request ends with exactly one terminal frame, unless the connection ends before it.
* A frame that can't be understood is refused by name. The connection goes on if its framing is intact, else
  it is told why it ends.
* End of input means that a msgpack client is gone (its requests are cancelled at once), and that a
  JSON-lines client has no more requests (running ones finish).
* A client that doesn't read is not waited for: its replies are kept, within bounds, and then it is dropped.

Nothing here blocks or awaits, and an idle connection has no timer.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Final, Protocol, cast

import msgspec

from mlxbc import wire
from mlxbc.framing import Codec, FrameError, Inbound
from mlxbcd import __version__
from mlxbcd.errors import ServeError
from mlxbcd.serve.call import Call
from mlxbcd.serve.contract import Service, Work
from mlxbcd.serve.limits import Ledger, Limits
from mlxbcd.serve.logs import where
from mlxbcd.serve.outbox import Outbox
from mlxbcd.serve.patience import Patience
from mlxbcd.serve.peer import hung_up, peer_of
from mlxbcd.serve.replies import error_reply, mismatch

log = logging.getLogger(__name__)

BURST: Final = 64
"""Frames of one connection that are handled before others get their turn."""


class Host(Protocol):
    """What a session needs of the server it belongs to."""

    service: Service
    limits: Limits
    ledger: Ledger
    user: int

    @property
    def connections(self) -> int:
        """How many are open."""

    def enter(self, session: Session) -> bool:
        """A connection began; False if there are too many already."""

    def leave(self, session: Session) -> None:
        """A connection ended."""

    def stop(self, *, drain: bool) -> None:
        """A client asks the daemon to stop."""

    def hand_over(self) -> bool:
        """Another daemon takes the path, and this one ends; False if the path isn't its own to give."""


class State(IntEnum):
    """How far a connection is. It only ever moves down this list."""

    NEW = 0
    """Nothing was understood yet."""
    OPEN = 1
    FINISHING = 2
    """No more requests are taken; it closes when the running ones have ended and everything is written."""
    ENDED = 3
    """Nothing more is said; what was written may still leave."""


class Session(asyncio.Protocol):
    """One connection. `host` is the server it belongs to."""

    _transport: asyncio.Transport
    _outbox: Outbox
    _input: Iterator[wire.Request]

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self._loop = asyncio.get_running_loop()
        self._state = State.NEW
        self._inbound: Inbound[wire.Request] = Inbound(wire.Request)
        self._running: dict[int, Call] = {}
        self._newest: dict[str, Call] = {}
        self._client = ""
        self._pid = 0
        self._refusal: ServeError | None = None
        self._reading = True
        self._held = 0
        self._timer: Patience | None = None

    def __repr__(self) -> str:
        return (
            f"Session({self._client!r} pid {self._pid}, {self._state.name.lower()}, "
            f"{len(self._running)} running, {self._outbox})"
        )

    # ---------------------------------------------------------------------------------- transport's events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._outbox = Outbox(self._transport, self._limits, self._give_up, self._account)
        self._refusal = self._admit()
        if self._refusal:
            # The peer is told in its own codec, so its first byte is awaited, though not for long.
            self._arm(self._limits.hello_s, self.drop)

    def data_received(self, data: bytes) -> None:
        if self._state >= State.FINISHING:
            return
        self._input = self._inbound.feed(data)
        self._outbox.codec = self._inbound.codec or Codec.MSGPACK
        if self._refusal:
            self._end(self._refusal)
        else:
            self._pump()

    def eof_received(self) -> bool:
        connection = self._transport.get_extra_info("socket")
        gone = self._outbox.codec is Codec.MSGPACK or hung_up(connection.fileno())
        if gone or self._state is State.ENDED:
            self._close(self._limits.linger_s)
            return False
        try:
            last = self._inbound.close()
            if last is not None:
                self._handle(last)
        except FrameError as error:
            self._refuse_frame(error)
        self.finish()
        return self._state is State.FINISHING

    def connection_lost(self, exc: Exception | None) -> None:
        self._abandon()
        self._host.ledger.hold(self, 0)
        self._host.leave(self)

    def pause_writing(self) -> None:
        self._outbox.pause()

    def resume_writing(self) -> None:
        self._outbox.resume()
        if not self._reading and not self._outbox.clogged:
            self._loop.call_soon(self._pump)
        self._settle()

    # ---------------------------------------------------------------------------------------- what is said

    def _admit(self) -> ServeError | None:
        """Why this peer is not served, if it isn't."""
        room = self._host.enter(self)
        try:
            peer = peer_of(self._transport.get_extra_info("socket"))
        except OSError:
            log.warning("refused a connection of an unknown user")
            return ServeError("unauthorized", "the daemon can't tell who you are, so it doesn't serve you")
        self._pid = peer.pid
        if peer.uid != self._host.user:
            log.warning("refused a connection of user %d", peer.uid)
            return ServeError("unauthorized", "this daemon serves only the user who started it; start one")
        if not room:
            most = self._limits.connections
            return ServeError("queue_full", f"{most} connections are open already: close one, or retry later")
        return None

    def _pump(self) -> None:
        """Handle what was read, a burst at a time, and read on only when all of it is handled."""
        for _ in range(BURST):
            if self._state >= State.FINISHING:
                return
            if self._outbox.clogged:
                break
            if not self._step():
                self._caught_up()
                return
        if self._reading:
            self._reading = False
            self._transport.pause_reading()
        if not self._outbox.clogged:
            self._loop.call_soon(self._pump)

    def _step(self) -> bool:
        """Handle one frame; False if no whole one is left."""
        try:
            message = next(self._input, None)
        except FrameError as error:
            self._input = self._inbound.feed(b"")
            self._refuse_frame(error)
            return True
        if message is None:
            return False
        self._handle(message)
        return True

    def _caught_up(self) -> None:
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        self._account()
        if self._state is State.NEW and self._outbox.codec is Codec.MSGPACK and self._timer is None:
            self._arm(self._limits.hello_s, self._no_hello)

    def _handle(self, message: wire.Request) -> None:
        if self._state is State.NEW:
            self._open(message)
        elif isinstance(message, wire.Hello):
            self._refuse(ServeError("bad_request", "hello is said once, before anything else"), None)
        else:
            self._serve(message)

    def _open(self, message: wire.Request) -> None:
        """Handle the first message."""
        if isinstance(message, wire.Hello):
            self._greet(message)
        elif self._outbox.codec is Codec.JSON:
            self._state = State.OPEN
            self._serve(message)
        else:
            self._end(ServeError("bad_request", "a msgpack connection begins with hello"), message.id)

    def _greet(self, hello: wire.Hello) -> None:
        if hello.proto != wire.PROTOCOL:
            self._end(mismatch(hello))
            return
        self._disarm()
        self._state = State.OPEN
        self._client = hello.client
        self._inbound.limit = hello.max_frame
        self._outbox.send(
            wire.Welcome(
                proto=wire.PROTOCOL,
                server="mlxbcd",
                version=__version__,
                pid=os.getpid(),
                models=self._host.service.resident(),
                max_frame=hello.max_frame,
            )
        )

    def _serve(self, message: Work | wire.Cancel | wire.Ping | wire.Shutdown) -> None:
        call = self._running.get(message.id)
        if isinstance(message, wire.Cancel):
            if call is not None:
                call.cancel()
        elif call is not None:
            self._refuse(ServeError("bad_request", f"request {message.id} is still running"), message.id)
        elif isinstance(message, wire.Ping):
            self._outbox.send(wire.Pong(id=message.id))
        elif isinstance(message, wire.Shutdown):
            self._shut_down(message)
        elif len(self._running) >= self._limits.requests:
            text = f"{self._limits.requests} requests of this connection are running: wait for one to end"
            self._refuse(ServeError("queue_full", text), message.id)
        else:
            self._submit(message)

    def _shut_down(self, message: wire.Shutdown) -> None:
        log.info("told to %s by %r (pid %d)", "hand over" if message.handover else "stop", self._client, self._pid)
        if not message.handover:
            self._outbox.send(wire.Bye(id=message.id))
            self._host.stop(drain=message.drain)
        elif self._host.hand_over():
            self._outbox.send(wire.Bye(id=message.id))
        else:
            text = "a service manager holds the path of this daemon; replace it with: mlxbc service restart"
            self._refuse(ServeError("bad_request", text), message.id)

    def _submit(self, request: Work) -> None:
        send = self._send_status if isinstance(request, wire.Status) else self._outbox.send
        key = request.supersede if isinstance(request, wire.Generate | wire.Prime) else None
        call = self._running[request.id] = Call(request.id, send, self._ended, key)
        if key is not None:
            older, self._newest[key] = self._newest.get(key), call
            if older is not None:
                older.cancel("superseded")
        try:
            call.start(self._host.service.submit(request, call.reply, f"{self._client}[{self._pid}]"))
        except ServeError as error:
            call.end(error)
        except Exception as error:
            log.error("%s failed to start: %s", type(request).__name__, where(error))
            call.end(ServeError("internal", "the request could not be started; see the daemon's log"))

    def _send_status(self, message: wire.Reply) -> None:
        """Only the front knows how many connections there are."""
        if isinstance(message, wire.StatusReport):
            message = msgspec.structs.replace(message, connections=self._host.connections)
        self._outbox.send(message)

    # ------------------------------------------------------------------------------------- what is refused

    def _refuse(self, error: ServeError, request: int | None) -> None:
        """Refuse one message. The connection, and a running request of the same id, go on."""
        reply = error_reply(error, request)
        if request in self._running:
            reply.data["still_running"] = True
        self._outbox.send(reply)

    def _refuse_frame(self, error: FrameError) -> None:
        refusal = ServeError(error.code, error.message)
        if error.fatal:
            self._end(refusal, error.request_id)
        else:
            self._refuse(refusal, error.request_id)

    def _no_hello(self) -> None:
        self._end(ServeError("timeout", f"no hello came within {self._limits.hello_s:g} s"))

    # ----------------------------------------------------------------------------------------- how it ends

    def finish(self) -> None:
        """Take no more requests, and close when those that run have ended."""
        if self._state < State.FINISHING:
            self._state = State.FINISHING
        self._settle()

    def fail(self, error: ServeError) -> None:
        """End every running request, and then the connection, with `error`."""
        for call in list(self._running.values()):
            call.end(error)
        self._outbox.close(error_reply(error, None))
        self._close(self._limits.linger_s)

    def drop(self) -> None:
        """Cancel everything and close at once, whatever is still unwritten."""
        self._abandon()
        self._transport.abort()

    def overflow(self) -> None:
        """All connections together hold too much, and this one most of it."""
        self._give_up("too much is buffered, most of it here")

    def _give_up(self, reason: str) -> None:
        log.warning("dropped a client: %s: %r", reason, self)
        self.drop()

    def _ended(self, call: Call) -> None:
        """A request had its terminal reply."""
        self._running.pop(call.id, None)
        if call.supersede is not None and self._newest.get(call.supersede) is call:
            del self._newest[call.supersede]
        self._settle()

    def _settle(self) -> None:
        if self._state is State.FINISHING and not self._running and self._outbox.empty:
            self._close(self._limits.stall_s)

    def _end(self, error: ServeError, request: int | None = None) -> None:
        """Say why nothing more of this connection can be trusted, and end it.

        Input is read and dropped for a while: a client that is still writing a long frame would otherwise
        find a broken pipe instead of the reason.
        """
        if self._state is State.ENDED:
            return
        self._outbox.close(error_reply(error, request))
        self._abandon()
        self._arm(self._limits.linger_s, self._transport.abort)
        if not self._reading:
            self._transport.resume_reading()
        self._transport.write_eof()

    def _close(self, within: float) -> None:
        """Close when everything written has left, or after `within` seconds without."""
        self._abandon()
        self._arm(within, self._transport.abort)
        self._transport.close()

    def _abandon(self) -> None:
        """Cancel what runs, and drop what waits."""
        self._state = State.ENDED
        self._disarm()
        self._outbox.close()
        for call in list(self._running.values()):
            call.cancel("disconnected")

    # ------------------------------------------------------------------------------------- time and memory

    def _account(self) -> None:
        held = self._inbound.pending + self._outbox.held
        if held != self._held:
            self._held = held
            self._host.ledger.hold(self, held)

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        """Let the one timer of this connection do `action`; it runs before the hello, and at the end."""
        self._disarm()
        self._timer = Patience(self._loop, seconds, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
