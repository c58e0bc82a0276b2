"""Owns the way from tokens to what a client reads: detokenising, stops, channels and tool calls of one output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from mlxbc.wire import Channel
from mlxbcd.text.channels import ChannelSplitter
from mlxbcd.text.detokenizer import Detokenizer
from mlxbcd.text.stops import StopMatcher
from mlxbcd.text.tokenizer import Tokenizer
from mlxbcd.text.tools import CallSplitter, ToolCall

Piece: TypeAlias = tuple[Channel, str | ToolCall]
"""A run of text, or a call in the channel of tool calls."""


class TextStage:
    """Tokens in, pieces of text out.

    What comes out depends on the tokens alone, so an output resumed from its token ids emits exactly what is missing.

    Args:
        stop: strings that end the text.
        channels: tells reasoning from text.
        calls: tells calls from text, where there are tools.
        continues: the text goes on where the prompt ended, so its first token isn't the first of a text.
        trimmed: white space at the very end isn't part of the text.

    Attributes:
        hit: the stop string that ended the text, once one has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        channels: ChannelSplitter,
        calls: CallSplitter | None = None,
        *,
        continues: bool = False,
        trimmed: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, continues=continues)
        self._stops = StopMatcher(stop)
        self._channels = channels
        self._calls = calls
        self._trimmed = trimmed
        self._held = ""
        self.hit: str | None = None

    def __repr__(self) -> str:
        return f"TextStage({self._detokenizer!r}, {self._stops!r}, {self._channels!r}, {self._calls!r})"

    @property
    def unparsed(self) -> list[str]:
        """Tool calls that were cut off or made no sense."""
        return self._calls.unparsed if self._calls is not None else []

    def prime(self, tokens: Iterable[int]) -> None:
        """Take in tokens whose text the client has."""
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> list[Piece]:
        """What is now final. After a stop string was hit, nothing more."""
        return self._cut(self._detokenizer.push(token))

    def finish(self) -> list[Piece]:
        """What was held back."""
        pieces: list[Piece] = []
        if self.hit is None:
            pieces += self._cut(self._detokenizer.finish())
        if self.hit is None:
            pieces += self._split(self._channels.push(self._stops.finish()))
        pieces += self._split(self._channels.finish())
        if self._calls is not None:
            pieces += [_piece(part) for part in self._calls.finish()]
        return pieces

    def _cut(self, text: str) -> list[Piece]:
        if self.hit is not None or not text:
            return []
        text, self.hit = self._stops.push(text)
        return self._split(self._channels.push(text))

    def _split(self, runs: Iterable[tuple[Channel, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for channel, text in runs:
            if channel == "text" and self._trimmed:
                text = self._without_end(text)
            if channel == "text" and self._calls is not None:
                pieces += [_piece(part) for part in self._calls.push(text)]
            elif text:
                pieces.append((channel, text))
        return pieces

    def _without_end(self, text: str) -> str:
        """The text up to its last character that isn't white space, with what was held back of earlier ones."""
        whole = self._held + text
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        return shown


def _piece(part: str | ToolCall) -> Piece:
    return ("text", part) if isinstance(part, str) else ("tool_calls", part)
