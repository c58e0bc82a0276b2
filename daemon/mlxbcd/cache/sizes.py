"""Owns how much memory and disk the prefix cache takes where nobody says. Pure."""

from __future__ import annotations

import os
from typing import Final

_SHARE_OF_MEMORY: Final = 8
_SHARE_OF_DISK: Final = 4
_MOST_DISK: Final = 32_000_000_000


def ram_for(memory: int) -> int:
    """Bytes of RAM on a machine with so many."""
    return memory // _SHARE_OF_MEMORY


def disk_for(free: int, held: int) -> int:
    """Bytes of disk where so many are free, and the cache holds some already."""
    return min((free + held) // _SHARE_OF_DISK, _MOST_DISK)


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
