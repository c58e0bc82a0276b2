"""Owns the asyncio client: what `client` does, awaited. Nothing but this and what is built on it imports asyncio.

The event loop reads the socket; every call has an event that says when there may be something to take.
Reading goes on while nobody takes: a stream that is left waiting costs the memory of its text, and never
stalls its neighbours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar, cast

import msgspec

from mlxbc import request as build
from mlxbc import wire
from mlxbc.connect import HELLO_TIMEOUT, connect
from mlxbc.errors import ConnectionLost, MlxbcError, RequestTimeout
from mlxbc.exchange import Call, Exchange, expect
from mlxbc.request import MessageLike, Numbered
from mlxbc.result import Collector, Event, Result
from mlxbc.stream import Outcome

T = TypeVar("T")
R = TypeVar("R", bound=Numbered)


class AsyncClient:
    """A connection to the daemon, made by `async with` or `connect`.

    ```python
    async with AsyncClient() as client:
        async with client.generate(messages=[{"role": "user", "content": "Hello"}]) as stream:
            async for piece in stream.text:
                print(piece, end="", flush=True)
    ```

    Args and errors are those of `mlxbc.Client`. Cancelling the task that waits for a request cancels the
    request.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        client_name: str = "mlxbc-python",
        timeout: float | None = None,
    ) -> None:
        self._path = path
        self._name = client_name
        self._timeout = timeout
        self._link: _Link | None = None

    def __repr__(self) -> str:
        return f"AsyncClient({self._link.exchange if self._link else 'not connected'})"

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> wire.Welcome:
        """Open the connection and greet the daemon.

        Raises:
            DaemonUnavailable: nobody listens.
            ProtocolMismatch: the daemon is of another version.
            RequestTimeout: it doesn't answer.
        """
        if self._link is not None:
            raise MlxbcError("this client is connected already")
        link = await _Link.open(self._path)
        try:
            patience = HELLO_TIMEOUT if self._timeout is None else min(self._timeout, HELLO_TIMEOUT)
            welcome = await link.greet(self._name, patience)
        except BaseException:
            link.transport.abort()
            await link.closed.wait()
            raise
        self._link = link
        return welcome

    async def close(self) -> None:
        """End the connection; the daemon cancels what still runs on it."""
        if self._link is not None:
            link, self._link = self._link, None
            link.exchange.fail(ConnectionLost("this client is closed"))
            link.transport.close()
            await link.closed.wait()

    @property
    def connected(self) -> bool:
        """Whether requests can be made: false before `connect`, after `close`, and once the daemon has gone."""
        return self._link is not None and self._link.exchange.error is None

    @property
    def welcome(self) -> wire.Welcome:
        """What the daemon said about itself."""
        welcome = self._connected.exchange.welcome
        assert welcome is not None
        return welcome

    # -- requests

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> AsyncStream:
        """Start a generation from exactly one of a raw `prompt`, a chat's `messages` and `fim`, a place in a file.

        `fields` are those of `wire.Generate`: model, temperature, top_p, max_tokens, seed, stop, …

        Raises:
            BadRequest: a field is unknown or out of range. What the daemon finds wrong is raised by the
            stream.
        """
        request = build.generate(wire.Generate, self._number(), prompt, messages, fields)
        return AsyncStream(self, self._start(request))

    async def ask(self, text: str, *, system: str | None = None, **fields: Any) -> str:
        """The model's whole answer to one user message."""
        async with self.generate(messages=build.conversation(text, system), **fields) as stream:
            return (await stream.wait()).text

    async def explain(
        self, prompt: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> wire.Explained:
        """How a `generate` of the same fields would be run; nothing is generated."""
        request = build.generate(wire.Explain, self._number(), prompt, messages, fields)
        return await self._call(request, wire.Explained)

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> list[int]:
        """Token ids of a text, or of a chat as the model's template renders it."""
        request = build.tokens(wire.Tokenize, self._number(), text, messages, fields)
        return (await self._call(request, wire.Tokens)).tokens

    async def render(
        self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> wire.Tokens:
        """What a model would see of a chat, as its template renders it, with the token ids. Of a text: the text."""
        request = build.tokens(wire.Tokenize, self._number(), text, messages, fields)
        seen = await self._call(request, wire.Tokens)
        return seen if text is None else msgspec.structs.replace(seen, text=text)

    async def count(
        self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> int:
        """How many tokens `tokenize` would give."""
        request = build.tokens(wire.Count, self._number(), text, messages, fields)
        return (await self._call(request, wire.Counted)).count

    async def models(self, *, memory: bool = False) -> list[wire.ModelEntry]:
        """The models on this machine, resident or not; with `memory` also what each would take there."""
        return (await self._call(self._build(wire.Models, memory=memory), wire.ModelList)).models

    async def load(
        self,
        model: str | None = None,
        *,
        keep_alive: float | None = None,
        on_progress: Callable[[wire.Progress], None] | None = None,
    ) -> wire.Loaded:
        """Make a model resident (None: the default one); `on_progress` hears of the bytes read meanwhile.

        `keep_alive` is for how many seconds it stays without a request: -1 for ever, None as it is.
        """
        return await self._call(self._build(wire.Load, model=model, keep_alive=keep_alive), wire.Loaded, on_progress)

    async def unload(self, model: str) -> wire.Unloaded:
        """Drop a resident model."""
        return await self._call(self._build(wire.Unload, model=model), wire.Unloaded)

    async def status(self) -> wire.StatusReport:
        """How the daemon is; it answers whatever the device does."""
        return await self._call(self._build(wire.Status), wire.StatusReport)

    async def ps(self) -> list[wire.Process]:
        """The resident models."""
        return (await self._call(self._build(wire.Ps), wire.ProcessList)).models

    async def watch(self, *, interval_ms: int = 250) -> AsyncIterator[wire.StatusReport]:
        """How the daemon is, at once and then whenever it has changed, until the iteration is given up."""
        waiter = self._start(self._build(wire.Watch, interval_ms=interval_ms))
        try:
            while True:
                yield expect(await waiter.next(self._timeout), wire.Change).status
        finally:
            waiter.abandon()

    async def config(self) -> wire.Settings:
        """The daemon's settings, and where each comes from."""
        return await self._call(self._build(wire.Config), wire.Settings)

    async def probe(self) -> float:
        """Seconds that a small test piece takes on the daemon's device."""
        return (await self._call(self._build(wire.Probe), wire.Probed)).seconds

    async def prime(
        self, prompt: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> wire.Primed:
        """Process a prompt now, so that a generation which begins with it starts at once."""
        request = build.generate(wire.Prime, self._number(), prompt, messages, fields)
        return await self._call(request, wire.Primed)

    async def cache(self) -> wire.CacheReport:
        """What the prefix cache holds, and how much it has helped."""
        return await self._call(self._build(wire.Cache), wire.CacheReport)

    async def clear_cache(self) -> wire.CacheCleared:
        """Empty the prefix cache, on the disk too, and forget the generations that could be resumed."""
        return await self._call(self._build(wire.CacheClear), wire.CacheCleared)

    async def ping(self) -> float:
        """Seconds until the daemon's answer."""
        began = perf_counter()
        await self._call(self._build(wire.Ping), wire.Pong)
        return perf_counter() - began

    async def shutdown(self, *, drain: bool = True) -> None:
        """Stop the daemon: with `drain` once the running requests are done, else at once."""
        await self._call(self._build(wire.Shutdown, drain=drain), wire.Bye)

    # -- plumbing

    @property
    def _connected(self) -> _Link:
        if self._link is None:
            raise MlxbcError("this client is not connected: use it in `async with`, or await connect()")
        return self._link

    def _number(self) -> int:
        return self._connected.exchange.number()

    def _build(self, kind: type[R], **fields: Any) -> R:
        return build.build(kind, self._number(), **fields)

    async def _call(
        self,
        request: Numbered,
        kind: type[T],
        on_progress: Callable[[wire.Progress], None] | None = None,
    ) -> T:
        waiter = self._start(request)
        try:
            while True:
                reply = await waiter.next(self._timeout)
                if not isinstance(reply, wire.Progress):
                    return expect(reply, kind)
                if on_progress:
                    on_progress(reply)
        except BaseException:
            waiter.abandon()
            raise

    def _start(self, request: Numbered) -> _Waiter:
        link = self._connected
        data = link.exchange.encode(request)
        waiter = _Waiter(link, request.id)
        link.write(data)
        return waiter


class AsyncStream(Outcome):
    """One generation: an async iterator over its `Accepted`, `Progress` and `Token` frames.

    Leaving its `async with` block, or `close`, cancels what still runs. The errors that end a generation are
    raised by whatever waits for it: iterating, `text` or `wait`.
    """

    def __init__(self, client: AsyncClient, waiter: _Waiter) -> None:
        super().__init__()
        self._timeout = client._timeout
        self._waiter = waiter
        self._collector = Collector()
        self._open = True

    def __repr__(self) -> str:
        state = "running" if self._open else "failed or closed" if self._result is None else self._result.reason
        return f"AsyncStream({self._waiter.call.id}, {state})"

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if not self._open:
            raise StopAsyncIteration
        try:
            reply = await self._waiter.next(self._timeout)
            if isinstance(reply, Event):
                self._collector.add(reply)
                return reply
            self._result = self._collector.result(expect(reply, wire.Done))
        except RequestTimeout:
            raise
        except BaseException:
            self.close()
            raise
        self._open = False
        raise StopAsyncIteration

    @property
    async def text(self) -> AsyncIterator[str]:
        """The model's text as it comes, without its reasoning."""
        async for event in self:
            if isinstance(event, wire.Token) and event.channel == "text" and event.text:
                yield event.text

    async def wait(self) -> Result:
        """Read to the end.

        Raises:
            MlxbcError: the generation failed, or was closed before its end.
        """
        async for _event in self:
            pass
        return self.result

    def cancel(self) -> None:
        """Ask the daemon to end the generation; the stream then ends, with reason `cancelled`."""
        if self._open:
            self._waiter.cancel()

    def close(self) -> None:
        """Cancel the generation if it still runs, and forget it."""
        if self._open:
            self._open = False
            self._waiter.abandon()


class _Link(asyncio.Protocol):
    """The transport's end of one connection."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.changed = asyncio.Event()
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, path: str | os.PathLike[str] | None) -> _Link:
        # Connecting a Unix socket is a handful of microseconds: not worth a thread.
        sock = connect(path)
        try:
            _transport, link = await asyncio.get_running_loop().create_unix_connection(cls, sock=sock)
        except BaseException:
            sock.close()
            raise
        return link

    async def greet(self, name: str, patience: float) -> wire.Welcome:
        self.transport.write(self.exchange.hello(name))
        while self.exchange.welcome is None:
            if self.exchange.error is not None:
                raise self.exchange.error
            await _wait(self.changed, patience)
        return self.exchange.welcome

    def write(self, data: bytes) -> None:
        if self.exchange.error is not None:
            raise self.exchange.error
        self.transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: the transports of other event loops, uvloop's among them, only behave like asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.exchange.receive(data)
        self.changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.exchange.end()
        self.changed.set()
        self.closed.set()


class _Waiter:
    """One call and the event that wakes whoever waits for it."""

    def __init__(self, link: _Link, number: int) -> None:
        self.link = link
        self._event = asyncio.Event()
        self.call: Call = link.exchange.open(number, self._event.set)

    async def next(self, timeout: float | None) -> wire.Reply:
        while True:
            reply = self.link.exchange.take(self.call)
            if reply is not None:
                return reply
            self._event.clear()
            await _wait(self._event, timeout)

    def cancel(self) -> None:
        self.link.write(self.link.exchange.encode(wire.Cancel(id=self.call.id)))

    def abandon(self) -> None:
        """Nobody will take this call's frames any more."""
        if self.link.exchange.is_open(self.call):
            self.link.exchange.forget(self.call)
            with suppress(MlxbcError):
                self.cancel()


async def _wait(event: asyncio.Event, timeout: float | None) -> None:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        raise RequestTimeout(f"the daemon sent nothing for {timeout:g} s; see mlxbc status") from None
