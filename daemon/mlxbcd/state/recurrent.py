"""Owns the layout of recurrent and convolution state: a few small arrays per layer, one row each along the first axis.

The model replaces these arrays at every step, so keeping the ones before a step costs two references; what such a state
can't do is forget its last tokens, which `replay` does for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxbcd.state.geometry import Change, Key, Place
from mlxbcd.state.layout import Trace
from mlxbcd.state.step import Step


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One row's state: arrays [1, …], None where the model has not written one."""

    slots: tuple[mx.array | None, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in self.slots if array is not None]


@dataclass(slots=True)
class Prepared:
    """A recurrent layer's half of a prepared change: the arrays it will have."""

    layout: RecurrentLayout
    order: tuple[Key, ...]
    slots: list[mx.array | None]

    def arrays(self) -> list[mx.array]:
        return [array for array in self.slots if array is not None]

    def commit(self) -> None:
        self.layout.slots = self.slots
        self.layout.order = self.order


class RecurrentLayout:
    """One recurrent layer's rows.

    Args:
        size: arrays the layer keeps.

    Attributes:
        slots: arrays [B, …] in batch order.
        order: the rows they belong to.
    """

    def __init__(self, size: int) -> None:
        self.slots: list[mx.array | None] = [None] * size
        self.order: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        shapes = [None if array is None else array.shape for array in self.slots]
        return f"RecurrentLayout({shapes})"

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    @property
    def positional(self) -> bool:
        return False

    def arrays(self) -> list[mx.array]:
        return [array for array in self.slots if array is not None]

    def over(self, arrays: Iterator[mx.array]) -> RecurrentLayout:
        other = RecurrentLayout(len(self.slots))
        other.slots, other.order = list(self.slots), self.order
        other.replace(arrays)
        return other

    def replace(self, arrays: Iterator[mx.array]) -> None:
        self.slots = [None if array is None else next(arrays) for array in self.slots]

    def view(self, step: Step) -> RecurrentView:
        return _view_class()(self)

    def row(self, key: Key) -> Recurrence | None:
        """One row's arrays, as views."""
        if not self.arrays():
            return None
        i = self.order.index(key)
        return Recurrence(tuple(None if array is None else array[i : i + 1] for array in self.slots))

    def read(self, key: Key, place: Place, length: int) -> Recurrence | None:
        return self.row(key)

    def extract(self, key: Key, place: Place, length: int) -> Recurrence | None:
        row = self.row(key)
        if row is None:
            return None
        return Recurrence(tuple(None if array is None else mx.contiguous(array) for array in row.slots))

    def retained(self, place: Place, trace: Trace) -> int:
        return trace.length

    def prepare(self, change: Change, lengths: Mapping[Key, int], joiners: Mapping[Key, Recurrence | None]) -> Prepared:
        order = tuple(change.places)
        if order == self.order and not joiners:
            return Prepared(self, order, list(self.slots))
        rows = [joiners[key] if key in joiners else self.row(key) for key in order]
        if len({row is None for row in rows}) > 1:
            # Zeros are not how every model starts: some treat their first token by the absence of a state.
            raise ValueError("a row that has processed nothing can't share a recurrent layer with rows that have")
        return Prepared(self, order, [_stack(rows, slot) for slot in range(len(self.slots))])

    def scrub(self, place: Place) -> None:
        """Rows share no memory that outlives them."""


def _stack(rows: Sequence[Recurrence | None], slot: int) -> mx.array | None:
    """One array of all rows."""
    arrays = [array for row in rows if row is not None and (array := row.slots[slot]) is not None]
    return mx.concatenate(arrays) if arrays else None


class RecurrentView:
    """One forward's access to one layer: the cache protocol of the zoo's recurrent layers.

    `lengths` and `left_padding` are always None: rows of a recurrent model are never padded.
    """

    lengths: None = None
    left_padding: None = None

    def __init__(self, layout: RecurrentLayout) -> None:
        self.layout = layout

    def __getitem__(self, slot: int) -> mx.array | None:
        return self.layout.slots[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self.layout.slots[slot] = value

    def __bool__(self) -> bool:
        return True

    @property
    def cache(self) -> list[mx.array | None]:
        """The arrays, for models that read them all at once."""
        return self.layout.slots

    @property
    def batch_size(self) -> int:
        return len(self.layout.order)

    def advance(self, N: int) -> None:
        """The collection counts tokens."""

    def make_mask(self, N: int) -> Any:
        """No row is padded."""
        return None

    def empty(self) -> bool:
        return self.layout.slots[0] is None


@cache
def _view_class() -> type[RecurrentView]:
    """The view as a subclass of the zoo's own cache, for models that ask for its type before they write to it."""
    from mlx_lm.models.cache import ArraysCache

    return type("RecurrentView", (RecurrentView, ArraysCache), {})
