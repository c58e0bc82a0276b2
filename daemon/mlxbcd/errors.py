"""Owns the daemon's error taxonomy: one exception whose code is a code of the wire."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    # The wire needs msgspec, and what only computes does not.
    from mlxbc.wire import ErrorCode

RETRYABLE: frozenset[str] = frozenset({"queue_full", "timeout", "shutting_down", "device_error", "out_of_memory"})


class ServeError(Exception):
    """A failure with a code of the wire and a message that says what to do about it."""

    def __init__(self, code: ErrorCode, message: str, **data: Any) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message
        self.data = data

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later, unchanged."""
        return self.code in RETRYABLE

    def __repr__(self) -> str:
        return f"ServeError({self.code}: {self.message})"


def unmet(code: ErrorCode, why: str, advice: str, fields: Sequence[str], **data: Any) -> ServeError:
    """What `fields` of the wire ask for can't be had.

    `data` has them, and the reason without the advice that names them: clients with a front of their own may call them
    otherwise.
    """
    return ServeError(code, f"{why}; {advice}", fields=list(fields), why=why, **data)


def outline(error: BaseException) -> str:
    """Kind and trace of an exception for the log, without its message: that may quote a prompt."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()
