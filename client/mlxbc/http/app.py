"""Owns the routes: what can be asked over HTTP, and in which order a request is looked at."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mlxbc import wire
from mlxbc.errors import MlxbcError
from mlxbc.http import asked, replies, translate
from mlxbc.http.answering import Answer, refusal
from mlxbc.http.failures import Refused, of_decoding, of_error
from mlxbc.http.guard import Guard, Token
from mlxbc.http.translate import Order
from mlxbc.link import Link

BODY_S: Final = 30.0
"""Longest that a client may take to send a body."""

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

_CHAT: Final = msgspec.json.Decoder(asked.Chat)
_COMPLETION: Final = msgspec.json.Decoder(asked.Completion)


def application(
    *,
    path: str | os.PathLike[str] | None = None,
    token: str | None,
    hosts: Collection[str] = (),
    origins: Sequence[str] = (),
) -> Starlette:
    """The endpoint as an ASGI application.

    Args:
        path: the daemon's socket; None finds the user's own.
        token: what clients call their API key; None lets everybody in.
        hosts: names by which it may be called, beside localhost and addresses.
        origins: of web pages that may ask.
    """
    link = Link(path, "mlxbc-http")
    endpoints = _Endpoints(link)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await link.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completion, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
        ],
        middleware=[
            Middleware(Guard, hosts=hosts, origins=origins),
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            ),
            Middleware(Token, token=token),
        ],
        exception_handlers={
            Refused: _refuse,
            MlxbcError: _refuse_error,
            404: _not_found,
            405: _not_found,
            500: _internal,
        },
        lifespan=lifespan,
    )


class _Endpoints:
    """One method for each thing that can be asked."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def chat(self, request: Request) -> Response:
        order = translate.chat(await _decoded(request, _CHAT))
        await self._check_model(order)
        return Answer(order, replies.ChatShape(), self._link)

    async def completion(self, request: Request) -> Response:
        order = translate.completion(await _decoded(request, _COMPLETION))
        await self._check_model(order)
        return Answer(order, replies.TextShape(), self._link)

    async def models(self, _request: Request) -> Response:
        entries = await self._link.ask(lambda client: client.models())
        return _json(replies.ModelObjects([_model(entry) for entry in entries]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for entry in await self._link.ask(lambda client: client.models()):
            if entry.name == name:
                return _json(_model(entry))
        raise _no_model(name)

    async def health(self, _request: Request) -> Response:
        await self._link.ask(lambda client: client.ping())
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def _check_model(self, order: Order) -> None:
        """Over the socket a path may name a model, or a file to import one from. Over HTTP only what is known may."""
        name = order.model
        if name is not None and (name.startswith(("/", ".", "~")) or name.endswith(".gguf")):
            listed = {entry.name for entry in await self._link.ask(lambda client: client.models())}
            resident = {process.model for process in await self._link.ask(lambda client: client.ps())}
            if name not in listed | resident:
                raise _no_model(name)


async def _decoded(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    body = await _body(request)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise of_decoding(error, decoder.type) from None


async def _body(request: Request) -> bytes:
    """The body, within bounds.

    Raises:
        Refused: it is too long, or takes too long.
    """
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > wire.FRAME_LIMIT:
                    raise Refused(
                        f"a request has at most {wire.FRAME_LIMIT} bytes; send less text",
                        status=413,
                        code="request_too_large",
                    )
                chunks.append(chunk)
    except TimeoutError:
        raise Refused(f"the body did not come within {BODY_S:g} s", status=408, code="timeout") from None
    except ClientDisconnect:
        raise Refused("the client hung up", status=499, code="gone") from None
    return b"".join(chunks)


def _json(value: msgspec.Struct) -> Response:
    return Response(replies.encode(value), media_type="application/json")


def _model(entry: wire.ModelEntry) -> replies.ModelObject:
    try:
        created = int(os.stat(entry.path).st_mtime)
    except OSError:
        created = 0
    return replies.ModelObject(entry.name, created, "mlxbc" if entry.source == "embedded" else entry.source)


def _no_model(name: str) -> Refused:
    return Refused(
        f"there is no model {name[:80]!r} here; GET /v1/models lists those there are",
        status=404,
        code="model_not_found",
        param="model",
    )


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error)


async def _refuse_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, MlxbcError)
    return refusal(of_error(error))


async def _not_found(request: Request, _error: Exception) -> Response:
    where = f"{request.method} {request.url.path[:80]}"
    return refusal(
        Refused(
            f"there is no {where} here; there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models",
            status=404,
            code="unknown_url",
        )
    )


async def _internal(_request: Request, error: Exception) -> Response:
    # What an exception says may repeat what the user wrote.
    return refusal(
        Refused(f"internal error ({type(error).__name__})", status=500, kind="server_error", code="internal")
    )
