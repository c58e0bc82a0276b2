"""Owns the interface every layout meets: what a collection of rows asks of one layer's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlxbcd.state.geometry import Change, Key, Place
from mlxbcd.state.step import Step


@dataclass(frozen=True, slots=True)
class Trace:
    """How a row came to its state, which decides how far it can be cut back.

    Attributes:
        length: tokens the state covers.
        placed: tokens it covered when it was last put into its slot.
        written: the furthest position ever written since, those of taken-back tokens included.
    """

    length: int
    placed: int
    written: int


class LayerState(Protocol):
    """One row's state in one layer, outside any collection."""

    @property
    def arrays(self) -> list[mx.array]:
        """What must be evaluated for it to be independent of where it was read."""
        ...


class Prepared(Protocol):
    """One layer's half of a membership change, allocated but not applied."""

    def arrays(self) -> list[mx.array]:
        """What must be evaluated before `commit`."""
        ...

    def commit(self) -> None:
        """Apply. Cannot fail."""
        ...


class Stored(Protocol):
    """What has to be known of a layer to keep its part of a row's state elsewhere."""

    @property
    def positional(self) -> bool:
        """Whether it stores each position by itself, so that the first part of a row's state is a row's state."""
        ...


class Layout(Stored, Protocol):
    """How one layer stores many rows. `place` and `length` are what the collection keeps about a row."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def arrays(self) -> list[mx.array]:
        """The buffers themselves, to be evaluated but never held."""
        ...

    def over(self, arrays: Iterator[mx.array]) -> Layout:
        """A layout of the same rows whose buffers are the next of `arrays`, as many and in the order of its own."""
        ...

    def replace(self, arrays: Iterator[mx.array]) -> None:
        """Take the next of `arrays` as its buffers; `over` says which."""
        ...

    def view(self, step: Step) -> Any:
        """What the model gets as this layer's cache in one forward."""
        ...

    def read(self, key: Key, place: Place, length: int) -> Any:
        """One row's state, possibly a view of the buffers; None before the layer's first forward."""
        ...

    def extract(self, key: Key, place: Place, length: int) -> Any:
        """An independent copy of one row's state, not yet evaluated; None before the layer's first forward."""
        ...

    def retained(self, place: Place, trace: Trace) -> int:
        """The shortest length the row can be cut back to; its own where nothing can be taken back."""
        ...

    def prepare(self, change: Change, lengths: Mapping[Key, int], joiners: Mapping[Key, Any]) -> Prepared:
        """Allocate what `change` needs, without touching what runs.

        Args:
            lengths: of the rows before the change.
            joiners: the state of every row that enters; None for a cold one.
        """
        ...

    def scrub(self, place: Place) -> None:
        """Make a slot clean after its row held NaN or Inf."""
        ...
