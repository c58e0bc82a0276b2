"""Owns telling how large a model will be in memory from its files' directories alone, without MLX."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxbcd.model import safetensors

_EXPANDED: Final = 4
"""Bytes of a weight where everything becomes float32."""
_GROUP: Final = 64
"""Weights that share a scale, where a config doesn't say."""


def bytes_in_memory(directory: Path, *, expand: bool) -> int:
    """About how many bytes the weights of a model directory will take.

    It may be too many, for parts of a checkpoint that the architecture leaves out.

    Args:
        expand: weights become float32, packed ones too, as on the CPU.

    Raises:
        ServeError: load_failed, a file is damaged or can't be read.
    """
    tensors: dict[str, Mapping[str, Any]] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors.update(safetensors.directory(file))
    if not expand:
        return sum(_stored(entry) for entry in tensors.values())
    group = _group_size(directory)
    total = 0
    for name, entry in tensors.items():
        stem, _, leaf = name.rpartition(".")
        packed = f"{stem}.scales" in tensors
        if packed and leaf == "weight":
            total += math.prod(tensors[f"{stem}.scales"]["shape"]) * group * _EXPANDED
        elif not (packed and leaf in ("scales", "biases")):
            total += math.prod(entry["shape"]) * _EXPANDED
    return total


def _stored(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end) - int(begin)


def _group_size(directory: Path) -> int:
    """Of most of its weights."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
        found = (config.get("quantization") or config.get("quantization_config") or {}).get("group_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        found = None
    return found if isinstance(found, int) and 0 < found <= 1024 else _GROUP
