"""A scripted service behind real sockets, a thread that serves it, and a client that reads whole frames."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from mlxbc import wire
from mlxbc.framing import Codec, Inbound, frame
from mlxbcd.errors import ServeError
from mlxbcd.serve.contract import Cause, Fault, Send, Work
from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.limits import Limits
from mlxbcd.serve.listen import listen
from mlxbcd.serve.server import Server

T = TypeVar("T")

PATIENCE_S = 20.0
"""How long a test waits for what must happen before it fails."""


class FakeJob:
    """A request under the test's control; `script` says what the service does with it by itself."""

    def __init__(self, service: FakeService, request: Work, reply: Send, client: str) -> None:
        self.request = request
        self.client = client
        self.cancelled = 0
        self.ended = False
        self._service = service
        self._reply = reply

    def send(self, message: wire.Reply) -> None:
        if type(message) in wire.TERMINAL and not self.ended:
            self.ended = True
            self._service.running.discard(self)
            self._service.changed()
        self._reply(message)

    def token(self, text: str, **fields: Any) -> None:
        self.send(wire.Token(id=self.request.id, text=text, **fields))

    def done(self, reason: wire.FinishReason = "stop") -> None:
        self.send(
            wire.Done(
                id=self.request.id,
                reason=reason,
                usage=wire.Usage(prompt=1, generated=1),
                timings=wire.Timings(),
            )
        )

    def fail(self, code: wire.ErrorCode) -> None:
        self.send(wire.Error(id=self.request.id, code=code, message=code, retryable=True))

    def cancel(self, reason: Cause = "cancelled") -> None:
        self.cancelled += 1
        self._service.changed()
        if not self.ended:
            self.done(reason)


class FakeService:
    """Does what the prompt says (see `_follow`); of other requests the test plays the job."""

    def __init__(self, on_fatal: Fault | None = None) -> None:
        self.jobs: list[FakeJob] = []
        self.running: set[FakeJob] = set()
        self.draining = False
        self.reloaded = 0
        self.closed = False
        self.on_fatal = on_fatal
        self._event = asyncio.Event()

    def changed(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[FakeService], bool]) -> None:
        while not condition(self):
            await self._event.wait()

    def resident(self) -> list[str]:
        return ["fake"]

    def submit(self, request: Work, reply: Send, client: str) -> FakeJob:
        if self.draining:
            raise ServeError("shutting_down", "the daemon is stopping")
        job = FakeJob(self, request, reply, client)
        self.jobs.append(job)
        self.running.add(job)
        self.changed()
        match request:
            case wire.Status():
                job.send(_report(request.id))
            case wire.Count(text=str(text)):
                job.send(wire.Counted(id=request.id, count=len(text)))
            case wire.Generate(prompt=str(prompt)):
                self._follow(job, prompt)
            case _:
                pass
        return job

    def _follow(self, job: FakeJob, prompt: str) -> None:
        match prompt.split():
            case ["count", number]:
                for n in range(int(number)):
                    job.token(f"{n} ")
                job.done("length")
            case ["flood", number]:
                for n in range(int(number)):
                    job.token(f"{n:0100d}")
            case ["refuse"]:
                self.running.discard(job)
                raise ServeError("context_too_long", "shorten the prompt", limit=7)
            case ["raise"]:
                self.running.discard(job)
                raise KeyError("secret prompt")
            case ["fault"] if self.on_fatal:
                self.on_fatal(RuntimeError("the device is gone"))

    def reload(self) -> None:
        self.reloaded += 1
        self.changed()

    async def drain(self) -> None:
        self.draining = True
        self.changed()
        await self.until(lambda service: not service.running)

    async def close(self) -> None:
        self.closed = True
        for job in list(self.running):
            job.fail("shutting_down")


def _report(request: int) -> wire.StatusReport:
    return wire.StatusReport(
        id=request,
        pid=1,
        version="0",
        uptime_s=1.0,
        state="ready",
        device="fake",
        connections=0,
        running=1,
        queued=0,
        served=0,
        failed=0,
        generated_tokens=0,
        memory_active=0,
        memory_cache=0,
        models=[],
    )


class FakeDaemon:
    """A server with a `FakeService` on a loop and thread of its own."""

    def __init__(self, path: Path, limits: Limits, user: int | None) -> None:
        self.path = path
        self.service: FakeService
        self.server: Server
        self.lifecycle: Lifecycle
        self.loop: asyncio.AbstractEventLoop
        self.thread_id = 0
        self._limits = limits
        self._user = user
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._error: BaseException | None = None

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.do(self.lifecycle.stop, drain=False)
        self.join()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._failed)
        self.thread_id = threading.get_native_id()
        self.lifecycle = Lifecycle()
        self.service = FakeService()
        self.server = Server(self.service, self.lifecycle, limits=self._limits, user=self._user)
        with listen(self.path) as listener:
            self.loop.call_soon(self._ready.set)
            await self.server.serve(listener.socket)

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = context.get("exception") or RuntimeError(context["message"])

    def do(self, action: Callable[..., T], *args: Any, **fields: Any) -> T:
        """Call `action` on the server's thread, and wait for its result."""

        async def call() -> T:
            return action(*args, **fields)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE_S)

    def until(self, condition: Callable[[FakeService], bool]) -> None:
        """Wait until `condition` holds of the service."""
        waiting = asyncio.wait_for(self.service.until(condition), PATIENCE_S)
        asyncio.run_coroutine_threadsafe(waiting, self.loop).result()

    def job(self, index: int = -1) -> FakeJob:
        """A job that was submitted; the first is awaited."""
        self.until(lambda service: bool(service.jobs))
        return self.service.jobs[index]

    def settled(self) -> None:
        """Wait until no connection is open and nothing is held for one."""

        async def settle() -> None:
            await self.server._empty.wait()

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(settle(), PATIENCE_S), self.loop).result()
        assert self.do(lambda: self.server.ledger.total) == 0

    def client(self, codec: Codec = Codec.MSGPACK, *, hello: bool = True, **fields: Any) -> FakeClient:
        client = FakeClient(self.path, codec)
        if hello:
            client.say(wire.Hello(proto=wire.PROTOCOL, client="test", **fields))
            assert isinstance(client.read(), wire.Welcome)
        return client


class FakeClient:
    """A blocking socket that writes any bytes and reads whole replies."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self.codec = codec
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise
        self._inbound: Inbound[wire.Reply] = Inbound(wire.Reply, codec=codec, limit=wire.FRAME_CEILING)
        self._replies: list[wire.Reply] = []

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def say(self, *messages: msgspec.Struct) -> None:
        self.socket.sendall(b"".join(frame(message, self.codec) for message in messages))

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def body(self, data: bytes) -> None:
        """Send a frame with this body."""
        if self.codec is Codec.JSON:
            self.raw(data + b"\n")
        else:
            self.raw(len(data).to_bytes(4, "big") + data)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def read(self) -> wire.Reply | None:
        """The next reply; None at the end of the connection."""
        while not self._replies:
            try:
                data = self.socket.recv(262144)
            except ConnectionResetError:
                data = b""
            if not data:
                assert not self._inbound.pending, "the connection ended inside a frame"
                return None
            self._replies += self._inbound.feed(data)
        return self._replies.pop(0)

    def rest(self) -> list[wire.Reply]:
        """All replies until the connection ends."""
        return list(iter(self.read, None))

    def until_terminal(self, request: int) -> list[wire.Reply]:
        """Replies to `request` up to its terminal one; replies to others are kept."""
        mine: list[wire.Reply] = []
        others: list[wire.Reply] = []
        while not mine or type(mine[-1]) not in wire.TERMINAL:
            reply = self.read()
            assert reply is not None, f"the connection ended after {mine}"
            (mine if getattr(reply, "id", None) == request else others).append(reply)
        self._replies[:0] = others
        return mine

    def error(self) -> wire.Error:
        reply = self.read()
        assert isinstance(reply, wire.Error), reply
        return reply

    def pinged(self, request: int = 999) -> bool:
        """Whether the connection still serves requests; other replies before the answer are kept."""
        self.say(wire.Ping(id=request))
        return self.until_terminal(request) == [wire.Pong(id=request)]


def settled(count: Callable[[], T]) -> T:
    """What `count` says once it stays the same: how often threads went to sleep, when the last one has."""
    before = count()
    while True:
        time.sleep(0.05)
        now = count()
        if now == before:
            return now
        before = now


@contextlib.contextmanager
def fake_daemon(directory: Path, user: int | None = None, **limits: Any) -> Iterator[FakeDaemon]:
    """A running daemon with a scripted service. At the end it must stop cleanly and hold nothing."""
    with FakeDaemon(directory / "mlxbc.sock", Limits(**limits), user) as daemon:
        yield daemon
    assert not daemon.service.running
    assert daemon.server.connections == 0
    assert daemon.server.ledger.total == 0
