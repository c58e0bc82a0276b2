"""Owns the daemon's log: one line per event, to stderr or a rotated private file, and never a prompt.

A line that is about a request carries the request's stream id, in a format for people or as one JSON object.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Final

FILE_BYTES: Final = 4 * 1024 * 1024
FILES_KEPT: Final = 3

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The stream id of the request that this task works for."""

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request", "taskName"}
"""What every record has; anything else was given with `extra`."""


def start(level: str, file: Path | None, form: str = "text") -> None:
    """Send the log of the whole process to `file`, or to stderr.

    Args:
        form: "text" or "json".

    Raises:
        OSError: the file can't be opened.
    """
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        make_private(file)
        handler = logging.handlers.RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=FILES_KEPT)
    handler.addFilter(_name_request)
    handler.setFormatter(Json() if form == "json" else Text())
    logging.getLogger().addHandler(handler)
    set_level(level)


def set_level(level: str) -> None:
    """The least that is logged from now on."""
    logging.getLogger().setLevel(level.upper())


class Text(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`; the request's id goes in front of the message.

        Names that clients give may be in that, and must not look like a line of its own.
        """
        record.message = one_line(record.message)
        request = getattr(record, "request", "")
        line = super().formatMessage(record)
        return line.replace(": ", f": [{request[:8]}] ", 1) if request else line


class Json(logging.Formatter):
    """One object a line: time, level, logger, message, the request's id, and whatever else was given."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := getattr(record, "request", ""):
            entry["request"] = request
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        return json.dumps(entry, ensure_ascii=False, default=str)


def make_private(file: Path) -> None:
    """Create `file` for this user alone, if it doesn't exist.

    Raises:
        OSError: it can't be created.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))


def one_line(text: str) -> str:
    """A text whose characters are all to be seen, the others escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def where(error: BaseException) -> str:
    """Kind and origin of an exception, without its message: that may quote a prompt."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(error).__name__
    return f"{type(error).__name__} at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def _name_request(record: logging.LogRecord) -> bool:
    """Say which request a record is about, where the code that made it didn't."""
    if not hasattr(record, "request"):
        record.request = request_id.get()
    return True
