"""Owns telling a row's fault from the device's: what an exception of a forward means for everyone else."""

from __future__ import annotations

from typing import Final

from mlxbcd.errors import ServeError

_DEVICE: Final = ("command buffer", "gpu timeout", "device lost", "ignored (for causing prior")
"""Signs of a broken stream: what is queued behind the failed work, whoever's it is, fails or reads garbage."""
_CUDA: Final = "cuda error"
_OUT_OF_MEMORY: Final = ("out of memory", "malloc", "insufficient memory", "attempting to allocate")


class DeviceFault(Exception):
    """The device, or the state on it, can't be trusted any more: the process must end."""


def classify(error: Exception) -> ServeError:
    """The error to tell the rows whose forward raised `error`.

    Raises:
        DeviceFault: the fault is the device's own.
    """
    if isinstance(error, ServeError):
        return error
    if isinstance(error, DeviceFault):
        raise error
    text = str(error).lower()
    no_memory = isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)
    if any(sign in text for sign in _DEVICE) or (_CUDA in text and not no_memory):
        raise DeviceFault(str(error)) from error
    if no_memory:
        return ServeError("out_of_memory", "the device has no memory left for this request; retry with a shorter one")
    return ServeError("device_error", f"this request's forward failed ({type(error).__name__}: {error}); retry it")
