"""Owns what engines have learnt about their models on this machine, kept from one daemon to the next.

One small file for each model, in the cache directory: what is lost is learnt again within a few requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mlxbc import paths
from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.spec.costs import VerifyCosts

log = logging.getLogger(__name__)

_VERSION = 1
_LASTS_S: Final = 7 * 86400.0


class AtLoad(msgspec.Struct, frozen=True):
    """What is measured when a model is loaded, which takes longer than a first token.

    Attributes:
        at: when, in seconds of the wall clock.
        ahead: how far its rows decode ahead.
        curve: see `VerifyCosts.curve`.
    """

    at: float
    ahead: Ahead
    curve: dict[Annotated[int, msgspec.Meta(ge=1)], Annotated[float, msgspec.Meta(gt=0.0)]]


class _Kept(msgspec.Struct):
    load: AtLoad


@dataclass(slots=True)
class Learned:
    """What one engine has learnt."""

    costs: Costs = field(default_factory=Costs)
    packing: PackingRanges = field(default_factory=PackingRanges)
    cohorts: Cohorts = field(default_factory=Cohorts)
    verify: VerifyCosts = field(default_factory=VerifyCosts)
    load: AtLoad | None = None


def place(directory: Path, *circumstances: str) -> Path:
    """The file of a model.

    Args:
        directory: the model's.
        circumstances: whatever else the costs depend on: the device, the dtype, MLX's version.
    """
    name = json.dumps([_VERSION, str(directory), *circumstances])
    return paths.cache_dir() / "costs" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def at_load(path: Path) -> AtLoad | None:
    """What an earlier load measured; None if that was long ago, since machines change, or makes no sense."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept).load
    except (OSError, msgspec.MsgspecError):
        return None
    return kept if 0.0 <= time.time() - kept.at < _LASTS_S else None


def recall(path: Path, verify: VerifyCosts | None = None) -> Learned:
    """What is kept there; nothing learnt if nothing there makes sense.

    Args:
        verify: with the curve, kept or measured at load; it takes what else is kept of verifying.
    """
    verify = verify or VerifyCosts()
    try:
        kept = json.loads(path.read_bytes())
        costs = Costs.restored(kept)
        packing, cohorts = PackingRanges.restored(kept.get("packing", {})), Cohorts.restored(kept.get("cohorts", {}))
        learned = Learned(costs, packing, cohorts, verify)
        # Last, since it changes what is given only if it believes all of it.
        verify.recall(kept.get("verify", {}))
        return learned
    except (FileNotFoundError, NotADirectoryError):
        return Learned(verify=verify)
    except (OSError, ValueError) as error:
        log.warning("measured costs are not taken from %s: %s", path.name, error)
        return Learned(verify=verify)


def remember(path: Path, learned: Learned) -> None:
    """Keep it, unless nothing has been measured. A failure is logged."""
    if not learned.costs.widest:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        parts = {name: getattr(learned, name).saved() for name in ("packing", "cohorts", "verify")}
        load = {"load": msgspec.to_builtins(learned.load, str_keys=True)} if learned.load is not None else {}
        temporary.write_text(json.dumps(learned.costs.saved() | parts | load))
        temporary.replace(path)
    except OSError as error:
        log.warning("measured costs can't be kept: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink()
