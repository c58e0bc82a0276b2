"""Owns MLX's process-wide settings: making it ready, and what its allocator may keep. On the device thread."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Ready:
    """What MLX runs on.

    Attributes:
        name: "cpu", or the GPU's.
        recommended: bytes that the device recommends to use; 0 if it has no opinion.
    """

    name: str
    recommended: int


def bring_up() -> Ready:
    """Make MLX ready."""
    if mx.default_device().type == mx.DeviceType.cpu:
        # Compiling goes through g++ at run time there: a second per new shape, for no measurable gain.
        mx.disable_compile()
        return Ready("cpu", 0)
    recommended = mx.device_info().get("max_recommended_working_set_size", 0)
    return Ready(str(mx.default_device()), int(recommended))


def limit(everything: int, cache: int, wired: int | None = None) -> None:
    """Limit the allocator, between two jobs, when nothing is being evaluated.

    Args:
        everything: bytes after which it lets running work finish before it allocates more.
        cache: freed bytes that it may keep.
        wired: bytes that the system may not page out; None leaves that. To change it while something is evaluated has
            brought systems down, so it is given once, at the start.
    """
    mx.set_memory_limit(everything)
    mx.set_cache_limit(cache)
    if wired is not None:
        mx.set_wired_limit(wired)
