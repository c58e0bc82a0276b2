"""Owns the layout of layers that keep several caches: a list of layouts that change together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxbcd.state.geometry import Change, Key, Place
from mlxbcd.state.layout import LayerState, Layout, Trace
from mlxbcd.state.layout import Prepared as PreparedLayer
from mlxbcd.state.step import Step


@dataclass(frozen=True, slots=True)
class Nest:
    """One row's states, one per layout; None where that layout has run no forward."""

    states: tuple[LayerState | None, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for state in self.states if state is not None for array in state.arrays]


@dataclass(slots=True)
class Prepared:
    """The halves of every layout inside."""

    inner: list[PreparedLayer]

    def arrays(self) -> list[mx.array]:
        return [array for prepared in self.inner for array in prepared.arrays()]

    def commit(self) -> None:
        for prepared in self.inner:
            prepared.commit()


class NestedLayout:
    """One layer with several caches."""

    def __init__(self, inner: Sequence[Layout]) -> None:
        self.inner = list(inner)

    def __repr__(self) -> str:
        return f"NestedLayout({self.inner})"

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.inner)

    @property
    def positional(self) -> bool:
        return all(layout.positional for layout in self.inner)

    def arrays(self) -> list[mx.array]:
        return [array for layout in self.inner for array in layout.arrays()]

    def over(self, arrays: Iterator[mx.array]) -> NestedLayout:
        return NestedLayout([layout.over(arrays) for layout in self.inner])

    def replace(self, arrays: Iterator[mx.array]) -> None:
        for layout in self.inner:
            layout.replace(arrays)

    def view(self, step: Step) -> NestedView:
        return NestedView([layout.view(step) for layout in self.inner])

    def read(self, key: Key, place: Place, length: int) -> Nest | None:
        return _nest([layout.read(key, place, length) for layout in self.inner])

    def extract(self, key: Key, place: Place, length: int) -> Nest | None:
        return _nest([layout.extract(key, place, length) for layout in self.inner])

    def retained(self, place: Place, trace: Trace) -> int:
        return max(layout.retained(place, trace) for layout in self.inner)

    def prepare(self, change: Change, lengths: Mapping[Key, int], joiners: Mapping[Key, Nest | None]) -> Prepared:
        inner: list[PreparedLayer] = []
        for i, layout in enumerate(self.inner):
            states = {key: None if nest is None else nest.states[i] for key, nest in joiners.items()}
            inner.append(layout.prepare(change, lengths, states))
        return Prepared(inner)

    def scrub(self, place: Place) -> None:
        for layout in self.inner:
            layout.scrub(place)


def _nest(states: list[Any]) -> Nest | None:
    return None if all(state is None for state in states) else Nest(tuple(states))


class NestedView:
    """One forward's access to one layer: an indexable list of views."""

    def __init__(self, views: list[Any]) -> None:
        self.caches = views

    def __getitem__(self, i: int) -> Any:
        return self.caches[i]

    def __bool__(self) -> bool:
        return True
