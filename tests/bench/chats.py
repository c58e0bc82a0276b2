"""Owns a chat as a benchmark sees it: when each piece of text arrived, from our daemon or from the peer.

Both sides get a connection per chat, the same messages, greedy sampling and streaming.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

from bench.stories import Messages
from mlxbc.aio import AsyncClient
from mlxbc.wire import Token


@dataclass(slots=True)
class Chat:
    """One chat, running or over. Times are seconds of `perf_counter`.

    Attributes:
        arrivals: when each piece of text came; servers send one per token, save where a character spans tokens.
        prompt: tokens of the prompt, once it is over.
        cached: of them, those whose state was restored; ours says so.
        generated: tokens of the answer, once it is over.
    """

    messages: Messages
    max_tokens: int
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    _mark: tuple[int, asyncio.Event] | None = None

    @property
    def first(self) -> float:
        """Seconds until the first piece of text.

        Raises:
            RuntimeError: there was none.
        """
        if not self.arrivals:
            raise RuntimeError("a chat ended without any text")
        return self.arrivals[0] - self.sent

    def piece(self) -> None:
        """Text has come."""
        self.arrivals.append(perf_counter())
        if self._mark is not None and len(self.arrivals) >= self._mark[0]:
            self._mark[1].set()

    async def flowing(self, pieces: int) -> None:
        """Wait until that many pieces of text have come."""
        event = asyncio.Event()
        self._mark = (pieces, event)
        if len(self.arrivals) < pieces:
            await event.wait()


class Side(Protocol):
    """A server that chats are held with."""

    async def hold(self, chat: Chat) -> Chat:
        """Hold a chat to its end. Cancelling hangs up."""


class Ours:
    """Our daemon, through the package's own client.

    Args:
        draft: what may guess tokens, as requests say it.
    """

    def __init__(self, socket: Path, draft: str = "auto") -> None:
        self._socket = socket
        self._draft = draft

    async def hold(self, chat: Chat) -> Chat:
        chat.sent = perf_counter()
        async with AsyncClient(self._socket, client_name="bench") as client:
            stream = client.generate(
                messages=chat.messages, temperature=0.0, max_tokens=chat.max_tokens, draft=self._draft
            )
            async with stream:
                async for event in stream:
                    if isinstance(event, Token) and event.text:
                        chat.piece()
        usage = stream.result.usage
        chat.ended, chat.prompt, chat.generated = perf_counter(), usage.prompt, usage.generated
        chat.cached = usage.cached
        return chat


class Theirs:
    """The peer, over HTTP on loopback."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def hold(self, chat: Chat) -> Chat:
        chat.sent = perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(self._request(chat))
            await self._follow(reader, chat)
        finally:
            writer.close()
        chat.ended = perf_counter()
        return chat

    def _request(self, chat: Chat) -> bytes:
        body = json.dumps(
            {
                "messages": chat.messages,
                "temperature": 0.0,
                "max_tokens": chat.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _follow(self, reader: asyncio.StreamReader, chat: Chat) -> None:
        """Read server-sent events to the end."""
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the peer answered {status.decode(errors='replace').strip() or 'nothing'}")
        while line := await reader.readline():
            data = line.strip().removeprefix(b"data: ")
            if not data.startswith(b"{"):
                continue  # a header, a comment that keeps the connection alive, or the end mark
            event = json.loads(data)
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                chat.piece()
            if usage := event.get("usage"):
                chat.prompt, chat.generated = usage["prompt_tokens"], usage["completion_tokens"]
        if not chat.prompt:
            raise RuntimeError("the peer's answer broke off")
