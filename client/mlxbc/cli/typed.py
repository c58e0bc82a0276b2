"""Owns what was typed: editing a line at a prompt, and bringing back earlier ones."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from mlxbc.cli import conversations

_LINES = 1000
"""Kept of all chats."""


@contextlib.contextmanager
def history(*, kept: bool) -> Iterator[None]:
    """Let `input` edit lines and know earlier ones; where conversations are kept, those of other chats too."""
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    if not kept:
        yield
        return
    path = conversations.directory() / "typed"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    before = readline.get_current_history_length()
    for number in (signal.SIGTERM, signal.SIGHUP):  # the latter comes when the terminal's window is closed
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        # A history that can't be kept is no reason to end otherwise.
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            readline.set_history_length(_LINES)
            readline.append_history_file(readline.get_current_history_length() - before, path)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """End with the status that the signal would have given, after what was typed has been kept."""
    raise SystemExit(128 + number)
