"""Owns how a command ends: its exit code, and the line on standard error that says why.

The codes are those of sysexits.h where it has one, and the shell's customs elsewhere.
"""

from __future__ import annotations

import sys

from mlxbc.errors import (
    ConfigError,
    ConnectionLost,
    DaemonUnavailable,
    MlxbcError,
    ProtocolMismatch,
    RequestFailed,
    RequestTimeout,
)

OK = 0
FAILED = 1
"""The daemon could not do it."""
USAGE = 2
"""The command line asks for something that makes no sense; nothing was done."""
UNAVAILABLE = 69
"""No daemon, or one that doesn't serve this user."""
IO_ERROR = 74
"""The connection broke, or the output could not be written."""
TEMPORARY = 75
"""Try again later: the queue is full, memory is short, the daemon is stopping."""
PROTOCOL = 76
"""Client and daemon are of different versions."""
CONFIG = 78
"""An unknown model, or a setting that cannot work."""
TIMEOUT = 124
INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT."""
BROKEN_PIPE = 141
"""The reader of the output has gone: 128 + SIGPIPE, as any other filter would end."""

_OF_CODE = {
    "bad_request": USAGE,
    "grammar_invalid": USAGE,
    "unauthorized": UNAVAILABLE,
    "unknown_model": CONFIG,
    "queue_full": TEMPORARY,
    "out_of_memory": TEMPORARY,
    "shutting_down": TEMPORARY,
    "timeout": TIMEOUT,
    "proto_mismatch": PROTOCOL,
}

HELP = """\
environment:
  MLXBC_SOCKET  the daemon's socket, instead of the user's own
  MLXBC_DATA    the directory of imported models and kept conversations
  NO_COLOR      no escape sequences on the terminal
  COLUMNS       the width of this help

exit status:
  0    success
  1    the daemon could not do it
  2    usage error
  69   no daemon is running
  74   the connection broke, or the output could not be written
  75   try again later
  76   client and daemon speak different protocol versions
  78   unknown model, or a setting that cannot work
  124  timed out
  130  interrupted by Ctrl-C
  141  the reader of the output has gone
"""

STOPPED = "the daemon was told to stop, so there is nothing more to see"
"""Why something that goes on for as long as the daemon does has ended well."""


def explain(message: str) -> None:
    """Say on standard error why a command ends as it does."""
    # Python's own idea of no stream is standard output, where only the model's text belongs.
    if sys.stderr is not None:
        print(f"mlxbc: {message}", file=sys.stderr)


def tell(message: str) -> None:
    """Say on standard error what a command has done."""
    if sys.stderr is not None:
        print(message, file=sys.stderr)


def of_code(code: str) -> int:
    """The exit code for an error code of the wire."""
    return _OF_CODE.get(code, FAILED)


def of_error(error: MlxbcError) -> int:
    """The exit code for an exception of the client."""
    match error:
        case DaemonUnavailable():
            return UNAVAILABLE
        case ConnectionLost():
            return IO_ERROR
        case ProtocolMismatch():
            return PROTOCOL
        case ConfigError():
            return CONFIG
        case RequestTimeout():
            return TIMEOUT
        case RequestFailed():
            return of_code(error.code)
        case _:
            return FAILED
