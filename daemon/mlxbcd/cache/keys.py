"""Owns how cached token sequences are named and compared: packed ids, chained hashes. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

WIDTH: Final = 4
"""Bytes of a packed token id."""
_DIGEST: Final = 16


def pack(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, `WIDTH` each: they compare, slice and hash at the speed of memory."""
    return array("I", ids).tobytes()


def unpack(tokens: bytes) -> Sequence[int]:
    """The ids of packed tokens."""
    return array("I", tokens)


def span(tokens: bytes, begin: int, end: int) -> bytes:
    """Tokens [begin, end) of packed ones."""
    return tokens[WIDTH * begin : WIDTH * end]


def count(tokens: bytes) -> int:
    """How many tokens are packed."""
    return len(tokens) // WIDTH


def common(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences begin with alike."""
    equal, differ = 0, min(count(a), count(b))
    if span(a, 0, differ) == span(b, 0, differ):
        return differ
    while differ - equal > 1:
        middle = (equal + differ) // 2
        if span(a, equal, middle) == span(b, equal, middle):
            equal = middle
        else:
            differ = middle
    return equal


def root_id(namespace: str, converted_at: int) -> str:
    """Names the beginning of every sequence of a namespace whose state was quantised at that length (0: never)."""
    return _digest(f"{namespace} {converted_at}".encode())


def block_id(parent: str, tokens: bytes) -> str:
    """Names the positions of `tokens` after what `parent` names, and so all tokens from the beginning."""
    return _digest(bytes.fromhex(parent) + b"block" + tokens)


def anchor_id(parent: str) -> str:
    """Names the state at the end of what `parent` names that is not stored by position."""
    return _digest(bytes.fromhex(parent) + b"anchor")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST).hexdigest()
