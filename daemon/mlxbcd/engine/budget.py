"""Owns how much memory the daemon may take, what follows from a machine's size, and what takes how much of it. Pure.

What is counted is what the daemon decides on: weights, row states, prefix caches. Each is a meter that is read when
somebody asks, so no figure is ever older than the thing it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Meter: TypeAlias = Callable[[], int]
"""Tells how many bytes somebody holds now."""

Kind: TypeAlias = Literal["weights", "kv", "prefix"]

GIB: Final = 1 << 30
MIB: Final = 1 << 20

_SYSTEM: Final = 6 * GIB
"""What other programs want, where there is enough for everybody."""
_LEAST_SHARE: Final = 0.5
_MOST_SHARE: Final = 0.75
_CACHE_SHARE: Final = 16
_CACHE_MOST: Final = 2 * GIB
_CACHE_LEAST: Final = 128 * MIB
_WIRED_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine allows. All are bytes.

    Attributes:
        budget: weights, row states and prefix caches together.
        cache: freed buffers that the allocator may keep besides.
        wired: the most that may be wired, where that is asked for: what the weights and their states may take, but
            well below what the device recommends, since a machine that can't page out dies of the next allocation.
    """

    budget: int
    cache: int
    wired: int


def limits(total: int, recommended: int = 0, *, wanted: int | None = None, cache: int | None = None) -> Limits:
    """The limits of a machine.

    Args:
        total: bytes of memory it has; 0 if it doesn't say, which is taken for little.
        recommended: working set that its device recommends; 0 if it has no opinion.
        wanted: what the user allows in all, the allocator's cache included; None is the default.
        cache: of that, what the allocator may keep; None is the default.

    Without a wish, half of the memory, but up to three quarters as long as 6 GiB are left for others.
    """
    total = total or 4 * GIB
    everything = wanted
    if everything is None:
        everything = max(int(total * _LEAST_SHARE), min(int(total * _MOST_SHARE), total - _SYSTEM))
        if recommended:
            everything = min(everything, recommended)
    if cache is None:
        cache = max(min(everything // _CACHE_SHARE, _CACHE_MOST), _CACHE_LEAST)
    cache = min(cache, everything // 2)
    budget = everything - cache
    return Limits(budget, cache, min(budget, int((recommended or total) * _WIRED_SHARE)))


class MemoryBudget:
    """The bytes that all models may take together, and who takes them. For the event loop's thread.

    Attributes:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._meters: dict[tuple[Hashable, Kind], Meter] = {}

    def __repr__(self) -> str:
        return f"MemoryBudget({self.used / 1e6:.0f} of {self.limit / 1e6:.0f} MB, {len(self._meters)} meters)"

    def measure(self, owner: Hashable, kind: Kind, meter: Meter | int) -> None:
        """From now on count what `meter` tells for `owner`; a number is a meter that always tells the same.

        A second meter of one owner and kind replaces the first.
        """
        if isinstance(meter, int):
            fixed = meter
            self._meters[owner, kind] = lambda: fixed
        else:
            self._meters[owner, kind] = meter

    def forget(self, owner: Hashable) -> None:
        """Count nothing of `owner` any more."""
        for key in [key for key in self._meters if key[0] == owner]:
            del self._meters[key]

    def held(self, owner: Hashable | None = None, kind: Kind | None = None) -> int:
        """Bytes that `owner` (None: all) holds as `kind` (None: any)."""
        return sum(
            meter()
            for (whose, what), meter in self._meters.items()
            if (owner is None or whose == owner) and (kind is None or what == kind)
        )

    @property
    def used(self) -> int:
        """Bytes that all hold."""
        return self.held()

    @property
    def free(self) -> int:
        """Bytes left; negative after the limit was lowered."""
        return self.limit - self.used

    def lacks(self, wanted: int) -> int:
        """Bytes that must be freed before `wanted` more fit; 0 if they do."""
        return max(0, wanted - self.free)
