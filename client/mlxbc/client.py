"""Owns the blocking client: one socket, many requests at once, no event loop.

Whoever needs a frame reads the socket for everybody: the first thread that waits becomes the reader, sorts
what comes into the calls it is for, and hands the turn on as soon as its own frame is there. So a client may
run several streams from one thread or from several, and no background thread exists.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from mlxbc import request as build
from mlxbc import wire
from mlxbc.connect import HELLO_SOON, HELLO_TIMEOUT, connect
from mlxbc.errors import ConnectionLost, MlxbcError, RequestTimeout
from mlxbc.exchange import LOST, Call, Exchange, expect
from mlxbc.request import MessageLike, Numbered
from mlxbc.result import Collector, Event
from mlxbc.stream import EventStream

T = TypeVar("T")
R = TypeVar("R", bound=Numbered)

_READ = 1 << 16


class Client:
    """A connection to the daemon.

    ```python
    with Client() as client:
        with client.generate(messages=[{"role": "user", "content": "Hello"}]) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)
    ```

    Args:
        path: the daemon's socket; None finds the user's own (see `mlxbc.paths`).
        client_name: how the daemon calls this program in its accounts.
        timeout: longest silence of the daemon in seconds while something is awaited; None waits for ever.
        on_starting: told if the daemon doesn't say welcome at once: mostly this very connection has made it start.

    Raises:
        DaemonUnavailable: nobody listens.
        ProtocolMismatch: the daemon is of another version.
        RequestTimeout: it doesn't answer.

    An exception that interrupts a read or a write from outside (`KeyboardInterrupt`) closes the connection,
    since bytes may have been lost with it. To cancel on Ctrl-C and go on, call `Stream.cancel` from a signal
    handler.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        client_name: str = "mlxbc-python",
        timeout: float | None = None,
        on_starting: Callable[[], None] | None = None,
    ) -> None:
        self._exchange = Exchange()
        self._turn = threading.Condition()
        self._reader: int | None = None
        self._sending = threading.Lock()
        self._timeout = timeout
        self._socket = connect(path)
        try:
            self.welcome: wire.Welcome = self._greet(client_name, on_starting)
        except BaseException:
            self._socket.close()
            raise

    def __repr__(self) -> str:
        return f"Client(pid={self.welcome.pid}, {self._exchange})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the daemon cancels what still runs on it."""
        self._hang_up(ConnectionLost("this client is closed"))
        self._socket.close()

    # -- requests

    def generate(
        self, prompt: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> Stream:
        """Start a generation from exactly one of a raw `prompt`, a chat's `messages` and `fim`, a place in a file.

        `fields` are those of `wire.Generate`: model, temperature, top_p, max_tokens, seed, stop, …

        Raises:
            BadRequest: a field is unknown or out of range. What the daemon finds wrong is raised by the
            stream.
        """
        request = build.generate(wire.Generate, self._exchange.number(), prompt, messages, fields)
        return Stream(self, self._start(request))

    def ask(self, text: str, *, system: str | None = None, **fields: Any) -> str:
        """The model's whole answer to one user message."""
        with self.generate(messages=build.conversation(text, system), **fields) as stream:
            return stream.wait().text

    def explain(
        self, prompt: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> wire.Explained:
        """How a `generate` of the same fields would be run; nothing is generated."""
        request = build.generate(wire.Explain, self._exchange.number(), prompt, messages, fields)
        return self._call(request, wire.Explained)

    def tokenize(
        self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> list[int]:
        """Token ids of a text, or of a chat as the model's template renders it."""
        request = build.tokens(wire.Tokenize, self._exchange.number(), text, messages, fields)
        return self._call(request, wire.Tokens).tokens

    def render(
        self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any
    ) -> wire.Tokens:
        """What a model would see of a chat, as its template renders it, with the token ids. Of a text: the text."""
        request = build.tokens(wire.Tokenize, self._exchange.number(), text, messages, fields)
        seen = self._call(request, wire.Tokens)
        return seen if text is None else msgspec.structs.replace(seen, text=text)

    def count(self, text: str | None = None, *, messages: Sequence[MessageLike] | None = None, **fields: Any) -> int:
        """How many tokens `tokenize` would give."""
        request = build.tokens(wire.Count, self._exchange.number(), text, messages, fields)
        return self._call(request, wire.Counted).count

    def models(self, *, memory: bool = False) -> list[wire.ModelEntry]:
        """The models on this machine, resident or not; with `memory` also what each would take there."""
        return self._call(self._build(wire.Models, memory=memory), wire.ModelList).models

    def load(
        self,
        model: str | None = None,
        *,
        keep_alive: float | None = None,
        on_progress: Callable[[wire.Progress], None] | None = None,
    ) -> wire.Loaded:
        """Make a model resident (None: the default one); `on_progress` hears of the bytes read meanwhile.

        `keep_alive` is for how many seconds it stays without a request: -1 for ever, None as it is.
        """
        return self._call(self._build(wire.Load, model=model, keep_alive=keep_alive), wire.Loaded, on_progress)

    def unload(self, model: str) -> wire.Unloaded:
        """Drop a resident model."""
        return self._call(self._build(wire.Unload, model=model), wire.Unloaded)

    def status(self) -> wire.StatusReport:
        """How the daemon is; it answers whatever the device does."""
        return self._call(self._build(wire.Status), wire.StatusReport)

    def ps(self) -> list[wire.Process]:
        """The resident models."""
        return self._call(self._build(wire.Ps), wire.ProcessList).models

    def watch(self, *, interval_ms: int = 250) -> Iterator[wire.StatusReport]:
        """How the daemon is, at once and then whenever it has changed, until the iteration is given up."""
        request = self._build(wire.Watch, interval_ms=interval_ms)
        return (change.status for change in self._follow(request, wire.Change))

    def trace(self, *, until: float | None = None) -> Iterator[list[wire.Span]]:
        """What the daemon does from now on, until that is given up or it is `until` on the monotonic clock."""
        return (batch.spans for batch in self._follow(self._build(wire.Trace), wire.Spans, until))

    def config(self) -> wire.Settings:
        """The daemon's settings, and where each comes from."""
        return self._call(self._build(wire.Config), wire.Settings)

    def probe(self) -> float:
        """Seconds that a small test piece takes on the daemon's device."""
        return self._call(self._build(wire.Probe), wire.Probed).seconds

    def prime(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        on_progress: Callable[[wire.Progress], None] | None = None,
        **fields: Any,
    ) -> wire.Primed:
        """Process a prompt now, so that a generation which begins with it starts at once."""
        request = build.generate(wire.Prime, self._exchange.number(), prompt, messages, fields)
        return self._call(request, wire.Primed, on_progress)

    def cache(self) -> wire.CacheReport:
        """What the prefix cache holds, and how much it has helped."""
        return self._call(self._build(wire.Cache), wire.CacheReport)

    def clear_cache(self) -> wire.CacheCleared:
        """Empty the prefix cache, on the disk too, and forget the generations that could be resumed."""
        return self._call(self._build(wire.CacheClear), wire.CacheCleared)

    def ping(self) -> float:
        """Seconds until the daemon's answer."""
        began = perf_counter()
        self._call(self._build(wire.Ping), wire.Pong)
        return perf_counter() - began

    def shutdown(self, *, drain: bool = True) -> None:
        """Stop the daemon: with `drain` once the running requests are done, else at once."""
        self._call(self._build(wire.Shutdown, drain=drain), wire.Bye)

    # -- plumbing

    def _build(self, kind: type[R], **fields: Any) -> R:
        return build.build(kind, self._exchange.number(), **fields)

    def _call(
        self,
        request: Numbered,
        kind: type[T],
        on_progress: Callable[[wire.Progress], None] | None = None,
    ) -> T:
        call = self._start(request)
        try:
            while True:
                reply = self._next(call)
                if not isinstance(reply, wire.Progress):
                    return expect(reply, kind)
                if on_progress:
                    on_progress(reply)
        except BaseException:
            self._abandon(call)
            raise

    def _follow(self, request: Numbered, kind: type[T], until: float | None = None) -> Iterator[T]:
        """Frames of a request that goes on until it is cancelled, which happens when this is closed."""
        call = self._start(request)
        usual = self._timeout
        try:
            while True:
                if until is not None:
                    left = until - monotonic()
                    if left <= 0:
                        return
                    self._limit(left)
                try:
                    yield expect(self._next(call), kind)
                except RequestTimeout:
                    if until is None:
                        raise
        finally:
            if until is not None:
                self._limit(usual)
            self._abandon(call)

    def _limit(self, seconds: float | None) -> None:
        self._timeout = seconds
        self._socket.settimeout(seconds)

    def _start(self, request: Numbered) -> Call:
        data = self._exchange.encode(request)
        call = self._exchange.open(request.id)
        self._write(data)
        return call

    def _cancel(self, call: Call) -> None:
        self._write(self._exchange.encode(wire.Cancel(id=call.id)))

    def _abandon(self, call: Call) -> None:
        """Nobody will take this call's frames any more."""
        if self._exchange.is_open(call):
            self._exchange.forget(call)
            with suppress(MlxbcError):
                self._cancel(call)

    def _next(self, call: Call) -> wire.Reply:
        """The next frame of a call, reading for every other call meanwhile."""
        me = threading.get_ident()
        while True:
            with self._turn:
                reply = self._exchange.take(call)
                if reply is not None:
                    return reply
                if self._reader not in (None, me):
                    if not self._turn.wait(self._timeout):
                        raise self._silence()
                    continue
                self._reader = me
            try:
                self._read()
            finally:
                with self._turn:
                    self._reader = None
                    self._turn.notify_all()

    def _read(self) -> None:
        try:
            data = self._receive()
            with self._turn:
                if data:
                    self._exchange.receive(data)
                else:
                    self._exchange.end()
        except RequestTimeout:
            raise
        except BaseException:
            # Between the kernel's buffer and ours, an interrupt can lose bytes: the rest would make no sense.
            self._hang_up(ConnectionLost("the connection was closed by an interrupt; make a new client"))
            raise

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_READ)
        except TimeoutError:
            raise self._silence() from None
        except OSError:
            return b""

    def _write(self, data: bytes) -> None:
        with self._sending:
            if self._exchange.error is not None:
                raise self._exchange.error
            try:
                self._socket.sendall(data)
            except TimeoutError:
                self._hang_up(ConnectionLost(LOST))
                raise self._silence() from None
            except OSError:
                # The daemon has gone; what it said before is still to be read, and says why.
                return
            except BaseException:
                self._hang_up(ConnectionLost("the connection was closed by an interrupt; make a new client"))
                raise

    def _greet(self, name: str, on_starting: Callable[[], None] | None) -> wire.Welcome:
        patience = HELLO_TIMEOUT if self._timeout is None else min(self._timeout, HELLO_TIMEOUT)
        self._socket.settimeout(patience)
        self._write(self._exchange.hello(name))
        if on_starting is not None and not self._hears(min(patience, HELLO_SOON)):
            on_starting()
        self._socket.settimeout(patience)
        while self._exchange.welcome is None:
            if self._exchange.error is not None:
                raise self._exchange.error
            self._read()
        self._socket.settimeout(self._timeout)
        return self._exchange.welcome

    def _hears(self, within: float) -> bool:
        """Whether something comes within so many seconds, be it the end; it is left there to be read."""
        self._socket.settimeout(within)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            pass  # reading says why
        return True

    def _hang_up(self, error: ConnectionLost) -> None:
        with self._turn:
            self._exchange.fail(error)
            self._turn.notify_all()
        with suppress(OSError):  # wakes a thread that is blocked in a read, as closing alone would not
            self._socket.shutdown(socket.SHUT_RDWR)

    def _silence(self) -> RequestTimeout:
        return RequestTimeout(f"the daemon sent nothing for {self._socket.gettimeout():g} s; see mlxbc status")


class Stream(EventStream):
    """A generation on a connection that it may share with others.

    Attributes:
        done: the last frame, once it came.
    """

    def __init__(self, client: Client, call: Call) -> None:
        super().__init__()
        self._client = client
        self._call = call
        self._collector = Collector()
        self._open = True
        self.done: wire.Done | None = None

    def __repr__(self) -> str:
        state = "running" if self._open else "failed or closed" if self._result is None else self._result.reason
        return f"Stream({self._call.id}, {state})"

    def __next__(self) -> Event:
        if not self._open:
            raise StopIteration
        try:
            reply = self._client._next(self._call)
            if isinstance(reply, Event):
                self._collector.add(reply)
                return reply
            self.done = expect(reply, wire.Done)
            self._result = self._collector.result(self.done)
        except RequestTimeout:
            raise
        except BaseException:
            self.close()
            raise
        self._open = False
        raise StopIteration

    def cancel(self) -> None:
        """See `EventStream.cancel`."""
        if self._open:
            self._client._cancel(self._call)

    def close(self) -> None:
        """See `EventStream.close`."""
        if self._open:
            self._open = False
            self._client._abandon(self._call)
