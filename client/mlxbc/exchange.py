"""Owns the client's half of a connection without input or output: ids, and which frame is for which call.

Both clients feed it the bytes they read and take frames out per call; they differ only in how they wait.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from mlxbc import __version__, wire
from mlxbc.errors import BadRequest, ConnectionLost, FrameTooLarge, MlxbcError, ProtocolMismatch, from_wire
from mlxbc.framing import Codec, FrameError, Inbound, frame

T = TypeVar("T")

LOST = "the connection to the daemon ended before the request did; ask again"


class Call:
    """One request in flight.

    Attributes:
        id: its number on the wire.
        frames: what came for it and nobody has taken yet.
        wake: called whenever there may be something new to take.
    """

    __slots__ = ("frames", "id", "wake")

    def __init__(self, number: int, wake: Callable[[], None]) -> None:
        self.id = number
        self.frames: deque[wire.Reply] = deque()
        self.wake = wake

    def __repr__(self) -> str:
        return f"Call({self.id}, {len(self.frames)} frames waiting)"


class Exchange:
    """The state of one msgpack connection, seen from the client.

    Attributes:
        welcome: the daemon's answer to `hello`, once it came.
        error: why nothing more will come, once that is so.
    """

    def __init__(self) -> None:
        self.welcome: wire.Welcome | None = None
        self.error: MlxbcError | None = None
        self._inbound: Inbound[wire.Reply] = Inbound(wire.Reply, codec=Codec.MSGPACK, limit=wire.FRAME_CEILING)
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        state = "failed" if self.error else "ready" if self.welcome else "new"
        return f"Exchange({state}, {len(self._calls)} calls)"

    def hello(self, client: str) -> bytes:
        """The first frame to write."""
        greeting = wire.Hello(proto=wire.PROTOCOL, client=client, version=__version__, max_frame=wire.FRAME_CEILING)
        return frame(greeting, Codec.MSGPACK)

    def encode(self, request: wire.Request) -> bytes:
        """The bytes of a request.

        Raises:
            BadRequest: it holds what no message can say.
            FrameTooLarge: the daemon has said that it would refuse them.
        """
        limit = self.welcome.max_frame if self.welcome else wire.FRAME_LIMIT
        try:
            data = frame(request, Codec.MSGPACK)
        except FrameError:
            raise FrameTooLarge(f"a request has at most {wire.FRAME_CEILING} bytes; send less text") from None
        except UnicodeEncodeError:
            raise BadRequest("a text of the request is not UTF-8") from None
        except RecursionError:
            raise BadRequest("a value of the request is nested too deeply") from None
        if len(data) - 4 > limit:
            raise FrameTooLarge(f"the request has {len(data) - 4} bytes, the daemon takes {limit}; send less text")
        return data

    def number(self) -> int:
        """An id for the next request; none is used twice on one connection."""
        return next(self._numbers)

    def open(self, number: int, wake: Callable[[], None] = lambda: None) -> Call:
        """Collect what will come for request `number`, from now on."""
        call = Call(number, wake)
        self._calls[number] = call
        return call

    def is_open(self, call: Call) -> bool:
        """Whether the call's last frame has yet to be taken."""
        return call.id in self._calls

    def forget(self, call: Call) -> None:
        """Drop what still comes for a call."""
        self._calls.pop(call.id, None)

    def take(self, call: Call) -> wire.Reply | None:
        """The next frame of a call, or None if it has yet to come.

        Raises:
            RequestFailed: the frame is an error.
            MlxbcError: nothing more will come.
        """
        if call.frames:
            reply = call.frames.popleft()
            if isinstance(reply, wire.TERMINAL):
                self.forget(call)
            if isinstance(reply, wire.Error):
                raise from_wire(reply)
            return reply
        if self.error is not None:
            raise self.error
        return None

    def receive(self, data: bytes) -> None:
        """Sort what was read into the calls it is for."""
        while self.error is None:
            try:
                for reply in self._inbound.feed(data):
                    self._sort(reply)
                return
            except FrameError as error:
                self._refuse(error)
                data = b""

    def end(self) -> None:
        """The daemon closed the connection."""
        self.fail(ConnectionLost(LOST))

    def fail(self, error: MlxbcError) -> None:
        """Nothing more will come; frames already here can still be taken."""
        if self.error is None:
            self.error = error
        for call in list(self._calls.values()):
            call.wake()

    def _sort(self, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Welcome):
            self.welcome = reply
        elif reply.id is None:
            self.fail(from_wire(reply))
        elif call := self._calls.get(reply.id):
            call.frames.append(reply)
            call.wake()

    def _refuse(self, error: FrameError) -> None:
        # A newer daemon may send kinds of frames that this client has never heard of: those are skipped. A
        # known kind that doesn't decode may have been the request's last frame, so its call must not wait for
        # another.
        if error.unknown_kind:
            return
        mismatch = ProtocolMismatch(
            f"cannot read the daemon's answer ({error.message}); install one version of both, restart it"
        )
        call = None if error.fatal or error.request_id is None else self._calls.get(error.request_id)
        if call is None:
            self.fail(mismatch)
        else:
            call.frames.append(wire.Error(id=call.id, code="proto_mismatch", message=str(mismatch)))
            call.wake()


def expect(reply: wire.Reply, kind: type[T]) -> T:
    """`reply`, if the daemon answered as the protocol says.

    Raises:
        ProtocolMismatch: it didn't.
    """
    if not isinstance(reply, kind):
        name = type(reply).__name__.lower()
        raise ProtocolMismatch(f"the daemon answered with an unexpected {name!r} frame; restart it")
    return reply
