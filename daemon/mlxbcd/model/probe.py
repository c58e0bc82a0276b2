"""Owns the device's test piece: the same small work everywhere, to tell a throttled process from a slow machine."""

from __future__ import annotations

import time
from typing import Final

import mlx.core as mx

_SIZE: Final = 512
_PRODUCTS: Final = 4
_TRIES: Final = 5


def probe() -> float:
    """Seconds of the fastest of a few tries to multiply matrices. On the device thread, or the only one there is."""
    dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.float16
    a = mx.full((_SIZE, _SIZE), 1.0 / _SIZE, dtype=dtype)
    mx.eval(a)
    best = float("inf")
    for _ in range(_TRIES):
        began = time.perf_counter()
        product = a
        for _ in range(_PRODUCTS):
            product = product @ a
        mx.eval(product)
        best = min(best, time.perf_counter() - began)
    return best
