"""Owns the channels of an output: reasoning between a model's markers, text everywhere else.

Markers never show, wherever they stand and however they are split over tokens. White space that follows a
marker directly is dropped: models write the markers on lines of their own. Nothing depends on how the text is
split over calls.
"""

from __future__ import annotations

from mlxbc.wire import Channel
from mlxbcd.text.matching import Matcher


def opens_inside(prompt_text: str, markers: tuple[str, str] | None) -> bool:
    """Whether a prompt leaves a reasoning block open, so that the model's first token is reasoning.

    Only an opening marker at the very end counts (white space after it aside): chat templates end a prompt
    like that, while one further up may just as well stand in a user's message.
    """
    return markers is not None and prompt_text.rstrip().endswith(markers[0])


class ChannelSplitter:
    """Splits one stream's text into channels.

    Args:
        markers: what opens and closes reasoning; None puts everything into the text channel, untouched.
        inside: the prompt has already opened a reasoning block (`opens_inside`).
        first: reasoning comes first or not at all; from the first character that is said on everything is text, to the
            letter.
    """

    def __init__(self, markers: tuple[str, str] | None, *, inside: bool, first: bool = False) -> None:
        if inside and markers is None:
            raise ValueError("a stream can't begin inside reasoning without markers")
        self._opening = markers[0] if markers is not None else None
        self._matcher = Matcher(markers) if markers is not None else None
        self._channel: Channel = "reasoning" if inside else "text"
        self._after_marker = inside
        self._first = first

    def __repr__(self) -> str:
        return f"ChannelSplitter({self._channel}, {self._matcher!r})"

    def push(self, text: str) -> list[tuple[Channel, str]]:
        """Add text; return what is certain now, in order: no text is empty, neighbours differ in channel."""
        if self._matcher is None:
            return [(self._channel, text)] if text else []
        parts: list[tuple[Channel, str]] = []
        position = 0
        while True:
            certain, marker, position = self._matcher.scan(text, position)
            self._emit(certain, parts)
            if self._first and self._channel == "text" and (certain or marker not in (None, self._opening)):
                self._emit((marker or "") + self._matcher.flush() + text[position:], parts)
                self._matcher = None
                return parts
            if marker is None:
                return parts
            # An opening marker inside reasoning, or a closing one outside, changes nothing, and doesn't show.
            self._channel = "reasoning" if marker == self._opening else "text"
            self._after_marker = True
            if self._first and self._channel == "text":
                self._after_marker = False
                self._emit(text[position:], parts)
                self._matcher = None
                return parts

    def finish(self) -> list[tuple[Channel, str]]:
        """The text ended: release what could have begun a marker."""
        parts: list[tuple[Channel, str]] = []
        if self._matcher is not None:
            self._emit(self._matcher.flush(), parts)
        return parts

    def _emit(self, text: str, parts: list[tuple[Channel, str]]) -> None:
        if self._after_marker:
            text = text.lstrip()
        if not text:
            return
        self._after_marker = False
        if parts and parts[-1][0] == self._channel:
            text = parts.pop()[1] + text
        parts.append((self._channel, text))
