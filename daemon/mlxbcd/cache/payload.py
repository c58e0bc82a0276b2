"""Owns the bytes of a cached piece of state: what is in them, and a page-aligned buffer that holds them.

One buffer holds all layers' arrays of a piece. It is ordinary memory, not MLX's: any thread may read it, the SSD tier
writes and reads it as it is, and dropping it gives its pages back to the system.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Kind: TypeAlias = Literal["positions", "window", "recurrent"]

_ALIGN: Final = 64
_HUGE: Final = 2 * 1024 * 1024
NUMPY: Final[dict[str, str]] = {
    "bool": "?",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float16": "f2",
    "bfloat16": "u2",
    "float32": "f4",
    "complex64": "c8",
}
"""How numpy sees each of MLX's types; it has no bfloat16, whose bits it carries as integers."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One array of a piece: its type by MLX's name, its shape, and where it begins in the buffer."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(NUMPY[self.dtype]).itemsize


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One layer's share of a piece, or that of one cache of a layer with several.

    Attributes:
        path: the layer's number, then those of the caches inside.
        parts: its arrays; None where a recurrent layer has written none.
        start: position of a window's first key.
        scheme: bits and group size of quantised keys and values, if they are.
    """

    path: tuple[int, ...]
    kind: Kind
    parts: tuple[Part | None, ...]
    start: int = 0
    scheme: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """A piece of state: what is in it, and the buffer."""

    leaves: tuple[Leaf, ...]
    data: mmap.mmap
    size: int

    def __repr__(self) -> str:
        return f"Payload({len(self.leaves)} leaves, {self.size} bytes)"

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return resident_bytes(self.size)

    def array(self, part: Part) -> Array:
        """One of its arrays, as a view."""
        return np.frombuffer(self.data, np.uint8, part.nbytes, part.offset).view(NUMPY[part.dtype]).reshape(part.shape)

    def bytes(self) -> memoryview:
        """What there is to write to a file."""
        return memoryview(self.data)[: self.size]


class Packer:
    """Lays out arrays one after the other, to be copied into one buffer once all are known."""

    def __init__(self) -> None:
        self._arrays: list[tuple[Part, Array]] = []
        self._size = 0

    def add(self, dtype: str, array: Array) -> Part:
        """Take an array of MLX's type `dtype`, as numpy sees it. It is read when the buffer is made."""
        part = Part(dtype, tuple(array.shape), self._size)
        self._arrays.append((part, array))
        self._size = -(-(self._size + part.nbytes) // _ALIGN) * _ALIGN
        return part

    def payload(self, leaves: Iterator[Leaf] | list[Leaf]) -> Payload:
        """The buffer with all arrays copied in."""
        made = Payload(tuple(leaves), allocate(self._size), self._size)
        for part, array in self._arrays:
            made.array(part)[...] = array
        return made


def resident_bytes(size: int) -> int:
    """Memory that a buffer of so many bytes takes."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def allocate(size: int) -> mmap.mmap:
    """A page-aligned buffer of at least `size` bytes that goes back to the system when it is let go."""
    made = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        made.madvise(mmap.MADV_HUGEPAGE)
    return made
