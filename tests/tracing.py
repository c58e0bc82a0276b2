"""Owns running with functions traced on a CPU."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

CAN_TRACE = sys.platform != "linux" or any(map(shutil.which, ("g++", "c++")))
needs_a_compiler = pytest.mark.skipif(not CAN_TRACE, reason="without a C++ compiler MLX traces nothing on a CPU")

_UNFUSED = 2
"""MLX's mode in which functions are traced and replayed as ever, but operations aren't fused: fusing them takes a run
of the C++ compiler for every new combination."""


@contextmanager
def traced(*, fused: bool = False) -> Iterator[None]:
    """Inside, compiled functions are traced; where the CPU computes, operations are fused only if asked for."""
    mx.enable_compile()
    library = Path(mx.__file__).parent / "lib" / "libmlx.so"
    if not fused and library.exists():
        ctypes.CDLL(str(library))._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(_UNFUSED)
    try:
        yield
    finally:
        mx.disable_compile()
