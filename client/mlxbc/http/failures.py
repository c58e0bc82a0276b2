"""Owns errors in OpenAI's shape: which status, type and code an error of this side or of the daemon has. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from mlxbc.errors import ConfigError, DaemonUnavailable, MlxbcError, ProtocolMismatch, RequestFailed, RequestTimeout
from mlxbc.misfit import said

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

_OF_CODE: Final[dict[str, tuple[int, str, str]]] = {
    "bad_request": (400, _INVALID, "bad_request"),
    "context_too_long": (400, _INVALID, "context_length_exceeded"),
    "grammar_invalid": (400, _INVALID, "grammar_invalid"),
    "unknown_model": (404, _INVALID, "model_not_found"),
    "frame_too_large": (413, _INVALID, "request_too_large"),
    "queue_full": (503, _SERVER, "queue_full"),
    "out_of_memory": (503, _SERVER, "out_of_memory"),
    "shutting_down": (503, _SERVER, "shutting_down"),
    "timeout": (504, _SERVER, "timeout"),
}
"""Status, type and OpenAI's code, where it has one, for the wire's codes. All others are 500."""

_SHOWN: Final = 80
"""Characters of a client's own input that an error repeats."""
_AT: Final = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")


class Detail(msgspec.Struct, frozen=True):
    """The one thing in an error's body."""

    message: str
    type: str
    param: str | None
    code: str | None


class Body(msgspec.Struct, frozen=True):
    """What a client parses."""

    error: Detail


class Refused(Exception):
    """A request that ends here, in OpenAI's shape.

    Args:
        message: says what to do.
        status: of HTTP.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: the field that is at fault.
        retry: whether the same request may succeed later; clients that retry by themselves heed it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = _INVALID,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry = retry
        self.detail = Detail(message, kind, param, code)

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(Body(self.detail))

    @property
    def headers(self) -> dict[str, str]:
        """Those that go with it."""
        headers = {"content-type": "application/json", "x-should-retry": "true" if self.retry else "false"}
        if self.retry:
            headers["retry-after"] = "1"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def of_error(error: MlxbcError, called: Mapping[str, str] = MappingProxyType({})) -> Refused:
    """What an error of the client's becomes.

    Args:
        called: what the request's parameters are called that became fields of the wire, by these fields.
    """
    match error:
        case RequestFailed():
            status, kind, code = _OF_CODE.get(error.code, (500, _SERVER, error.code))
            message, param = _in_their_words(error, called)
            return Refused(message, status=status, kind=kind, code=code, param=param, retry=error.retryable)
        case DaemonUnavailable():
            return Refused(str(error), status=503, kind=_SERVER, code="daemon_unavailable", retry=True)
        case RequestTimeout():
            return Refused(str(error), status=504, kind=_SERVER, code="timeout", retry=True)
        case ProtocolMismatch() | ConfigError():
            return Refused(str(error), status=500, kind=_SERVER, code="configuration")
        case _:
            return Refused(str(error), status=500, kind=_SERVER, code="internal")


def _in_their_words(error: RequestFailed, called: Mapping[str, str]) -> tuple[str, str | None]:
    """The message of an error, and the parameter it is about, if it is about one."""
    if error.code == "unknown_model":
        return error.message, "model"
    if error.code == "grammar_invalid":
        return error.message, called.get("schema")
    fields, why = error.data.get("fields", ()), error.data.get("why")
    if (param := next((called[field] for field in fields if field in called), None)) is not None:
        return (f"{why}; leave {param} out" if why else error.message), param
    at = _AT.search(error.message)
    if at is not None and (param := called.get(re.split(r"[.\[]", at["path"])[0])) is not None:
        return f"{error.message[: at.start()]} - at `{param}`", param
    return error.message, None


def of_decoding(error: Exception, kind: Any) -> Refused:
    """What a body that is no request of that kind becomes: it names the field."""
    message = str(error)
    at = _AT.search(message)
    param = at["path"] if at else None
    if unknown := _UNKNOWN.match(message):
        name = unknown["name"][:_SHOWN]
        param = f"{param}.{name}" if param else name
        return Refused(f"this endpoint has no parameter {param}; leave it out", code="unknown_parameter", param=param)
    if isinstance(error, msgspec.ValidationError):
        return Refused(said(error, kind), code="invalid_value", param=param)
    return Refused(f"the body is not JSON: {message}", code="invalid_json")
