"""Owns incremental detokenisation: token ids one at a time to text that is final the moment it is returned.

Every string returned is a piece of the full decode: concatenated they equal `Tokenizer.decode` of all ids,
exactly, for every kind of tokenizer. A token costs amortised O(1); what is held back is bounded by one UTF-8
sequence, or by one run of byte pieces where the vocabulary falls back to bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from mlxbcd.text.decoding import DecoderKind, is_byte_piece
from mlxbcd.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream. Streams share a tokenizer and nothing else.

    Args:
        continues: the stream goes on within a text, where the first token keeps a space that it would lose as the first
            of one.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._hidden = tokenizer.hidden
        self._text: _Text
        match tokenizer.decoding.kind:
            case DecoderKind.BYTES:
                self._text = _ByteText(tokenizer)
            case DecoderKind.LOCAL:
                self._text = _LocalText(tokenizer, tokenizer.anchor if continues else [])
            case DecoderKind.WHOLE:
                self._text = _WholeText(tokenizer, tokenizer.anchor if continues else [])

    def __repr__(self) -> str:
        return f"Detokenizer({self._text!r})"

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is final now, "" while a character is incomplete."""
        return "" if token_id in self._hidden else self._text.push(token_id)

    def prime(self, ids: Iterable[int]) -> str:
        """Add tokens whose text has been delivered before (a resumed stream).

        Returns:
            the text that pushing them one by one has returned: what the receiver already has. It isn't new
            text, but whatever follows the detokenizer (stop strings, channels) needs to see it too.
        """
        return "".join(map(self.push, ids))

    def finish(self) -> str:
        """End the text: return what was held back, incomplete bytes as U+FFFD. Push nothing after it."""
        return self._text.finish()


class _Text(Protocol):
    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteText:
    """Byte-level pieces: an incremental UTF-8 decoder is all it takes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def __repr__(self) -> str:
        return f"bytes, holding {self._utf8.getstate()[0]!r}"

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _LocalText:
    """Pieces whose text depends on the piece before: decode each after that one, and cut that one off."""

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_fallback = tokenizer.decoding.byte_fallback
        self._before = before
        """The newest token that has become text and ends a run of bytes; empty at the start of a text."""
        self._held: list[int] = []
        """Later tokens that have no text as yet: an open run of bytes."""

    def __repr__(self) -> str:
        return f"local, holding {self._held}"

    def push(self, token_id: int) -> str:
        piece = self._tokenizer.piece(token_id)
        if piece is None:
            # An id outside the vocabulary: the full decode leaves it out too.
            return ""
        self._held.append(token_id)
        # An empty piece has nothing to cut off, so it can't be the predecessor of the next.
        open_ended = not piece or (self._byte_fallback and is_byte_piece(piece))
        return "" if open_ended else self._release()

    def finish(self) -> str:
        return self._release() if self._held else ""

    def _release(self) -> str:
        decode = self._tokenizer.decode
        text = decode(self._before + self._held)[len(decode(self._before)) :]
        self._before = self._held[-1:]
        self._held = []
        return text


class _WholeText:
    """Nothing is known about the decoder, so nothing is final before the end."""

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._before = before
        self._ids: list[int] = []

    def __repr__(self) -> str:
        return f"whole, holding {len(self._ids)} tokens"

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._ids)[len(decode(self._before)) :]
