"""Owns telling tool calls from text, as it streams: each call once and whole, and nothing of it in the text.

What is between a model's markers is read by its parser, which is somebody else's. Nothing depends on how the text is
split over calls of `push`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from mlxbcd.text.matching import Matcher

Parse: TypeAlias = Callable[[str, list[dict[str, Any]] | None], Any]
"""From the text between the markers, and the tools there are, to one call or a list of them; raises if it can't."""

_ID_LENGTH: Final = 9
"""Mistral's templates insist on nine letters and digits."""
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its calls.

    Attributes:
        name: of the format.
        opening: text before a call, or before several.
        closing: text after it; empty where a call ends with its JSON, and the turn with the last call.
    """

    name: str
    opening: str
    closing: str
    parse: Parse


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        index: calls before it in this output.
        id: names the call when its result comes back.
        arguments: JSON text of an object.
    """

    index: int
    id: str
    name: str
    arguments: str


Part: TypeAlias = str | ToolCall
"""Text, never empty, or a call."""


class CallSplitter:
    """Takes the calls out of one stream's text.

    White space that follows a call directly is dropped, as after any marker.

    Args:
        tools: what may be called, as the chat template sees it.
        stream: names the output; with its index it makes a call's id, unless the model gives one.

    Attributes:
        unparsed: calls that were cut off or made no sense, in the model's words.
    """

    def __init__(self, style: ToolFormat, tools: Sequence[Mapping[str, Any]], stream: str) -> None:
        self._opening = Matcher([style.opening])
        self._reader = _Reader(style, [dict(tool) for tool in tools])
        self._body: _Marked | _Unmarked | None = None
        self._after_call = False
        self._stream = stream
        self._calls = 0
        self.unparsed: list[str] = []

    def __repr__(self) -> str:
        return f"CallSplitter({self._calls} calls, {'in one' if self._body is not None else 'outside'})"

    def push(self, text: str) -> list[Part]:
        """Add text; return what is certain now, in order."""
        parts: list[Part] = []
        position = 0
        while position < len(text):
            if self._body is None:
                plain, marker, position = self._opening.scan(text, position)
                self._say(plain, parts)
                if marker is not None:
                    self._body = self._reader.body()
                continue
            found, position = self._body.scan(text, position)
            self._take(found, parts)
            if self._body.closed:
                self._body, self._after_call = None, True
        return parts

    def finish(self) -> list[Part]:
        """The text ended: release what could have begun a marker. A call that is still open is `unparsed`."""
        parts: list[Part] = []
        body, self._body = self._body, None
        if body is None:
            self._say(self._opening.flush(), parts)
        elif (left := body.left()).strip():
            self.unparsed.append(left)
        return parts

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)

    def _take(self, found: _Found | None, parts: list[Part]) -> None:
        if found is None:
            return
        if not found.calls:
            self.unparsed.append(found.text)
        for name, arguments, given in found.calls:
            index, self._calls = self._calls, self._calls + 1
            parts.append(ToolCall(index, given or self._id(index), name, arguments))

    def _id(self, index: int) -> str:
        number = int.from_bytes(hashlib.blake2b(f"{self._stream}/{index}".encode(), digest_size=16).digest(), "big")
        digits = []
        for _ in range(_ID_LENGTH):
            number, digit = divmod(number, len(_ALPHABET))
            digits.append(_ALPHABET[digit])
        return "".join(digits)


class _Found(NamedTuple):
    """What was read between markers.

    Attributes:
        text: in the model's words.
        calls: (name, JSON text of the arguments, id if the model gave one); none if the text made no sense.
    """

    text: str
    calls: list[tuple[str, str, str]]


class _Unfinished(Exception):
    """A text ends inside a JSON string, so a marker at its end belongs to that."""


class _Reader:
    """Asks a parser, which may raise and return anything."""

    def __init__(self, style: ToolFormat, tools: list[dict[str, Any]]) -> None:
        self.style = style
        self._tools = tools
        self._names = {tool["function"]["name"] for tool in tools}

    def body(self) -> _Marked | _Unmarked:
        """What follows an opening marker."""
        return _Marked(self) if self.style.closing else _Unmarked(self)

    def read(self, text: str) -> _Found:
        """The calls of a text.

        Raises:
            _Unfinished: see there.
        """
        try:
            parsed = self.style.parse(text, self._tools)
            return _Found(text, [self._call(call) for call in (parsed if isinstance(parsed, list) else [parsed])])
        except Exception as error:  # a parser isn't ours, and what it meets is a model's fantasy
            for cause in (error, error.__cause__):
                if isinstance(cause, json.JSONDecodeError) and cause.msg.startswith("Unterminated string"):
                    raise _Unfinished from None
            return _Found(text, [])

    def _call(self, parsed: Any) -> tuple[str, str, str]:
        name, arguments = parsed["name"], parsed.get("arguments", parsed.get("parameters"))
        if not isinstance(name, str) or (name == "unknown" and name not in self._names):
            # "unknown" is what one of the parsers makes of a text without a call.
            raise ValueError(name)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        given = parsed.get("id")
        return name, arguments, given if isinstance(given, str) else ""


class _Marked:
    """The text between an opening and a closing marker."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._closing = Matcher([reader.style.closing])
        self._text = ""
        self.closed = False

    def scan(self, text: str, position: int) -> tuple[_Found | None, int]:
        """Read `text[position:]` up to the closing marker; where to go on in it."""
        before, marker, position = self._closing.scan(text, position)
        self._text += before
        if marker is None:
            return None, position
        try:
            found = self._reader.read(self._text)
        except _Unfinished:
            self._text += marker
            return None, position
        self.closed = True
        if not found.calls:
            found = found._replace(text=self._reader.style.opening + self._text + marker)
        return found, position

    def left(self) -> str:
        """What was read and belongs to no call."""
        return self._reader.style.opening + self._text + self._closing.flush()


class _Unmarked:
    """Calls without a closing marker: each ends where its JSON does. All that follows is more of them."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._opening = Matcher([reader.style.opening])
        self._text = ""
        self.closed = False

    def scan(self, text: str, position: int) -> tuple[_Found | None, int]:
        """Read `text[position:]` up to the end of a call."""
        listed = (self._text + text[position:]).lstrip().startswith("[")
        end = text.find("]" if listed else "}", position)
        stop = len(text) if end < 0 else end + 1
        self._text += text[position:stop]
        opening = self._reader.style.opening
        if self._text.lstrip().startswith(opening):
            self._text = self._text.lstrip()[len(opening) :]
        if end < 0 or (listed and not _is_json(self._text)):
            return None, stop
        try:
            found = self._reader.read(self._text)
        except _Unfinished:
            return None, stop
        if not found.calls:
            return None, stop
        self._text = ""
        return found, stop

    def left(self) -> str:
        """What was read and belongs to no call."""
        return self._reader.style.opening + self._text if self._text.strip() else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
