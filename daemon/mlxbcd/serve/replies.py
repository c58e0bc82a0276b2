"""Owns the errors that the front words itself: in the wire's form, and what to do about another protocol."""

from __future__ import annotations

import re
from typing import Final

from mlxbc import wire
from mlxbcd import __version__
from mlxbcd.errors import ServeError

_LONGEST: Final = 600
_KEPT: Final = 60
_LONG_WORD: Final = re.compile(r"\S{200,}")
"""Longer than any path or name that we mention on purpose."""


def error_reply(error: ServeError, request: int | None) -> wire.Error:
    """`error` as the terminal frame of `request`; without one the connection itself is at fault."""
    return wire.Error(
        code=error.code, message=short(error.message), id=request, retryable=error.retryable, data=dict(error.data)
    )


def short(message: str) -> str:
    """`message` without what is long in it: that is what the client has sent, and needn't be told to it again.

    What is no word of ours (a name, a field, a value of hundreds of characters) keeps its beginning.
    """
    message = _LONG_WORD.sub(lambda word: word[0][:_KEPT] + "…", message)
    return message if len(message) <= _LONGEST else message[: _LONGEST - 1] + "…"


def mismatch(hello: wire.Hello) -> ServeError:
    """Why a client of another protocol can't be served, with both versions and what to run."""
    if hello.proto > wire.PROTOCOL:
        advice = "restart the daemon to get its new version: `mlxbc stop`, then `mlxbc serve --detach --wait`"
    else:
        advice = "update the client: `pip install --upgrade mlxbc`"
    return ServeError(
        "proto_mismatch",
        f"the client speaks protocol {hello.proto} (version {hello.version or 'unknown'}), "
        f"the daemon protocol {wire.PROTOCOL} (version {__version__}): {advice}",
        client=hello.proto,
        daemon=wire.PROTOCOL,
    )
