"""Owns a decode step whose forward is shared with a prompt's piece: one packed forward for both."""

from __future__ import annotations

import mlx.core as mx

from mlxbcd.methods.step import Off
from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.packed import Packer
from mlxbcd.sampling.sampler import Draw, Samplers
from mlxbcd.state.alone import AloneTurn
from mlxbcd.state.rows import Turn


class PackedStep:
    """Builds one step, and with it the forward of another group.

    Args:
        beside: the other group.

    Attributes:
        rows: of the step; 0 as long as it has made no forward.
        failed: the forward could not be built, so neither group's state can be trusted.
    """

    off = Off.PACKED

    def __init__(self, forward: Forward, packer: Packer, beside: Group) -> None:
        self.rows = 0
        self.failed = False
        self._hidden: mx.array | None = None
        self._forward = forward
        self._packer = packer
        self._beside = beside

    def __repr__(self) -> str:
        return f"PackedStep({'failed' if self.failed else f'{self.rows} rows' if self.rows else 'not built'})"

    def take(self) -> mx.array | None:
        """The other group's hidden states [B, N, D], lazy; None without a forward. Not kept: they hold the graph."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """See `StepBuilder.build`."""
        return samplers.draw(self.logits(turn, ids))

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """See `StepBuilder.logits`."""
        try:
            own, self._hidden = self._packer.run([Group(ids[:, None], turn.caches), self._beside])
        except Exception:
            self.failed = True
            raise
        self.rows = own.shape[0]
        return self._forward.head(own)[:, -1]
