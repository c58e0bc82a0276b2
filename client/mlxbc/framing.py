"""Owns framing: bytes to messages and back, for both codecs, without doing any input or output.

`Inbound` is fed whatever the transport read and yields whole messages; `frame` turns a message into the bytes to write.
Neither keeps a reference to a socket, so every rule here is tested on plain bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, Final, Generic, TypeVar, get_args

import msgspec

from mlxbc import wire
from mlxbc.misfit import said

T = TypeVar("T")

_HEADER: Final = 4

KINDS: Final = frozenset(str(kind.__struct_config__.tag) for kind in (*get_args(wire.Request), *get_args(wire.Reply)))
"""Every `type` of protocol 1."""


class Codec(Enum):
    """How the frames of one connection are written."""

    MSGPACK = "msgpack"
    JSON = "json"


class FrameError(Exception):
    """Bytes that are not a message. `fatal` says that no later frame of this connection can be trusted.

    Attributes:
        code: the wire's error code, `bad_frame` or `frame_too_large`.
        request_id: the id of the message at fault, where it could still be read.
        unknown_kind: it is a message of a kind that this version has never heard of.
    """

    def __init__(
        self,
        code: wire.ErrorCode,
        message: str,
        *,
        fatal: bool,
        request_id: int | None = None,
        unknown_kind: bool = False,
    ) -> None:
        super().__init__(message)
        self.code: wire.ErrorCode = code
        self.message = message
        self.fatal = fatal
        self.request_id = request_id
        self.unknown_kind = unknown_kind


class _Head(msgspec.Struct):
    id: Any = None
    type: Any = None


_MSGPACK_HEAD = msgspec.msgpack.Decoder(_Head)
_JSON_HEAD = msgspec.json.Decoder(_Head)
_MSGPACK_ENCODER = msgspec.msgpack.Encoder()
_JSON_ENCODER = msgspec.json.Encoder()


def frame(message: msgspec.Struct, codec: Codec) -> bytes:
    """The bytes of one frame.

    Raises:
        FrameError: the message is longer than `wire.FRAME_CEILING`.
    """
    if codec is Codec.JSON:
        body = _JSON_ENCODER.encode(message)
        if len(body) > wire.FRAME_CEILING:
            raise _too_large(len(body), wire.FRAME_CEILING, fatal=False)
        return body + b"\n"
    body = _MSGPACK_ENCODER.encode(message)
    if len(body) > wire.FRAME_CEILING:
        raise _too_large(len(body), wire.FRAME_CEILING, fatal=False)
    return len(body).to_bytes(_HEADER, "big") + body


class Inbound(Generic[T]):
    """An incremental parser of one direction of one connection.

    Args:
        kind: the union of Structs to expect (`wire.Request` on the daemon, `wire.Reply` in a client).
        codec: None finds it out from the first byte; a client knows.
        limit: largest frame in bytes.
    """

    def __init__(self, kind: Any, *, codec: Codec | None = None, limit: int = wire.FRAME_LIMIT) -> None:
        self.codec = codec
        self.limit = limit
        self._kind = kind
        self._buffer = bytearray()
        self._scanned = 0

    def __repr__(self) -> str:
        return f"Inbound({self.codec and self.codec.value}, {len(self._buffer)} bytes waiting)"

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[T]:
        """Add what was read; yield every message that is now whole.

        Raises:
            FrameError: after the messages before the bad one. If it isn't fatal, call `feed(b"")` to go on.
        """
        self._buffer += data
        if self.codec is None and self._buffer:
            self.codec = Codec.JSON if self._buffer[:1] == b"{" else Codec.MSGPACK
        return self._lines() if self.codec is Codec.JSON else self._frames()

    def _frames(self) -> Iterator[T]:
        buffer = self._buffer
        while len(buffer) >= _HEADER:
            size = int.from_bytes(buffer[:_HEADER], "big")
            if size > self.limit:
                raise _too_large(size, self.limit, fatal=True)
            end = _HEADER + size
            if len(buffer) < end:
                return
            body = bytes(buffer[_HEADER:end])
            del buffer[:end]
            yield self._decode(body, _msgpack_decoder(self._kind), _MSGPACK_HEAD)

    def _lines(self) -> Iterator[T]:
        buffer = self._buffer
        while True:
            end = buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(buffer)
                if len(buffer) > self.limit:
                    raise _too_large(len(buffer), self.limit, fatal=True)
                return
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._scanned = 0
            if len(line) > self.limit:
                raise _too_large(len(line), self.limit, fatal=True)
            if line.strip():
                yield self._decode(line, _json_decoder(self._kind), _JSON_HEAD)

    def close(self) -> T | None:
        """The input ended: a last JSON line without its newline still counts.

        Raises:
            FrameError: the input ended inside a frame.
        """
        if not self._buffer.strip(b" \t\r\n\0" if self.codec is Codec.JSON else b""):
            return None
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self.codec is Codec.JSON:
            return self._decode(rest, _json_decoder(self._kind), _JSON_HEAD)
        raise FrameError("bad_frame", f"the connection ended {len(rest)} bytes into a frame", fatal=True)

    @staticmethod
    def _decode(body: bytes, decoder: Any, head: Any) -> T:
        try:
            message: T = decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise _refusal(body, head, error, decoder.type) from None
        return message


def _refusal(body: bytes, head: Any, error: Exception, kind: Any) -> FrameError:
    """Say what is wrong with a frame, and whose it was. The framing itself is intact, so the connection goes on."""
    try:
        found = head.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        found = _Head()
    has_id = isinstance(found.id, int) and not isinstance(found.id, bool) and found.id >= 0
    nested = isinstance(error, RecursionError)
    readable = isinstance(error, msgspec.ValidationError) and not nested
    tag = found.type if isinstance(found.type, str) else None
    text = "nested too deeply" if nested else said(error, kind, tag)
    return FrameError(
        "bad_request" if readable else "bad_frame",
        f"not a message of protocol {wire.PROTOCOL}: {text}",
        fatal=False,
        request_id=found.id if has_id else None,
        unknown_kind=readable and tag is not None and tag not in KINDS,
    )


def _too_large(size: int, limit: int, *, fatal: bool) -> FrameError:
    return FrameError(
        "frame_too_large",
        f"a frame of {size} bytes is over this connection's limit of {limit}; "
        f"ask for more in hello.max_frame (up to {wire.FRAME_CEILING})",
        fatal=fatal,
    )


# Typed decoders are built once, and only for the codec that is spoken: building one costs a millisecond.


@cache
def _msgpack_decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind)


@cache
def _json_decoder(kind: Any) -> Any:
    return msgspec.json.Decoder(kind)
