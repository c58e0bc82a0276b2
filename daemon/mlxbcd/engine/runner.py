"""Owns the seam between the engine's loop and the device: what an iteration is given, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxbcd.engine.cohorts import Part
from mlxbcd.engine.scheduler import Iteration
from mlxbcd.methods.events import Emit, Round
from mlxbcd.plan.request import Request
from mlxbcd.state.geometry import Key


@dataclass(frozen=True, slots=True)
class PieceCost:
    """What a prefill forward took: `seconds` for `width` tokens that follow `context` others.

    Attributes:
        parts: both figures of each row where there were several: then `width` is their sum and `context` a mean.
    """

    width: int
    context: int
    seconds: float
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, parts: tuple[Part, ...], seconds: float) -> PieceCost:
        """The cost of a forward of one row or several."""
        if len(parts) == 1:
            return cls(*parts[0], seconds)
        width = sum(width for width, _ in parts)
        return cls(width, round(sum(width * context for width, context in parts) / width), seconds, parts)

    @property
    def rows(self) -> tuple[Part, ...]:
        """`parts`, of one row too."""
        return self.parts or ((self.width, self.context),)


@dataclass(frozen=True, slots=True)
class MixedCost:
    """What a decode step of `rows` rows and a prefill forward took together, the host's work included.

    Attributes:
        piece: the prefill forward, and what it took, if it was one by itself.
        packed: they were one forward.
        comparable: the device had nothing else to do.
    """

    rows: int
    piece: PieceCost
    seconds: float
    packed: bool
    comparable: bool


@dataclass(frozen=True, slots=True)
class Leaving:
    """A row that leaves although it has not ended by itself.

    Attributes:
        stopped: samples that it ends with, where its text has ended; None where it is given up.
        superseded: one much like it comes.
    """

    key: Key
    stopped: int | None = None
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What an iteration cost, and what is left on the device after it.

    Attributes:
        steps: (rows, seconds) of each decode step computed in it by itself.
        piece: its prefill forward, if there was one by itself, for one row or for several.
        mixed: both together, if there were both.
        running: rows in decode or about to join it.
        kv_bytes: bytes of all row states.
        token_bytes: bytes of state per position of its capacity, of the row whose prompt ended in it; 0 if none did.
        active_bytes, cache_bytes: what MLX's allocator says.
        rounds: the forwards that verified proposals.
    """

    steps: tuple[tuple[int, float], ...] = ()
    piece: PieceCost | None = None
    mixed: MixedCost | None = None
    running: tuple[Key, ...] = ()
    kv_bytes: int = 0
    token_bytes: float = 0.0
    active_bytes: int = 0
    cache_bytes: int = 0
    rounds: tuple[Round, ...] = ()


class Runner(Protocol):
    """What the engine drives, one call at a time, on the device thread."""

    def iterate(
        self,
        iteration: Iteration,
        start: Sequence[tuple[Key, Request]],
        leave: Sequence[Leaving],
        emit: Emit,
    ) -> Report:
        """Let rows leave and enter, then run the iteration's groups; tell `emit` as soon as something is known.

        A fault of rows is told through `emit` and isn't raised.

        Raises:
            DeviceFault: the device can't be trusted any more.
        """
        ...

    def close(self) -> None:
        """Drop all state."""
        ...
