"""Owns what the device side tells about rows: plain values that may leave the device thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlxbcd.errors import ServeError
from mlxbcd.sampling.sampler import Sample
from mlxbcd.state.geometry import Key

End: TypeAlias = Literal["stop", "complete", "length"]
"""An end token; the grammar is satisfied; all tokens that were asked for are drawn."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A row has processed `position` prompt tokens; 0 says that it begins."""

    key: Key
    position: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of a row was read; `ended` says why it is the last, if it is."""

    key: Key
    sample: Sample
    ended: End | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A row left with an error; nobody else was touched."""

    key: Key
    error: ServeError


Event: TypeAlias = Prefilled | Drawn | Failed
Emit: TypeAlias = Callable[[Sequence[Event]], None]
"""Takes events in the order in which they became known; never raises."""
