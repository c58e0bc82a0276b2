"""Owns finding code in an answer: the fenced blocks of Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator

CODE_ONLY = (
    "Answer with code alone, in one fenced Markdown block. No explanation before or after it; what has to be said is a "
    "comment in the code."
)
"""The system prompt of `--code`."""


def blocks(text: str) -> Iterator[str]:
    """The contents of fenced blocks, each line with its end. One that is cut off counts up to there."""
    fence = ""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        mark = _mark(line)
        if not fence:
            if mark:
                fence, lines = mark, []
        elif mark and mark[0] == fence[0] and len(mark) >= len(fence) and not line.strip().strip(mark[0]):
            yield "".join(lines)
            fence = ""
        else:
            lines.append(line)
    if fence:
        yield "".join(lines)


def first(text: str) -> str | None:
    """The first block; None if there is none."""
    return next(blocks(text), None)


def code(text: str) -> str:
    """What a model was asked for as code alone: its first block, or everything where it left the fences out."""
    block = first(text)
    return text if block is None else block


def _mark(line: str) -> str:
    """The backticks or tildes that a line opens or closes a block with; empty if it does neither."""
    inner = line.lstrip(" ")
    if len(line) - len(inner) > 3 or inner[:3] not in ("```", "~~~"):
        return ""
    sign = inner[0]
    mark = inner[: len(inner) - len(inner.lstrip(sign))]
    # Backticks later in the line make it a span of code within a text.
    return "" if sign == "`" and "`" in inner[len(mark) :] else mark
