"""The mlxbc client: talk to the resident daemon over its Unix socket.

`Client` blocks, `AsyncClient` doesn't; both stream. Everything here is loaded when it is first used, so that
importing the package costs next to nothing and only `AsyncClient` brings in asyncio.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlxbc.aio import AsyncClient, AsyncStream
    from mlxbc.client import Client, Stream
    from mlxbc.errors import (
        BadRequest,
        ConfigError,
        ConnectionLost,
        ContextTooLong,
        DaemonUnavailable,
        DeviceError,
        FrameTooLarge,
        GrammarInvalid,
        LoadFailed,
        MlxbcError,
        OutOfMemory,
        ProtocolMismatch,
        QueueFull,
        RequestFailed,
        RequestTimeout,
        ShuttingDown,
        Unauthorized,
        UnknownModel,
    )
    from mlxbc.result import Result
    from mlxbc.wire import Message

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "BadRequest",
    "Client",
    "ConfigError",
    "ConnectionLost",
    "ContextTooLong",
    "DaemonUnavailable",
    "DeviceError",
    "FrameTooLarge",
    "GrammarInvalid",
    "LoadFailed",
    "Message",
    "MlxbcError",
    "OutOfMemory",
    "ProtocolMismatch",
    "QueueFull",
    "RequestFailed",
    "RequestTimeout",
    "Result",
    "ShuttingDown",
    "Stream",
    "Unauthorized",
    "UnknownModel",
]

_ELSEWHERE = {
    "AsyncClient": "mlxbc.aio",
    "AsyncStream": "mlxbc.aio",
    "Client": "mlxbc.client",
    "Stream": "mlxbc.client",
    "Result": "mlxbc.result",
    "Message": "mlxbc.wire",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'mlxbc' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_ELSEWHERE.get(name, "mlxbc.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
