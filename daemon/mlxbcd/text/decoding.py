"""Owns how a tokenizer's pieces become text: the kind of its decoder, and the bytes of byte-level pieces.

A vocabulary holds *pieces* (`Ġworld`, `▁world`, `<0xE2>`, `##ing`); a decoder, a pipeline of steps, turns a
whole list of them into text. How far the text at one place depends on other pieces decides how it can be
produced piece by piece.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_BYTE_PIECE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class DecoderKind(Enum):
    """How much of the list of pieces decides the text at one place."""

    BYTES = "bytes"
    """Every piece is a run of bytes, and the text is all bytes read as UTF-8."""
    LOCAL = "local"
    """A piece's text follows from the piece before it, and from the run of byte pieces it is in."""
    WHOLE = "whole"
    """Nothing is known: only the whole list gives the text. No common model's tokenizer is of this kind."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """What the incremental detokenizer needs to know about a decoder.

    Attributes:
        kind: how far dependencies reach.
        byte_fallback: pieces like ``<0xE2>`` are bytes. A run of them becomes text as one: if it isn't valid
            UTF-8 as a whole, each of its bytes becomes U+FFFD, so that no part of a run is final before the
            run ends.
    """

    kind: DecoderKind
    byte_fallback: bool = False

    @classmethod
    def of(cls, decoder: Any) -> Decoding:
        """Classify a `tokenizers` decoder, or None (pieces are then joined with spaces)."""
        if decoder is None:
            return cls(DecoderKind.LOCAL)
        steps = _flatten(json.loads(decoder.__getstate__()))
        if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
            return cls(DecoderKind.BYTES)
        if _is_local(steps):
            return cls(DecoderKind.LOCAL, any(step["type"] == "ByteFallback" for step in steps))
        return cls(DecoderKind.WHOLE)


def is_byte_piece(piece: str) -> bool:
    """Whether a byte-fallback decoder reads this piece as one byte."""
    return len(piece) == 6 and _BYTE_PIECE.match(piece) is not None


def piece_bytes(piece: str) -> bytes:
    """The bytes that a byte-level decoder sees in a piece.

    Each byte is written as one character. A piece with any other character (some added tokens) stands for its
    own UTF-8.
    """
    try:
        return bytes(_BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write a printable Latin-1 byte as itself, the n-th other byte as U+0100 + n."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for part in step["decoders"] for inner in _flatten(part)]
    return [step]


def _is_local(steps: list[dict[str, Any]]) -> bool:
    """Steps before a Fuse see pieces one by one; later ones see one string, where few have a local effect."""
    fused = False
    keeps_characters = True
    for step in steps:
        match step["type"]:
            case "Fuse":
                fused = True
            case "ByteFallback" if not fused:
                pass
            case "Metaspace" | "WordPiece" | "BPEDecoder" if not fused:
                keeps_characters = False
            case "Replace" if step["content"] and (not fused or _is_single_character(step["pattern"])):
                pass
            # One character at most is stripped: the predecessor that a piece is decoded after has that
            # character, unless an earlier step has swallowed it.
            case "Strip" if fused and keeps_characters and step["start"] <= 1 and step["stop"] == 0:
                keeps_characters = False
            case _:
                return False
    return True


def _is_single_character(pattern: dict[str, str]) -> bool:
    return len(pattern.get("String", "")) == 1
