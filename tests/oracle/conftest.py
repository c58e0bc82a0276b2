"""Owns what the oracle's tests share: small capacity classes, and plain kernels instead of compiled ones."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from oracle.families import small_classes


@pytest.fixture(autouse=True)
def _small_classes(request: pytest.FixtureRequest) -> Iterator[None]:
    mx.disable_compile()
    if request.node.get_closest_marker("model") is not None:
        yield  # a real model runs as it is served
        return
    with small_classes():
        yield
