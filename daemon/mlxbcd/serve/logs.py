"""Owns the daemon's log: one line per event, to stderr or a rotated private file, and never a prompt."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from pathlib import Path
from typing import Final

FILE_BYTES: Final = 4 * 1024 * 1024
FILES_KEPT: Final = 3


def start(level: str, file: Path | None) -> None:
    """Send the log of the whole process to `file`, or to stderr.

    Raises:
        OSError: the file can't be opened.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        make_private(file)
        handler = logging.handlers.RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())


def make_private(file: Path) -> None:
    """Create `file` for this user alone, if it doesn't exist.

    Raises:
        OSError: it can't be created.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))


def where(error: BaseException) -> str:
    """Kind and origin of an exception, without its message: that may quote a prompt."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error).__name__
    return f"{type(error).__name__} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
