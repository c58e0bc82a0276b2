"""Owns giving memory that was freed back to the system: C libraries keep it, in pieces that nothing else can use."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return what is free in the C library's heap, where it can (glibc). Takes milliseconds; not for the event loop.

    A prompt of megabytes is millions of small pieces while it is tokenised, and a small model's weights are hundreds of
    larger ones: without this, a process that has seen one stays hundreds of megabytes larger.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
