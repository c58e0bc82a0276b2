"""Owns a crowd whose decode steps and rounds are compiled ones."""

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
    """A crowd whose steps run through traced functions: of one token as decode steps do, wider ones as rounds do.

    Attributes:
        compiled: steps that did.
        off: why others didn't.
    """

    def __init__(
        self, family: Family, composition: Composition | None = None, alone: Sequence[Text] | None = None
    ) -> None:
        super().__init__(family, composition, alone)
        self.steps = CompiledSteps(family.forward, always=True)
        self.rounds = CompiledSteps(family.forward, always=True)
        self.compiled = 0
        self.off: set[Off] = set()

    def check_traces(self) -> None:
        """Every function was traced exactly once, and nothing stood in the way but cold rows and what is recorded."""
        assert {*self.steps.traces, *self.rounds.traces} <= {1}
        assert self.off <= {Off.COLD, Off.RECORDED}
        assert Off.RECORDED not in self.off or self.rows.composition.recorder is not None

    def _run(self, rows: Rows, width: int, kept: Sequence[int] | None = None) -> None:
        if rows is not self.rows:
            super()._run(rows, width, kept)
            return
        before = dict(rows.lengths)
        turn = rows.begin(width, reversible=kept is not None)
        order = rows.order
        ids = mx.array([self._text(key).tokens[before[key] : before[key] + width] for key in order])
        if width == 1 and kept is None:
            steps, logits = self.steps, self.steps.logits(turn, ids[:, 0])[:, None]
        else:
            steps, logits = self.rounds, self.family.forward.head(self.rounds.hidden(turn, ids))
        mx.eval(logits)
        turn.resolve(kept)
        if steps.off is None:
            self.compiled += 1
        else:
            self.off.add(steps.off)
        for i, key in enumerate(order):
            self._text(key).check_logits(before[key], logits[i])
            assert rows.lengths[key] == before[key] + (width if kept is None else kept[i])
