"""Owns who may ask over HTTP: the Host and Origin checks against pages of a browser, and the token.

A page on the web can make a browser send requests to this machine. What gives it away is the name it reached us by
(DNS rebinding: a name of the attacker's that leads here) and the Origin that browsers add. Neither is worth anything
against other programs; that is what the token is for.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from mlxbc.http.answering import refusal
from mlxbc.http.failures import Refused

OPEN: Final = frozenset({"/health"})
"""Paths that need no token, since they tell nothing."""


class Guard:
    """In front of the application, and of whatever answers preflight requests.

    Args:
        hosts: names by which this server may be called, beside localhost and addresses.
        origins: of pages that may ask; `*` stands for all.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str] = (), origins: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts} | {"localhost"}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse with 403."""
        if scope["type"] == "http":
            refused = self._refused(header(scope, b"host"), header(scope, b"origin"))
            if refused is not None:
                await refusal(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, host: str | None, origin: str | None) -> Refused | None:
        name = hostname(host or "")
        if not is_address(name) and name not in self._hosts:
            return _forbidden(
                f"this server is not called {name[:80]!r}; mlxbc http --allow-host {name[:80]} lets it be"
            )
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            return _forbidden(
                f"pages of {origin[:80]} may not ask this server; mlxbc http --allow-origin {origin[:80]} lets them"
            )
        return None


class Token:
    """Lets through who knows the token.

    Args:
        token: what clients call their API key; None lets everybody through.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._wanted = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse with 401."""
        if scope["type"] == "http" and self._wanted is not None and scope["path"] not in OPEN:
            kind, _, given = (header(scope, b"authorization") or "").partition(" ")
            known = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._wanted)
            if kind.lower() != "bearer" or not known:
                refused = Refused(
                    "this server needs its API key; mlxbc http --show-token prints it",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                )
                await refusal(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def header(scope: Scope, name: bytes) -> str | None:
    """A header's value; of several equal ones, all of them, since none can be trusted more."""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return ", ".join(values) if values else None


def hostname(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def is_address(name: str) -> bool:
    """Whether a name is an IP address: nobody can make another's browser believe that such a one is theirs."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(message: str) -> Refused:
    return Refused(message, status=403, kind="permission_error", code="forbidden")
