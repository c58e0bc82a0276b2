"""Owns showing Markdown on a terminal as it comes: finished blocks stay, and only the last one is drawn again.

Needs the package rich, which takes a tenth of a second to import: a command that wants it imports this module once its
request is on the way.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import ListItem, Markdown, MarkdownElement
from rich.segment import Segment

_FENCES: Final = ("```", "~~~")


class _Item(ListItem):
    """An item of a list. Numbers have the dot that rich leaves out, so that they don't read as part of the text."""

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        width = len(str(last_number)) + 3
        style = console.get_style("markdown.item.number", default="none")
        lines = console.render_lines(self.elements, options.update(width=options.max_width - width), style=self.style)
        for at, line in enumerate(lines):
            yield Segment(" " * width if at else f"{number}. ".rjust(width), style)
            yield from line
            yield Segment("\n")


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "list_item_open": _Item}


class Renderer:
    """A document that grows on standard output."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._rest = ""
        self._drawn = 0
        self._first = True

    def feed(self, text: str) -> None:
        """Show more of it."""
        self._rest += text
        done, self._rest = split(self._rest)
        self._erase()
        if done:
            self._write(self._rendered(done))
        if self._rest.strip():
            lines = self._rendered(self._rest, last=True).splitlines(keepends=True)
            # What has left the screen can't be drawn again: of a long block the end is shown until it is finished.
            shown = lines[-max(1, self._console.size.height - 1) :]
            self._write("".join(shown))
            self._drawn = len(shown)

    def end(self) -> None:
        """Whatever comes next begins below; what was shown stays."""
        self._erase()
        if self._rest.strip():
            self._write(self._rendered(self._rest))
        self._rest = ""

    def _rendered(self, text: str, *, last: bool = False) -> str:
        with self._console.capture() as capture:
            if not self._first:
                self._console.print()
            # A link's target is shown rather than hidden behind a text of the model's.
            self._console.print(_Markdown(text, hyperlinks=False))
        self._first = self._first and last
        return capture.get()

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}A\r\x1b[J")
            self._drawn = 0

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def split(text: str) -> tuple[str, str]:
    """The blocks of a document that nothing which follows can change, and the rest.

    A block ends at a blank line after which something begins at the margin that is no item of a list.
    """
    end = at = 0
    fence = ""
    blank = False
    for line in text.splitlines(keepends=True):
        inner = line.strip()
        if fence:
            if inner.startswith(fence) and not inner.strip(fence[0]):
                fence = ""
        elif inner:
            if blank and line[0] not in " \t" and not _may_be_item(line):
                end = at
            if inner.startswith(_FENCES):
                fence = inner[: len(inner) - len(inner.lstrip(inner[0]))]
        blank = not inner and not fence
        at += len(line)
    return text[:end], text[end:]


def _may_be_item(line: str) -> bool:
    """Whether a line begins an item of a list, or may once it is longer."""
    head = line.rstrip("\r\n").partition(" ")[0]
    return head in ("-", "*", "+") or (head[:-1].isdigit() and head[-1] in ".)") or (head.isdigit() and head == line)
