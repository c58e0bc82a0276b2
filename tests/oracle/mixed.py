"""Owns a crowd that advances packed: its rows' steps and the pieces of prompts beside them share one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import mlx.core as mx

from mlxbcd.model.forward import Group
from mlxbcd.model.packed import Packer
from mlxbcd.state import packing
from mlxbcd.state.composition import Composition
from mlxbcd.state.packing import Packing
from mlxbcd.state.rows import COLD, Joiner, Rows, Turn, commit
from oracle.alone import Text
from oracle.crowd import CHUNK, Crowd, Newcomer
from oracle.families import Family, load


@lru_cache(maxsize=4)
def packing_of(name: str) -> Packing:
    """Whether a family packs, found out once for each time its model is loaded."""
    family = load(name)
    return packing.inspect(family.forward, family.composition)


@dataclass
class Prompt:
    """A row in preparation, in a collection of its own.

    Attributes:
        left: tokens of the prompt that are not processed yet.
    """

    key: int
    rows: Rows
    newcomer: Newcomer
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.newcomer.length


class MixedCrowd(Crowd):
    """A crowd whose forwards may hold pieces of prompts."""

    def __init__(
        self,
        family: Family,
        packer: Packer,
        composition: Composition | None = None,
        alone: Sequence[Text] | None = None,
    ) -> None:
        super().__init__(family, composition, alone)
        self.packer = packer

    def prompt(self, newcomer: Newcomer) -> Prompt:
        """A row that begins its preparation."""
        key = self._key(newcomer.text)
        rows = Rows(self.composition, widest=CHUNK)
        commit(rows.prepare(join=[Joiner(key, COLD, newcomer.length)]))
        return Prompt(key, rows, newcomer)

    def step_beside(
        self, prompts: Sequence[Prompt], pieces: Sequence[int], width: int = 1, kept: Sequence[int] | None = None
    ) -> None:
        """One forward of all running rows and the next piece of each prompt, checking every position's logits; prompts
        that end with it join."""
        self.retire(width)
        collections = [(self.rows, width)] if len(self) else []
        collections += [(prompt.rows, piece) for prompt, piece in zip(prompts, pieces, strict=True)]
        turns = [rows.begin(width, reversible=rows is self.rows and kept is not None) for rows, width in collections]
        groups = [
            Group(self._ids(rows, width), turn.caches) for (rows, width), turn in zip(collections, turns, strict=True)
        ]
        hidden = self.packer.run(groups)
        logits = [self.family.forward.head(each) for each in hidden]
        mx.eval(logits)
        for (rows, _), turn, own in zip(collections, turns, logits, strict=True):
            self._check(rows, turn, own)
            turn.resolve(kept if rows is self.rows else None)
        for prompt, piece in zip(prompts, pieces, strict=True):
            prompt.left -= piece
            if not prompt.left:
                room = prompt.rows.lengths[prompt.key] + prompt.newcomer.spare
                commit(self.rows.prepare(join=[Joiner(prompt.key, prompt.rows.read(prompt.key), room)]))

    def admit_beside(self, newcomer: Newcomer, pieces: Sequence[int], width: int = 1) -> None:
        """Prepare one row, each of its pieces in a forward with all running rows."""
        prompt = self.prompt(newcomer)
        for piece in pieces:
            self.step_beside([prompt], [piece], width)
        assert not prompt.left

    def _ids(self, rows: Rows, width: int) -> mx.array:
        return mx.array([self._text(key).tokens[rows.lengths[key] :][:width] for key in rows.order])

    def _check(self, rows: Rows, turn: Turn, logits: mx.array) -> None:
        for i, (key, start) in enumerate(zip(rows.order, turn.step.starts, strict=True)):
            self._text(key).check_logits(start, logits[i])
