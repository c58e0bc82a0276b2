"""Owns what the device side tells about rows: plain values that may leave the device thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mlxbcd.errors import ServeError
from mlxbcd.sampling.sampler import Sample
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.geometry import Key

End: TypeAlias = Literal["stop", "complete", "length"]
"""An end token; the grammar is satisfied; all tokens that were asked for are drawn."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Names the row of a further candidate of request `key`; the first one's row has the request's own key."""

    key: Key
    candidate: int


def row_key(key: Key, candidate: int) -> Key:
    """The key of a candidate's row."""
    return Fork(key, candidate) if candidate else key


def owner(key: Key) -> tuple[Key, int]:
    """The request that a row belongs to, and which of its candidates it is."""
    return (key.key, key.candidate) if isinstance(key, Fork) else (key, 0)


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
class Speculated:
    """What speculation has done for a row so far. Comes with each of its rounds, and before the event that ends it."""

    key: Key
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Round:
    """A forward that verified proposals, and their draws; it was wider than a step.

    Attributes:
        width: tokens of the widest row's window.
        drafted, accepted: proposals of all rows, and those that were right.
    """

    rows: int
    seconds: float
    width: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A row left with an error; nobody else was touched."""

    key: Key
    error: ServeError


Event: TypeAlias = Prefilled | Drawn | Speculated | Failed
Emit: TypeAlias = Callable[[Sequence[Event]], None]
"""Takes events in the order in which they became known; never raises."""
