"""Owns a decode step whose forward is shared with pieces of prompts: one packed forward for all."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxbcd.methods.step import Off
from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.packed import Packer
from mlxbcd.sampling.sampler import Draw, Samplers
from mlxbcd.state.alone import AloneTurn
from mlxbcd.state.rows import Turn


class PackedStep:
    """Builds one step, and with it the forward of other groups.

    Args:
        beside: the other groups.

    Attributes:
        rows: of the step; 0 as long as it has made no forward.
        failed: the forward could not be built, so no group's state can be trusted.
    """

    off = Off.PACKED

    def __init__(self, forward: Forward, packer: Packer, beside: Sequence[Group]) -> None:
        self.rows = 0
        self.failed = False
        self._hidden: list[mx.array] | None = None
        self._forward = forward
        self._packer = packer
        self._beside = beside

    def __repr__(self) -> str:
        return f"PackedStep({'failed' if self.failed else f'{self.rows} rows' if self.rows else 'not built'})"

    def take(self) -> list[mx.array] | None:
        """The other groups' hidden states [B, N, D], lazy; None without a forward. Not kept: they hold the graph."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """See `StepBuilder.build`."""
        return samplers.draw(self.logits(turn, ids))

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """See `StepBuilder.logits`."""
        try:
            own, *self._hidden = self._packer.run([Group(ids[:, None], turn.caches), *self._beside])
        except Exception:
            self.failed = True
            raise
        self.rows = own.shape[0]
        return self._forward.head(own)[:, -1]
