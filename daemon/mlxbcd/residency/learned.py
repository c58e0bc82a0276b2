"""Owns what engines have learnt about their models on this machine, kept from one daemon to the next.

One small file for each model, in the cache directory: what is lost is learnt again within a few requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from pathlib import Path

from mlxbc import paths
from mlxbcd.engine.costs import Costs

log = logging.getLogger(__name__)

_VERSION = 1


def place(directory: Path, *circumstances: str) -> Path:
    """The file of a model.

    Args:
        directory: the model's.
        circumstances: whatever else the costs depend on: the device, the dtype, MLX's version.
    """
    name = json.dumps([_VERSION, str(directory), *circumstances])
    return paths.cache_dir() / "costs" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def recall(path: Path) -> Costs | None:
    """The costs kept there; None if there are none that make sense."""
    try:
        return Costs.restored(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("measured costs are not taken from %s: %s", path.name, error)
        return None


def remember(path: Path, costs: Costs) -> None:
    """Keep costs, unless nothing has been measured. A failure is logged."""
    if not costs.widest:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.write_text(json.dumps(costs.saved()))
        temporary.replace(path)
    except OSError as error:
        log.warning("measured costs can't be kept: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink()
