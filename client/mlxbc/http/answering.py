"""Owns one answer on its way: from the daemon's frames to an HTTP response, whole or as a stream of events.

A client that hangs up cancels what is generated for it, at any moment. The head of a response waits for the first sign
that the request is a good one, so that an error still gets a status of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import Final, TypeAlias

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mlxbc import wire
from mlxbc.aio import AsyncStream
from mlxbc.errors import ConnectionLost, MlxbcError
from mlxbc.http import replies
from mlxbc.http.failures import Refused, of_error
from mlxbc.http.replies import Alternative, Shape
from mlxbc.http.translate import Order
from mlxbc.link import Link
from mlxbc.result import Event, Result

log = logging.getLogger(__name__)

STALL_S: Final = 30.0
"""Longest that a client may read nothing while events wait for it."""

_HEAD: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Told: TypeAlias = tuple[int, Event | Result]
"""What the generation of one prompt has to tell, with the prompt's number."""


class Answer(Response):
    """The response to an order."""

    def __init__(self, order: Order, shape: Shape, link: Link) -> None:
        super().__init__()
        self._order = order
        self._shape = shape
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client goes first."""
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = self._order
        out = _Events(send) if order.stream else None
        made = _Making(order, self._shape)
        try:
            try:
                await self._generate(made, out)
            except ConnectionLost:
                if made.begun:
                    raise
                # The daemon was gone before it heard of this: perhaps it is back.
                await self._generate(made, out)
            if out is not None:
                await out.end(made.counts() if order.usage else [])
            else:
                await Response(replies.encode(made.whole()), media_type="application/json")(scope, receive, send)
        except (MlxbcError, Refused) as error:
            refused = of_error(error, order.called) if isinstance(error, MlxbcError) else error
            if out is not None and out.begun:
                await out.fail(refused)
            else:
                await refusal(refused)(scope, receive, send)
        except TimeoutError:
            log.warning("a client read nothing for %g s; it is given up", STALL_S)

    async def _generate(self, made: _Making, out: _Events | None) -> None:
        client = await self._link.client()
        with ExitStack() as stack:
            streams = [client.generate(**fields) for fields in self._order.generate]
            for stream in streams:
                stack.callback(stream.close)
            async with aclosing(_merged(streams)) as told:
                async for number, event in told:
                    pieces = made.take(number, event)
                    if self._order.single_call and type(event) is wire.Token and event.call is not None:
                        streams[number].cancel()
                    if out is not None:
                        await out.tell(pieces, event)


def refusal(refused: Refused) -> Response:
    """The response that says no."""
    return Response(refused.body, refused.status, refused.headers)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[Told, None]:
    """Everything that all streams tell, as it comes, each stream's result last.

    Raises:
        MlxbcError: one of them failed.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        yield 0, streams[0].result
        return
    told: asyncio.Queue[Told | MlxbcError] = asyncio.Queue()

    async def read(number: int, stream: AsyncStream) -> None:
        try:
            async for event in stream:
                told.put_nowait((number, event))
            told.put_nowait((number, stream.result))
        except MlxbcError as error:
            told.put_nowait(error)

    readers = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(readers)
        while left:
            item = await told.get()
            if isinstance(item, MlxbcError):
                raise item
            yield item
            left -= isinstance(item[1], Result)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


class _Making:
    """The response as it grows.

    Attributes:
        begun: the daemon has said something.
    """

    def __init__(self, order: Order, shape: Shape) -> None:
        self._order = order
        self._shape = shape
        count = len(order.prefixes) * order.n
        self._alternatives = [Alternative(i, order.prefixes[i // order.n]) for i in range(count)]
        self._results: dict[int, Result] = {}
        self.begun = False
        self._id = ""
        self._model = order.model or ""
        self._created = int(time.time())

    def take(self, number: int, event: Event | Result) -> list[bytes]:
        """What a stream says of it, encoded."""
        self.begun = True
        if type(event) is wire.Token:
            return self._piece(self._alternatives[number * self._order.n + event.candidate], event)
        if type(event) is wire.Accepted:
            self._id = self._id or f"{self._shape.name}-{event.stream}"
            self._model = event.model
        elif type(event) is Result:
            self._results[number] = event
            first = number * self._order.n
            mine = self._alternatives[first : first + self._order.n]
            for one, unparsed in zip(mine, [one.unparsed for one in event.outputs] or [event.unparsed], strict=True):
                one.unparsed = unparsed
            if self._order.stream:
                return [self._chunk([self._shape.last(one, self._finish(one))]) for one in mine]
        return []

    def _piece(self, alternative: Alternative, token: wire.Token) -> list[bytes]:
        logprobs = self._order.logprobs
        told = []
        if self._order.single_call and alternative.calls:
            return []  # it has been told to end, and what still comes was not asked for
        if self._order.stream and (token.text or token.call is not None or (logprobs and token.logprobs)):
            told.append(self._chunk([self._shape.piece(alternative, token, logprobs=logprobs)]))
            alternative.started = True
        alternative.add(token)
        return told

    def counts(self) -> list[bytes]:
        """The last chunk of a stream whose client wants to know."""
        return [self._chunk([], self._usage())]

    def whole(self) -> replies.Response:
        """The response, once every stream has ended."""
        choices = [
            self._shape.complete(one, self._finish(one), logprobs=self._order.logprobs) for one in self._alternatives
        ]
        return self._response(self._shape.whole, list(choices), self._usage())

    def _finish(self, alternative: Alternative) -> replies.Finish:
        number, candidate = divmod(alternative.index, self._order.n)
        result = self._results[number]
        output = result.outputs[candidate] if result.outputs else result
        return replies.finish(output.reason, calls=bool(alternative.calls))

    def _chunk(self, choices: list[replies.Choice], usage: replies.Usage | None = None) -> bytes:
        response = self._response(self._shape.chunk, choices, usage if self._order.usage else UNSET)
        return replies.encode(response)

    def _response(
        self, kind: str, choices: list[replies.Choice], usage: replies.Usage | UnsetType | None
    ) -> replies.Response:
        return replies.Response(
            id=self._id, object=kind, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def _usage(self) -> replies.Usage:
        reasoning = sum(one.reasoning_tokens for one in self._alternatives)
        counts = [result.usage for result in self._results.values()]
        return replies.usage(counts, reasoning, predicted=self._order.predicted)


class _Events:
    """A response of server-sent events.

    Attributes:
        begun: the head is out, so there is no other status any more.
    """

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def tell(self, pieces: list[bytes], event: Event | Result) -> None:
        """Send the events of one frame. Of a prompt that takes its time, say how far it is."""
        if pieces:
            await self._write(b"".join(b"data: %b\n\n" % piece for piece in pieces))
        elif type(event) is wire.Progress and event.phase == "prefill":
            # A comment: keeps whatever is in between from giving up. The prompt is known to be a good one by now.
            await self._write(b": prompt %d of %d tokens\n\n" % (event.done, event.total))

    async def end(self, pieces: list[bytes]) -> None:
        """Send what comes last."""
        await self._write(b"".join(b"data: %b\n\n" % piece for piece in [*pieces, b"[DONE]"]), more=False)

    async def fail(self, refused: Refused) -> None:
        """Say why there is no more."""
        await self._write(b"data: %b\n\n" % refused.body, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEAD})
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        async with asyncio.timeout(STALL_S):
            await self._send(message)
