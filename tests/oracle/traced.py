"""Owns a crowd whose decode steps are compiled ones."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.methods.step import Off
from mlxbcd.state.composition import Composition
from mlxbcd.state.rows import Rows
from oracle.alone import Text
from oracle.crowd import Crowd
from oracle.families import Family


class CompiledCrowd(Crowd):
    """A crowd whose steps of one token run through traced functions.

    Attributes:
        compiled: steps that did.
        off: why others didn't.
    """

    def __init__(
        self, family: Family, composition: Composition | None = None, alone: Sequence[Text] | None = None
    ) -> None:
        super().__init__(family, composition, alone)
        self.steps = CompiledSteps(family.forward, always=True)
        self.compiled = 0
        self.off: set[Off] = set()

    def check_traces(self) -> None:
        """Every function was traced exactly once, and nothing stood in the way but cold rows."""
        assert set(self.steps.traces) <= {1}
        assert self.off <= {Off.COLD}

    def _run(self, rows: Rows, width: int, kept: Sequence[int] | None = None) -> None:
        if rows is not self.rows or width > 1 or kept is not None:
            super()._run(rows, width, kept)
            return
        before = dict(rows.lengths)
        turn = rows.begin(1)
        order = rows.order
        ids = mx.array([self._text(key).tokens[before[key]] for key in order])
        logits = self.steps.logits(turn, ids)
        mx.eval(logits)
        turn.resolve()
        if self.steps.off is None:
            self.compiled += 1
        else:
            self.off.add(self.steps.off)
        for i, key in enumerate(order):
            self._text(key).check_logits(before[key], logits[i : i + 1])
