"""Owns reading GGUF files: header, metadata and tensor directory, checked against the file before any use.

The format (little-endian): magic, version, counts, then key/value metadata, then the tensor directory, then tensor data
at aligned offsets. Every length is compared with what is left of the file before it is read, so that a truncated or
hostile file is an error and never a huge allocation. The file is read, not mapped: one that shrinks meanwhile cannot
fault the process.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
import numpy.typing as npt

from mlxbcd.errors import ServeError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_STRING, _ARRAY = 8, 9
_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""NumPy types of the metadata's scalar types."""


class Kind(IntEnum):
    """Tensor encodings that can be read here, by their number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


_BLOCKS: Final[Mapping[Kind, tuple[int, int]]] = {
    Kind.F32: (1, 4),
    Kind.F16: (1, 2),
    Kind.BF16: (1, 2),
    Kind.Q4_0: (32, 18),
    Kind.Q4_1: (32, 20),
    Kind.Q8_0: (32, 34),
}
"""(elements, bytes) of one block."""

_UNREADABLE: Final[Mapping[int, str]] = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    39: "MXFP4",
}
"""Names of common encodings that can't, for the error message."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the tensor directory.

    Attributes:
        shape: row-major, the contiguous dimension last (the file stores it the other way round).
        kind: how the elements are encoded.
        offset: bytes from the start of the file.
        nbytes: encoded size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file; a context manager.

    Attributes:
        metadata: scalars as Python values, number arrays as 1-D NumPy arrays, string arrays as lists.
        tensors: the tensor directory by name.

    Raises:
        ServeError: `load_failed` where the file cannot be opened, is not GGUF, is damaged, or holds an encoding that
            is not in `Kind`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = self._open()
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self.metadata: dict[str, Any] = {}
            self.tensors: dict[str, Tensor] = {}
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return f"GGUFFile({self.path.name}: {len(self.metadata)} keys, {len(self.tensors)} tensors)"

    def fail(self, problem: str) -> NoReturn:
        """Raise the error of this file."""
        raise ServeError("load_failed", f"{self.path.name}: {problem}")

    def blocks(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as [rows, blocks per row, bytes per block] (uint8), all leading dimensions as rows."""
        self._file.seek(tensor.offset)
        data = self._take(tensor.nbytes)
        elements, size = _BLOCKS[tensor.kind]
        return np.frombuffer(data, np.uint8).reshape(-1, tensor.shape[-1] // elements, size)

    def _open(self) -> BinaryIO:
        try:
            # Not blocking: a named pipe must not hang the caller before it is known to be one.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            self.fail(f"cannot be opened: {getattr(error, 'strerror', None) or error}")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            self.fail("is not a regular file")
        return os.fdopen(descriptor, "rb")

    def _read_header(self) -> None:
        if self._take(4) != _MAGIC:
            self.fail("is not a GGUF file")
        version = self._number("<I")
        if version not in _VERSIONS:
            self.fail(f"has GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read")
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                self.fail(f"is damaged: metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._number("<I"))
        entries = [self._entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            self.fail(f"is damaged: an alignment of {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add(name, shape, kind, start + offset)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        count = self._number("<I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            self.fail(f"is damaged: tensor {name!r} has {count} dimensions")
        dimensions = tuple(self._number("<Q") for _ in range(count))
        return name, dimensions[::-1], self._number("<I"), self._number("<Q")

    def _add(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> None:
        try:
            kind = Kind(number)
        except ValueError:
            known = ", ".join(kind.name for kind in Kind)
            self.fail(
                f"tensor {name!r} is encoded as {_UNREADABLE.get(number, f'type {number}')}, which cannot be imported "
                f"without loss; take a file that has only {known}"
            )
        elements, size = _BLOCKS[kind]
        total = 1
        for dimension in shape:
            total *= dimension
        if total == 0 or shape[-1] % elements:
            self.fail(f"is damaged: tensor {name!r} of shape {shape} cannot be {kind.name}")
        nbytes = total // elements * size
        if offset + nbytes > self._size:
            self.fail(f"is truncated: tensor {name!r} ends at byte {offset + nbytes} of {self._size}")
        if name in self.tensors:
            self.fail(f"is damaged: tensor {name!r} appears twice")
        self.tensors[name] = Tensor(name, shape, kind, offset, nbytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0].item()
        if kind != _ARRAY:
            self.fail(f"is damaged: metadata of type {kind}")
        element, count = self._number("<I"), self._number("<Q")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        if element not in _SCALARS:
            self.fail(f"has a metadata array of type {element}, which is not supported")
        return self._numbers(_SCALARS[element], count)

    def _string(self) -> str:
        data = self._take(self._number("<Q"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail("is damaged: a name or text in it is not UTF-8")

    def _numbers(self, dtype: str, count: int) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        return np.frombuffer(self._take(count * kind.itemsize), kind)

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, count: int) -> bytes:
        """Exactly `count` bytes from the current position."""
        if count > self._size - self._file.tell():
            self.fail("is truncated or damaged")
        data = self._file.read(count)
        if len(data) != count:
            self.fail("was truncated while it was read")
        return data
