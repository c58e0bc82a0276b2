"""Owns the state of a row that runs alone: the zoo's own caches, behind the interface of a collection of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key


class AloneTurn:
    """One forward over the one row."""

    def __init__(self, rows: AloneRow, width: int) -> None:
        self._rows = rows
        self._width = width
        self.caches: list[Any] = rows.caches

    def arrays(self) -> list[mx.array]:
        """The state this turn writes."""
        return [array for _, array in tree_flatten([cache.state for cache in self.caches])]

    def resolve(self, kept: Sequence[int] | None = None) -> None:
        """End the turn. The zoo's caches can't take tokens back, so all are kept.

        Raises:
            ValueError: tokens would have to be taken back.
        """
        if kept is not None and list(kept) != [self._width]:
            raise ValueError("a row that runs alone keeps every token")
        self._rows.length += self._width


class AloneRow:
    """The state of a row that shares its forward with nobody."""

    def __init__(self, composition: Composition, key: Key) -> None:
        self.key = key
        self.length = 0
        self.caches: list[Any] = composition.make_stock()

    def __repr__(self) -> str:
        return f"AloneRow({self.key}: {self.length})"

    def __len__(self) -> int:
        return 1

    @property
    def order(self) -> list[Key]:
        return [self.key]

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(cache, "nbytes", 0)) for cache in self.caches)

    def unsettled(self, width: int) -> bool:
        """The zoo's caches grow by themselves."""
        return False

    def begin(self, width: int, *, planned: bool = True) -> AloneTurn:
        """Open a turn of `width` tokens. No turn of such a row depends on its plan."""
        return AloneTurn(self, width)
