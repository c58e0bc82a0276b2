"""Owns the client's errors: one exception type for each thing a caller can do something about."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar

    from mlxbc import wire


class MlxbcError(Exception):
    """Base of everything this package raises on purpose. `str(error)` says what to do about it."""


class ConfigError(MlxbcError):
    """A path or a setting of this machine cannot work."""


class DaemonUnavailable(MlxbcError):
    """No daemon answers at the socket.

    Attributes:
        path: the socket that was tried.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{reason}; start the daemon with: mlxbc serve --detach --wait")
        self.path = path


class ProtocolMismatch(MlxbcError):
    """The daemon speaks another version of the protocol, or not the protocol at all."""


class RequestTimeout(MlxbcError, TimeoutError):
    """The daemon sent nothing for the client's `timeout`. The request may still be running."""


class RequestFailed(MlxbcError):
    """The daemon refused or failed one request.

    Attributes:
        code: the wire's error code.
        message: what to do about it.
        retryable: whether the same request may succeed later, unchanged.
        data: machine-readable details, as the code defines them.
    """

    default_code: ClassVar[wire.ErrorCode] = "internal"

    def __init__(
        self,
        message: str,
        *,
        code: wire.ErrorCode | None = None,
        retryable: bool = False,
        data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code: wire.ErrorCode = code or self.default_code
        self.message = message
        self.retryable = retryable
        self.data: dict[str, Any] = data or {}


class BadRequest(RequestFailed):
    """A field is unknown, out of range or at odds with another; found before sending or by the daemon."""

    default_code = "bad_request"


class FrameTooLarge(RequestFailed):
    """The request has more bytes than this connection's limit."""

    default_code = "frame_too_large"


class Unauthorized(RequestFailed):
    """The daemon belongs to another user."""

    default_code = "unauthorized"


class UnknownModel(RequestFailed):
    """No model of that name is on this machine."""

    default_code = "unknown_model"


class LoadFailed(RequestFailed):
    """The model's files are there but cannot be loaded."""

    default_code = "load_failed"


class OutOfMemory(RequestFailed):
    """The request or the model does not fit now."""

    default_code = "out_of_memory"


class ContextTooLong(RequestFailed):
    """The prompt has more tokens than the model's context."""

    default_code = "context_too_long"


class GrammarInvalid(RequestFailed):
    """A schema, grammar or regular expression that can't be used; `data` tells the place where it can be told."""

    default_code = "grammar_invalid"


class QueueFull(RequestFailed):
    """The daemon has enough to do; ask again later."""

    default_code = "queue_full"


class ShuttingDown(RequestFailed):
    """The daemon is stopping and takes no more work."""

    default_code = "shutting_down"


class DeviceError(RequestFailed):
    """The accelerator or the process that drives it failed."""

    default_code = "device_error"


class ConnectionLost(DeviceError):
    """The connection ended before the request did: always retryable."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


_BY_CODE: dict[str, type[RequestFailed]] = {
    kind.default_code: kind
    for kind in (
        BadRequest,
        FrameTooLarge,
        Unauthorized,
        UnknownModel,
        LoadFailed,
        OutOfMemory,
        ContextTooLong,
        GrammarInvalid,
        QueueFull,
        ShuttingDown,
        DeviceError,
    )
}


def from_wire(error: wire.Error) -> MlxbcError:
    """The exception for an error frame."""
    if error.code == "proto_mismatch":
        return ProtocolMismatch(error.message)
    kind = _BY_CODE.get(error.code, RequestFailed)
    return kind(error.message, code=error.code, retryable=error.retryable, data=error.data)
