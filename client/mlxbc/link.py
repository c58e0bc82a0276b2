"""Owns a connection that a server keeps to the daemon: made when it is needed, and again after it was lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mlxbc.aio import AsyncClient
from mlxbc.errors import ConnectionLost

T = TypeVar("T")


class Link:
    """The way to the daemon.

    Args:
        path: its socket; None finds the user's own.
        client_name: how the daemon calls this program in its accounts.
    """

    def __init__(self, path: str | os.PathLike[str] | None, client_name: str) -> None:
        self._path = path
        self._name = client_name
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Link({self._client})"

    async def client(self) -> AsyncClient:
        """A client that is connected, as far as anybody knows.

        Raises:
            DaemonUnavailable: nobody listens.
            MlxbcError: whoever listens is not the daemon we speak with.
        """
        async with self._connecting:
            if self._client is not None and not self._client.connected:
                await self.close()
            if self._client is None:
                client = AsyncClient(self._path, client_name=self._name)
                await client.connect()
                self._client = client
            return self._client

    async def ask(self, question: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """What the daemon answers to a question that may be asked twice: the connection may be lost unnoticed.

        Raises:
            MlxbcError: it couldn't be asked, or refused.
        """
        try:
            return await question(await self.client())
        except ConnectionLost:
            return await question(await self.client())

    async def close(self) -> None:
        """End the connection, and with it what runs on it."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()
