"""Owns how much the prompts of all open requests may hold together: first their text, then their token ids."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Final

from msgspec import Struct

from mlxbcd.errors import ServeError

TOKEN_BYTES: Final = 40
"""What a token id in a tuple takes."""


class Prompts:
    """Who holds how much. One prompt alone is never too much: a frame's size is bounded elsewhere.

    Attributes:
        limit: bytes.
        total: that all hold.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[Hashable, int] = {}

    def __repr__(self) -> str:
        return f"Prompts({self.total} of {self.limit} bytes, {len(self._held)} holders)"

    def check(self, more: int) -> None:
        """Refuse what is too much beside what is held.

        Raises:
            ServeError: queue_full.
        """
        if self.total and self.total + more > self.limit:
            raise ServeError(
                "queue_full",
                f"the prompts of open requests hold {self.total / 1e6:.0f} MB already; retry when some have ended",
            )

    def hold(self, who: Hashable, size: int) -> None:
        """From now on `who` holds `size` bytes; zero forgets it."""
        self.total += size - self._held.pop(who, 0)
        if size:
            self._held[who] = size

    def replace(self, who: Hashable, size: int) -> None:
        """`who` holds `size` bytes instead of what it held.

        Raises:
            ServeError: queue_full, that would be too much; it holds what it did.
        """
        self.check(size - self._held.get(who, 0))
        self.hold(who, size)


def weight(value: object) -> int:
    """Bytes of all text in a message, as it is in memory."""
    match value:
        case str():
            return sys.getsizeof(value)
        case Struct():
            return sum(weight(getattr(value, name)) for name in value.__struct_fields__)
        case list() | tuple():
            return sum(map(weight, value))
        case Mapping():
            return sum(weight(key) + weight(one) for key, one in value.items())
        case int() | float():
            return 28
    return 0
