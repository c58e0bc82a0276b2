"""Owns the errors that the front words itself: in the wire's form, and what to do about another protocol."""

from __future__ import annotations

from mlxbc import wire
from mlxbcd import __version__
from mlxbcd.errors import ServeError


def error_reply(error: ServeError, request: int | None) -> wire.Error:
    """`error` as the terminal frame of `request`; without one the connection itself is at fault."""
    return wire.Error(
        code=error.code, message=error.message, id=request, retryable=error.retryable, data=dict(error.data)
    )


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
