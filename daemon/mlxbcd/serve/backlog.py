"""Owns the replies that wait for a client that doesn't read: in order, each request's text joined. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mlxbc import wire

JOINED: Final = 256 * 1024
"""Bytes after which a joined token frame is left as it is, so that no client's frame limit is ever near."""

_ENTRY: Final = 128
_ID: Final = 40
_LOGPROB: Final = 256
"""What a queue entry, a token id and a logprob cost in memory, roughly, beside the text itself."""


class Backlog:
    """A queue of replies in which consecutive token frames of one request, candidate and channel become one.

    Frames of one output keep their order, as do frames of different requests, except that text joins what
    is already queued of its own output.

    Args:
        encode: makes the bytes of a frame.

    Attributes:
        text: bytes that generated text holds here.
        replies: bytes that all other replies hold here.
    """

    def __init__(self, encode: Callable[[wire.Reply], bytes]) -> None:
        self.text = 0
        self.replies = 0
        self._encode = encode
        self._queue: deque[bytes | _Joined] = deque()
        self._last: dict[int, dict[int, _Joined]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __repr__(self) -> str:
        return f"Backlog({len(self)} frames, {self.text} bytes of text, {self.replies} of other replies)"

    @property
    def held(self) -> int:
        """Bytes held in all."""
        return self.text + self.replies

    def push(self, message: wire.Reply) -> None:
        """Add a reply at the end.

        Raises:
            FrameError: it is too long for a frame.
        """
        if isinstance(message, wire.Token):
            self._push_token(message)
            return
        request = getattr(message, "id", None)
        if request is not None:
            self._last.pop(request, None)
        data = self._encode(message)
        self._queue.append(data)
        self.replies += _ENTRY + len(data)

    def _push_token(self, token: wire.Token) -> None:
        newest = self._last.setdefault(token.id, {})
        last = newest.get(token.candidate)
        if last is None or not last.takes(token):
            last = newest[token.candidate] = _Joined(token)
            self._queue.append(last)
            self.text += last.size
        else:
            self.text += last.join(token)

    def pop(self) -> bytes:
        """Take the oldest frame."""
        oldest = self._queue.popleft()
        if isinstance(oldest, bytes):
            self.replies -= _ENTRY + len(oldest)
            return oldest
        self.text -= oldest.size
        newest = self._last.get(oldest.id, {})
        if newest.get(oldest.candidate) is oldest:
            del newest[oldest.candidate]
            if not newest:
                del self._last[oldest.id]
        return self._encode(oldest.token())

    def clear(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self._last.clear()
        self.text = self.replies = 0


class _Joined:
    """Consecutive tokens of one output and channel, or one call. Its text is UTF-8, so that joining never copies it."""

    __slots__ = ("_call", "_channel", "_ids", "_logprobs", "_n", "_text", "candidate", "id", "size")

    def __init__(self, token: wire.Token) -> None:
        self.id = token.id
        self.size = _ENTRY
        self._channel = token.channel
        self.candidate = token.candidate
        self._call = token.call
        if token.call is not None:
            self.size += _ENTRY + len(token.call.name) + len(token.call.arguments.encode())
        self._text = bytearray()
        self._n = 0
        self._ids: list[int] = []
        self._logprobs: list[wire.TokenLogprob] = []
        self.join(token)

    def __repr__(self) -> str:
        return f"_Joined(id {self.id}, {self._n} tokens, {self.size} bytes)"

    def takes(self, token: wire.Token) -> bool:
        """Whether a token frame may join it."""
        whole = self._call is not None or token.call is not None or self.size >= JOINED
        return not whole and (self._channel, self.candidate) == (token.channel, token.candidate)

    def join(self, token: wire.Token) -> int:
        """Add a token frame; the bytes that it costs."""
        text = token.text.encode()
        self._text += text
        self._n += token.n
        cost = len(text)
        if token.ids:
            self._ids += token.ids
            cost += _ID * len(token.ids)
        if token.logprobs:
            self._logprobs += token.logprobs
            cost += _LOGPROB * sum(1 + len(logprob.top) for logprob in token.logprobs)
        self.size += cost
        return cost

    def token(self) -> wire.Token:
        return wire.Token(
            id=self.id,
            text=self._text.decode(),
            n=self._n,
            channel=self._channel,
            call=self._call,
            candidate=self.candidate,
            ids=self._ids,
            logprobs=self._logprobs,
        )
