"""Owns how one decode step becomes a graph: from an open turn and the rows' newest tokens to their next ones."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx

from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.taps import Taps
from mlxbcd.sampling.sampler import Draw, Samplers
from mlxbcd.state.alone import AloneTurn
from mlxbcd.state.rows import Turn


class Off(Enum):
    """Why a step is not, or not yet, a compiled one."""

    DEVICE = "compiling calls a C++ compiler while rows decode on this device, for seconds"
    ALONE = "the row runs alone, over the zoo's own state"
    COLD = "a row has processed nothing, so its state has no shape yet"
    NEW = "steps of this shape have only just begun"
    UNTRACEABLE = "the model's forward can't be traced"
    RECORDED = "what the model's forward does is recorded, to be taken back"
    UNFIXED = "the model's state changes its shape from step to step"
    TRIAL = "both ways are being timed by turns"
    SLOWER = "it was measured, and is not faster"
    HIDDEN = "a drafter reads the hidden states of every step"
    PACKED = "it shares its forward with a prompt's piece"


class StepBuilder(Protocol):
    """One way to build a step. Evaluates nothing, and doesn't resolve the turn."""

    @property
    def off(self) -> Off | None:
        """Why the last step was not a compiled one; None if it was."""
        ...

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """One token for every row of the turn, whose tokens `ids` [B] (int32 or uint32, may be lazy) are processed."""
        ...

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """The first half of a step whose draw has to wait until `ids` were read: [B, V], lazy."""
        ...


class RoundBuilder(Protocol):
    """One way to build the forward of a round. Evaluates nothing, and doesn't resolve the turn."""

    def hidden(self, turn: Turn, ids: mx.array) -> mx.array:
        """Final hidden states [B, N, D] of the rows' windows `ids` [B, N], int32 or uint32; may be lazy."""
        ...


class HiddenSteps:
    """Builds every step and round anew, and keeps what a drafter reads of the newest one for whoever takes it.

    Args:
        taps: what that is.
    """

    def __init__(self, forward: Forward, taps: Taps) -> None:
        self._forward = forward
        self._taps = taps
        self._read: mx.array | None = None
        self.off = Off.HIDDEN

    def __repr__(self) -> str:
        return f"HiddenSteps({self._taps})"

    def take(self) -> mx.array:
        """Hidden states [B, N, D] of the forward built last, as `Tapped.read`."""
        read, self._read = self._read, None
        assert read is not None
        return read

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """See `StepBuilder.build`."""
        return samplers.draw(self.logits(turn, ids))

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """See `StepBuilder.logits`."""
        return self._forward.head(self._run(ids[:, None], turn.caches))[:, -1]

    def hidden(self, turn: Turn, ids: mx.array) -> mx.array:
        """See `RoundBuilder.hidden`."""
        with turn.forward() as caches:
            return self._run(ids, caches)

    def _run(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        (tapped,) = self._taps.run([Group(ids, caches)])
        self._read = tapped.read
        return tapped.hidden


class EagerSteps:
    """Builds every step anew, operation by operation."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.off = Off.DEVICE

    def __repr__(self) -> str:
        return "EagerSteps()"

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """See `StepBuilder.build`."""
        return samplers.draw(self.logits(turn, ids))

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """See `StepBuilder.logits`."""
        (hidden,) = self._forward.run([Group(ids[:, None], turn.caches)])
        return self._forward.head(hidden)[:, -1]

    def hidden(self, turn: Turn, ids: mx.array) -> mx.array:
        """See `RoundBuilder.hidden`."""
        with turn.forward() as caches:
            (hidden,) = self._forward.run([Group(ids, caches)])
        return hidden
