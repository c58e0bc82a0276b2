"""Owns generations that can be taken up again: those that go on without their client, and what is recorded of others.

A client that was cut off asks for the rest with the stream's name and the tokens it has. If the generation still runs,
or has ended and is held, the new connection takes it over; if a record says more than the client has, that much is told
at once; and in any case the rest is drawn as it would have been.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from mlxbcd.cache import keys
from mlxbcd.cache.streams import Record, Streams, digest
from mlxbcd.plan.request import Request

if TYPE_CHECKING:
    from mlxbcd.serve.generation import Generation

log = logging.getLogger(__name__)

EVERY: Final = 256
"""Tokens between two records of a generation."""
_INTERRUPTED: Final = frozenset({"shutting_down", "device_error"})
"""Ends that are not the generation's own."""
_WHOLE: Final = frozenset({"stop", "length"})


class Recording:
    """What is remembered of one generation.

    Args:
        stream: its name.
        digest: of what was asked.
        tokens: of it that the client has already.
        keep_s: how long it goes on, and is held, without its client; None: not at all.

    Attributes:
        tokens: drawn so far, without an end token.
    """

    def __init__(
        self, book: Book, stream: str, digest: str, tokens: Sequence[int], keep_s: float | None, *, on_disk: bool
    ) -> None:
        self.stream = stream
        self.digest = digest
        self.tokens = list(tokens)
        self.keep_s = keep_s
        self._book = book
        self._on_disk = on_disk
        self._saved = 0

    def __repr__(self) -> str:
        return f"Recording({self.stream[:8]}, {len(self.tokens)} tokens, {self._saved} saved)"

    def drawn(self, token: int) -> None:
        """A token was drawn."""
        self.tokens.append(token)
        if len(self.tokens) - self._saved >= EVERY:
            self._save()

    def ended(self, outcome: str, stop: str | None, *, attended: bool) -> None:
        """It is over; `attended` tells that its client has heard so."""
        if outcome in _INTERRUPTED:
            if self.tokens:
                self._save()
        elif outcome in _WHOLE and not attended:
            self._save(outcome, stop)
        elif self._saved:
            self._book.drop(self.stream)

    def _save(self, reason: str = "", stop: str | None = None) -> None:
        if self._on_disk:
            self._saved = len(self.tokens)
            self._book.save(self.stream, self.digest, list(self.tokens), reason, stop)


class Book:
    """The generations of one daemon that can be taken up again. Belongs to the event loop's thread.

    Args:
        streams: where records are kept; None for nowhere.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._kept: dict[str, tuple[Generation, asyncio.TimerHandle]] = {}
        # One thread: the records of a stream must be written in the order in which they were made.
        self._thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="mlxbcd-records")

    def __repr__(self) -> str:
        return f"Book({self._streams}, {len(self._kept)} kept)"

    def keep(self, recording: Recording, generation: Generation) -> None:
        """A generation has lost its client, and is held for it for a while."""
        assert recording.keep_s is not None
        loop = asyncio.get_running_loop()
        if (before := self._kept.pop(recording.stream, None)) is not None:
            other, timer = before
            timer.cancel()
            if other is not generation:
                # Of another request, under the same name: nobody can come back for it any more.
                other.expire()
        self._kept[recording.stream] = generation, loop.call_later(recording.keep_s, self._expire, recording.stream)

    def take(self, wanted: Recording) -> Generation | None:
        """The generation of that stream that has lost its client, if there is one; it is held no more.

        One of another request, or that has not said what the client says it has, isn't that stream's.
        """
        found = self._kept.get(wanted.stream)
        if found is None:
            return None
        generation, timer = found
        recording = generation.recording
        assert recording is not None
        told = wanted.tokens
        if recording.digest != wanted.digest or recording.tokens[: len(told)] != told:
            return None
        timer.cancel()
        del self._kept[wanted.stream]
        if not generation.resumable:
            generation.expire()
            return None
        return generation

    async def load(self, wanted: Recording) -> Record | None:
        """What was recorded of a stream, if it is what the client has and more."""
        if self._streams is None:
            return None
        loop, told = asyncio.get_running_loop(), keys.pack(wanted.tokens)
        record = await loop.run_in_executor(self._thread, self._streams.load, wanted.stream, wanted.digest)
        return record if record is not None and record.tokens.startswith(told) else None

    def save(self, stream: str, digest: str, tokens: list[int], reason: str, stop: str | None) -> None:
        """Write a record, later."""
        if self._streams is not None:
            self._thread.submit(self._streams.save, stream, digest, tokens, reason, stop)

    def drop(self, stream: str) -> None:
        """Forget a record, later."""
        if self._streams is not None:
            self._thread.submit(self._streams.drop, stream)

    async def close(self) -> None:
        """Hold nothing any more, and wait until everything is written."""
        for _, timer in self._kept.values():
            timer.cancel()
        self._kept.clear()
        thread = self._thread
        await asyncio.get_running_loop().run_in_executor(None, thread.shutdown)

    def _expire(self, stream: str) -> None:
        found = self._kept.pop(stream, None)
        if found is not None:
            generation, _ = found
            log.info("nobody came back for stream %s", stream[:8])
            generation.expire()


def asked(model: str, request: Request) -> str:
    """Names what was asked: the rest of another request is not its rest."""
    return digest(model, request.prompt, request.sampling, request.stop, tuple(sorted(request.eos)), request.max_tokens)
