"""Owns a scripted daemon for tests of the client: a real socket in front, a function of the test behind it.

The script runs in a thread, once for each connection, and talks in whole messages. Whatever goes wrong in it, an
assertion included, fails the test when the `with` block ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from mlxbc import __version__, wire
from mlxbc.framing import Codec, Inbound, frame

T = TypeVar("T", bound=wire.Request)

PATIENCE = 10.0
"""Seconds after which a script that still waits for its client fails."""


class Gone(Exception):
    """The client closed the connection."""


class Session:
    """One connection, seen from the script."""

    def __init__(self, sock: socket.socket, pid: int, max_frame: int) -> None:
        self.pid = pid
        self.max_frame = max_frame
        self.hello: wire.Hello | None = None
        self._socket = sock
        self._inbound: Inbound[wire.Request] = Inbound(wire.Request, codec=Codec.MSGPACK, limit=wire.FRAME_CEILING)
        self._waiting: list[wire.Request] = []

    def receive(self, kind: type[T]) -> T:
        """The next message, which must be of this kind."""
        while not self._waiting:
            data = self._socket.recv(1 << 16)
            if not data:
                raise Gone
            self._waiting += self._inbound.feed(data)
        message = self._waiting.pop(0)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
        return message

    def send(self, *replies: wire.Reply) -> None:
        """Write messages, all in one piece."""
        self.send_bytes(b"".join(frame(reply, Codec.MSGPACK) for reply in replies))

    def send_bytes(self, data: bytes) -> None:
        """Write anything at all."""
        self._socket.sendall(data)

    def welcome(self) -> None:
        """Shake hands."""
        self.hello = self.receive(wire.Hello)
        self.send(
            wire.Welcome(
                proto=wire.PROTOCOL,
                server="fake",
                version=__version__,
                pid=self.pid,
                models=["tiny"],
                max_frame=self.max_frame,
            )
        )

    def until_gone(self) -> None:
        """Wait until the client hangs up, whatever it still says."""
        while True:
            try:
                self.receive(wire.Request)
            except Gone:
                return


Script = Callable[[Session], None]


class FakeDaemon:
    """Listens at `path` and runs `script` for each connection, after the handshake if `greet`.

    With `hang_up` the end of the `with` block ends the connections; else it waits until the client has.
    """

    def __init__(
        self,
        path: Path,
        script: Script,
        *,
        greet: bool = True,
        pid: int | None = None,
        max_frame: int = wire.FRAME_LIMIT,
        hang_up: bool = False,
    ) -> None:
        self.path = path
        self.connections = 0
        self._script = script
        self._greet = greet
        self._pid = os.getpid() if pid is None else pid
        self._max_frame = max_frame
        self._hang_up = hang_up
        self._hung_up = False
        self._sockets: list[socket.socket] = []
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)

    def __enter__(self) -> FakeDaemon:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._hang_up:
            self._hung_up = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # its script has ended
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE + 5)
        # What went wrong in the script explains what went wrong in the test, not the other way round.
        if self._errors:
            raise self._errors[0]

    def close(self) -> None:
        """Take no more connections, as if the daemon had ended."""
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self.path.unlink()

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _peer = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(sock)
            self._start(lambda sock=sock: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(PATIENCE)
            session = Session(sock, self._pid, self._max_frame)
            try:
                if self._greet:
                    session.welcome()
                self._script(session)
            except Gone:
                pass
            except BaseException as error:
                if not (self._hung_up and isinstance(error, OSError)):
                    self._errors.append(error)


def accepted(request: wire.Generate, **fields: int) -> wire.Accepted:
    """The first frame of an answer."""
    return wire.Accepted(id=request.id, stream="0f" * 16, seed=7, model=request.model or "tiny", **fields)


def done(request: wire.Generate, reason: wire.FinishReason = "stop", *, generated: int = 3) -> wire.Done:
    """The last frame of an answer."""
    return wire.Done(
        id=request.id,
        reason=reason,
        usage=wire.Usage(prompt=5, generated=generated, cached=2),
        timings=wire.Timings(prefill=20.0, first_token=25.0, decode=100.0),
    )


def answering(*pieces: str, reason: wire.FinishReason = "stop") -> Script:
    """A script that gives every request of its connection the same answer."""

    def script(session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            session.send(accepted(request))
            for piece in pieces:
                session.send(wire.Token(id=request.id, text=piece))
            session.send(done(request, reason, generated=len(pieces)))

    return script
