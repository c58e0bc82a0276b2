"""Owns the safetensors container: checking a file's directory and writing one tensor at a time, without MLX."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlxbcd.errors import ServeError

_HEADER_LIMIT: Final = 100 * 1024 * 1024
"""Largest directory in bytes that the format allows."""
_ITEM_SIZES: Final[Mapping[str, int]] = {"U32": 4, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write: its directory entry is known before its data is made.

    Attributes:
        dtype: U32, F32, F16 or BF16.
        make: returns the data, C-contiguous and of the entry's size in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _ITEM_SIZES[self.dtype]


def write(path: Path, tensors: Iterable[Planned]) -> None:
    """Write `tensors` to `path`, holding the data of one at a time; synced to the disk on return."""
    # Wide elements first, so that every tensor is aligned to its element.
    ordered = sorted(tensors, key=lambda tensor: (-_ITEM_SIZES[tensor.dtype], tensor.name))
    directory: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        directory[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(directory, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in ordered:
            data = np.ascontiguousarray(tensor.make())
            if data.nbytes != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {data.nbytes} bytes made, {tensor.nbytes} planned")
            file.write(data.data)
        file.flush()
        os.fsync(file.fileno())


def data_bytes(path: Path) -> int:
    """Bytes of tensor data in a file whose directory is whole and within the file.

    Raises:
        ServeError: see `directory`.
    """
    return max((entry["data_offsets"][1] for entry in directory(path).values()), default=0)


def directory(path: Path) -> dict[str, dict[str, Any]]:
    """A file's tensors by name: dtype, shape and data_offsets. It is whole, and the tensors lie within the file.

    Raises:
        ServeError: `load_failed` where it is not; the file was truncated or is no safetensors file.
    """

    def damaged(problem: str) -> ServeError:
        return ServeError("load_failed", f"{path.name} is damaged ({problem}); fetch it again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                raise damaged(f"its directory would have {length} bytes, the file has {size}")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise ServeError("load_failed", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise damaged("its directory is not JSON") from None
    try:
        entries.pop("__metadata__", None)
        for entry in entries.values():
            _check_entry(entry)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise damaged("its directory has an entry without a place") from None
    if 8 + length + end > size:
        raise damaged(f"its tensors end at byte {8 + length + end}, the file has {size}")
    return dict(entries)


def _check_entry(entry: Mapping[str, Any]) -> None:
    """Raise if numbers are no numbers."""
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])) or begin > end:
        raise ValueError
