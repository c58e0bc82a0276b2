"""Owns what a person sees: the model's text on standard output, everything about it on standard error.

Standard output carries the model's text and nothing else, whatever it is connected to. Reasoning, progress
and notes go to standard error, and only if that is a terminal. Escape sequences are for terminals that want
them: never with `NO_COLOR` or `TERM=dumb`.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from mlxbc import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlxbc.cli.markdown import Renderer

_DIM, _PLAIN, _ERASE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "␛")
"""What a terminal would obey rather than show. A model may have been told by some text to say it."""


class Terminal:
    """The two output streams of one command.

    Args:
        quiet: no progress and no notes.
        reasoning: show what the model thinks.

    Attributes:
        screen: standard output is one: somebody waits for what is shown there.

    Raises:
        OSError: there is no standard output.
    """

    def __init__(self, *, quiet: bool = False, reasoning: bool = True) -> None:
        if not sys.stdout.writable():
            raise OSError("standard output is closed")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a locale without this character is no reason to stop
        attended = sys.stderr is not None and sys.stderr.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
        self._styled = attended and not plain
        self._notes = attended and not quiet
        self._progress = self._styled and not quiet
        self.screen = sys.stdout.isatty()
        self._renders = self.screen and not plain
        self._renderer: Renderer | None = None
        self._reasoning = attended and reasoning
        self._transient = False
        self._thinking = False
        self._open_line = False

    def render_markdown(self) -> None:
        """From now on show the model's text as the Markdown that it is, where standard output is a screen for it."""
        if self._renders:
            from mlxbc.cli.markdown import Renderer

            self._renderer = Renderer()

    def text(self, text: str) -> None:
        """Write the model's text, at once."""
        if not text:
            return
        self._settle()
        if self.screen:
            text = text.translate(_CONTROL)
        if self._renderer is not None:
            self._renderer.feed(text)
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        self._open_line = not text.endswith("\n")

    def end_text(self) -> None:
        """Let the next thing begin on a line of its own."""
        self._settle()
        if self._renderer is not None:
            self._renderer.end()
        if self._open_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open_line = False

    def reasoning(self, text: str) -> None:
        """Show what the model thinks, dimmed."""
        if not (self._reasoning and text):
            return
        self._erase()
        if self._renderer is not None:
            self._renderer.end()
        text = text.translate(_CONTROL)
        self._err(f"{_DIM}{text}{_PLAIN}" if self._styled else text)
        self._thinking = True

    def starting(self) -> None:
        """Tell that the daemon isn't ready yet."""
        self.note("the daemon is getting ready, which takes a little longer the first time; its log says what it does")

    def queued(self, accepted: wire.Accepted) -> None:
        """Show how many requests come first, if any do."""
        if accepted.position:
            self._show(f"waiting for {accepted.position} other request{'s' * (accepted.position > 1)}")

    def progress(self, progress: wire.Progress) -> None:
        """Show how far the daemon is, on a line that the next output replaces."""
        percent = 100 * progress.done // max(1, progress.total)
        if progress.phase == "load":
            self._show(f"loading {percent} %")
        else:
            self._show(f"reading the prompt: {_short(progress.done)} of {_short(progress.total)} tokens")

    def note(self, line: str) -> None:
        """Tell a person something; nobody is told where nobody looks."""
        if self._notes:
            self._settle()
            self._err(f"{line}\n")

    def report(self, line: str) -> None:
        """Write what was asked for, whoever looks."""
        if sys.stderr is not None:
            self._settle()
            self._err(f"{line}\n")

    def _show(self, line: str) -> None:
        if self._progress and not (self._open_line or self._thinking):
            self._err(f"{_ERASE}{line}")
            self._transient = True

    def _erase(self) -> None:
        if self._transient:
            self._err(_ERASE)
            self._transient = False

    def _settle(self) -> None:
        self._erase()
        if self._thinking:
            self._err("\n\n")
            self._thinking = False

    @staticmethod
    def _err(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _short(count: int) -> str:
    return str(count) if count < 10_000 else f"{count / 1000:.0f}k"
