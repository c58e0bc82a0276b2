"""Owns what the model sees of a document, and what becomes of its answer (pure)."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

PREFIX: Final = 32768
SUFFIX: Final = 8192
"""However long lines are, no more characters than these are sent of each part."""


class Reach(Struct, frozen=True, kw_only=True):
    """Lines around the cursor that the model sees."""

    before: int = 256
    after: int = 64


def around(source: str, offset: int, reach: Reach) -> dict[str, Any]:
    """`prefix` and `suffix` of position `offset` in characters, and `single_line` where the rest of its line has text.

    The prefix begins at a line that moves in steps: one that moved with every line would make the daemon read all of it
    anew.
    """
    line = source.count("\n", 0, offset)
    step = max(1, reach.before // 2)
    first = max(0, -(-(line - reach.before) // step) * step)
    start = _line_start(source, first)
    end = _line_start(source, line + 1 + reach.after)
    start += max(0, -(-(offset - start - PREFIX) // (PREFIX // 2)) * (PREFIX // 2))
    end = min(end, offset + SUFFIX)
    fields: dict[str, Any] = {"prefix": _unicode(source[start:offset]), "suffix": _unicode(source[offset:end])}
    if behind(source, offset).strip():
        fields["single_line"] = True
    return fields


def behind(source: str, offset: int) -> str:
    """What stands behind the cursor in its line."""
    end = source.find("\n", offset)
    return source[offset:] if end < 0 else source[offset:end].removesuffix("\r")


def trimmed(text: str, rest: str, *, cut: bool) -> str:
    """A suggestion as it is shown.

    One of several lines that was `cut` off ends with its last whole line, and `rest`, what stands behind the cursor
    already, is not suggested again.
    """
    if cut and "\n" in text:
        text = text[: text.rindex("\n")]
    text = text.rstrip()
    if rest:
        text = text.removesuffix(rest)
    return text if text.strip() else ""


def _unicode(text: str) -> str:
    """Text that UTF-8 can carry: JSON may bring half a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _line_start(source: str, line: int) -> int:
    """Where a line begins, counted from 0; the end of the source if it has fewer."""
    at = 0
    for _ in range(line):
        at = source.find("\n", at) + 1
        if at == 0:
            return len(source)
    return at
