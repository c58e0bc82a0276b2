"""Owns a collection of rows: the same membership for every layer, changed in transactions.

A change is *prepared* (everything it needs is allocated and evaluated, nothing that runs is touched) and then
*committed*, which cannot fail, or dropped, which is letting go of it. `commit` takes several prepared changes, of
different collections, so that all happen or none.

A forward is a *turn*: `begin` it, run the model over its caches, `resolve` it with how many tokens each row keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxbcd.state import geometry
from mlxbcd.state.composition import WIDEST_STEP, Composition
from mlxbcd.state.geometry import Change, Class, Key, Place
from mlxbcd.state.layout import Layout, Prepared, Trace
from mlxbcd.state.replay import Undo
from mlxbcd.state.step import Segment, Step


@dataclass(frozen=True, slots=True)
class RowState:
    """One row's state outside any collection: to enter one, or to be kept.

    Attributes:
        length: tokens it covers.
        layers: one state per layer, None where that layer has written none; empty for a cold row.
        converted_at: length at which its keys and values were quantised; 0 where they are plain. A shorter prefix of
            it is not what a cold run would have.
    """

    length: int
    layers: tuple[Any, ...] = ()
    converted_at: int = 0

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers if layer is not None for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


COLD = RowState(0)
"""The state of a row that has processed nothing."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """A row about to enter a collection, with room for at least `room` tokens."""

    key: Key
    state: RowState
    room: int


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """A membership change of one collection, ready to commit."""

    rows: Rows
    change: Change
    lengths: Mapping[Key, int]
    converted: Mapping[Key, int]
    layers: tuple[Prepared, ...]


def commit(*changes: PreparedChange) -> None:
    """Apply prepared changes together. Cannot fail."""
    for prepared in changes:
        for layer in prepared.layers:
            layer.commit()
        prepared.rows._settle(prepared)


class Turn:
    """One forward over all rows of a collection, between `begin` and `resolve`."""

    def __init__(self, rows: Rows, step: Step, undo: Undo | None) -> None:
        self._rows = rows
        self._undo = undo
        self._caches: list[Any] | None = None
        self.step = step

    @property
    def rows(self) -> Rows:
        """The collection."""
        return self._rows

    @property
    def recorded(self) -> bool:
        """What the model does in `forward` is recorded, so that it can be taken back."""
        return self._undo is not None

    @property
    def caches(self) -> list[Any]:
        """One view per layer, as the model's ``cache`` argument."""
        if self._caches is None:
            self._caches = [layout.view(self.step) for layout in self._rows.layouts]
        return self._caches

    @contextmanager
    def forward(self) -> Iterator[list[Any]]:
        """Run the model inside, over the caches this gives; only so can a reversible turn be taken back."""
        with self._undo.recording() if self._undo is not None else nullcontext():
            yield self.caches

    def arrays(self) -> list[mx.array]:
        """The state this turn writes: evaluating it runs the forward without its head."""
        return self._rows.arrays()

    def resolve(self, kept: Sequence[int] | None = None) -> None:
        """End the turn; row i of the batch order keeps its first ``kept[i]`` new tokens, all of them by default.

        Raises:
            ValueError: more tokens than the turn added, a count missing, or a state that can't take tokens back.
        """
        counts = [self.step.width] * len(self.step.starts) if kept is None else list(kept)
        if len(counts) != len(self.step.starts) or not all(0 <= n <= self.step.width for n in counts):
            raise ValueError(f"can't keep {counts} of {self.step.width} tokens in {len(self.step.starts)} rows")
        if self._undo is not None:
            self._undo.resolve(self.caches, counts)
        elif self._rows.composition.recorder is not None and min(counts) < self.step.width:
            raise ValueError("this model's state only takes tokens back from a turn that began as reversible")
        self._rows._advance(self, counts)


class Rows:
    """Rows of one model with a shared state.

    Args:
        widest: tokens of the widest turn.

    Attributes:
        layouts: one per layer.
        lengths: tokens each row's state covers.
        changes: membership changes committed so far; between them, once all rows have run, buffers keep their shapes.
    """

    def __init__(self, composition: Composition, *, widest: int = WIDEST_STEP) -> None:
        self.composition = composition
        self.widest = widest
        self.layouts: list[Layout] = composition.layouts(widest)
        self.lengths: dict[Key, int] = {}
        self._placed: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._converted: dict[Key, int] = {}
        self._places: Mapping[Key, Place] = {}
        self._slots: Mapping[Class, int] = {}
        self._turn: Turn | None = None
        self.changes = 0

    def __repr__(self) -> str:
        held = ", ".join(f"{key}: {length}" for key, length in self.lengths.items())
        return f"Rows({held or 'empty'})"

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    @property
    def order(self) -> list[Key]:
        """Keys in batch order."""
        return list(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes all layers have allocated."""
        return sum(layout.nbytes for layout in self.layouts)

    def arrays(self) -> list[mx.array]:
        """All buffers, to be evaluated, or given up for others with `replace`, but never held."""
        return [array for layout in self.layouts for array in layout.arrays()]

    def replace(self, arrays: Iterable[mx.array]) -> None:
        """Take other buffers, as many and in the order of `arrays`."""
        fresh = iter(arrays)
        for layout in self.layouts:
            layout.replace(fresh)

    def place(self, key: Key) -> Place:
        """Where a row lives."""
        return self._places[key]

    def prepare(
        self,
        *,
        keep: Iterable[Key] | None = None,
        join: Sequence[Joiner] = (),
        room: Mapping[Key, int] | None = None,
        convert: Iterable[Key] = (),
    ) -> PreparedChange:
        """Prepare a change: rows not in `keep` (default: all) leave, joiners enter, rows in `room` get that much, and
        rows in `convert` are stored by the composition's KV scheme from now on.

        Raises:
            ValueError: an unknown key, or one that joins twice.
            RuntimeError: a turn is open.
        """
        if self._turn is not None:
            raise RuntimeError("membership can't change inside a turn")
        kept = list(self._places if keep is None else keep)
        sizes = {key: self.lengths[key] + 1 for key in kept if key in self._places}
        sizes |= {key: max(size, sizes.get(key, 0)) for key, size in (room or {}).items()}
        sizes |= {joiner.key: max(joiner.room, joiner.state.length, 1) for joiner in join}
        converted = {key: self._converted[key] for key in kept if key in self._converted}
        converted |= {joiner.key: joiner.state.converted_at for joiner in join if joiner.state.converted_at}
        converted |= {key: self.lengths[key] for key in convert if key not in converted}
        change = geometry.plan(
            self._places,
            self._slots,
            keep=kept,
            classes=self._classes(sizes, converted),
            joining=[joiner.key for joiner in join],
        )
        lengths = {key: self.lengths[key] for key in kept} | {joiner.key: joiner.state.length for joiner in join}
        layers = []
        for i, layout in enumerate(self.layouts):
            states = {joiner.key: joiner.state.layers[i] if joiner.state.layers else None for joiner in join}
            layer = layout.prepare(change, self.lengths, states)
            # Layer by layer, so that only one layer's temporaries are ever alive beside the result.
            mx.eval(layer.arrays())
            layers.append(layer)
        return PreparedChange(self, change, lengths, converted, tuple(layers))

    def read(self, key: Key) -> RowState:
        """A row's state, to enter another collection. It may be views of this one's buffers, so this collection must
        not run before that change has been committed and evaluated."""
        return self._state(key, self.lengths[key], "read")

    def extract(self, key: Key, length: int | None = None) -> RowState:
        """An independent, evaluated copy of a row's first `length` tokens (default: all).

        Raises:
            ValueError: the state can't be cut back that far.
        """
        length = self.lengths[key] if length is None else length
        if not self.retained(key) <= length <= self.lengths[key]:
            raise ValueError(f"a row of {self.lengths[key]} tokens can't be cut to {length}: see retained")
        state = self._state(key, length, "extract")
        mx.eval(state.arrays)
        return state

    def begin(self, width: int, *, planned: bool = True, reversible: bool = False) -> Turn:
        """Open a turn in which every row adds `width` tokens, first moving rows that need another class.

        Args:
            planned: all rows are at a planned end, where rows that are long enough may be quantised.
            reversible: `resolve` may keep fewer tokens than `width`; the model then runs inside `Turn.forward`.

        Raises:
            ValueError: wider than `widest`, or reversible where the composition can't be.
            RuntimeError: a turn is open already, or there is no row.
        """
        if self._turn is not None:
            raise RuntimeError("a turn is open already")
        if not self._places:
            raise RuntimeError("a turn needs at least one row")
        if not 1 <= width <= self.widest:
            raise ValueError(f"a turn of {width} tokens in a collection for at most {self.widest}")
        if self.unsettled(width, planned=planned):
            room = {key: length + width for key, length in self.lengths.items()}
            commit(self.prepare(room=room, convert=self._due() if planned else ()))
        undo = None
        if reversible and self.composition.rollback_reason:
            raise ValueError(self.composition.rollback_reason)
        if reversible and self.composition.recorder is not None:
            undo = Undo(self.composition.recorder, self.layouts, len(self._places), width)
        step = Step([self.lengths[key] for key in self._places], width, self._segments())
        self._turn = Turn(self, step, undo)
        return self._turn

    def unsettled(self, width: int, *, planned: bool = True) -> bool:
        """Whether `begin` would move rows, which changes the batch order."""
        grown = any(self.lengths[key] + width > place.group.capacity for key, place in self._places.items())
        return grown or bool(planned and self._due())

    def unconverted(self) -> int:
        """Tokens of the widest turn in which no row passes the length where it would have been quantised before."""
        kv = self.composition.kv
        if kv is None:
            return self.widest
        left = [kv.start - n for key, n in self.lengths.items() if n < kv.start and key not in self._converted]
        return min([self.widest, *left])

    def retained(self, key: Key) -> int:
        """The shortest length a row can be cut back to."""
        place = self._places[key]
        trace = Trace(self.lengths[key], self._placed[key], self._written[key])
        return max((layout.retained(place, trace) for layout in self.layouts), default=0)

    def reusable_from(self, key: Key) -> int:
        """The shortest prefix of a row that has what a cold run would have: see `RowState.converted_at`."""
        return self._converted.get(key, 0)

    def trim(self, key: Key, length: int) -> None:
        """Take back all of a row's tokens after the first `length`.

        Raises:
            ValueError: the state can't be cut back that far.
        """
        if not self.retained(key) <= length <= self.lengths[key]:
            raise ValueError(f"a row of {self.lengths[key]} tokens can't be cut to {length}: see retained")
        self.lengths[key] = length

    def scrub(self, key: Key) -> None:
        """Clean a row that produced NaN or Inf, before it leaves."""
        for layout in self.layouts:
            layout.scrub(self._places[key])

    def successor(self) -> Rows:
        """A new, empty collection of the same kind, for when this one's state can't be trusted."""
        return Rows(self.composition, widest=self.widest)

    def clear(self) -> None:
        """Let every row go, with its memory."""
        commit(self.prepare(keep=()))

    def _classes(self, sizes: Mapping[Key, int], converted: Mapping[Key, int]) -> dict[Key, Class]:
        """The class of each row with at least `sizes[key]` positions. A row never goes back to a smaller class."""
        present = {key: place.group.capacity for key, place in self._places.items()}
        if self.composition.opaque:
            return {
                key: Class(max(geometry.capacity_for(size), present.get(key, 0)), key in converted)
                for key, size in sizes.items()
            }
        capacity = geometry.together(sizes.values(), max(present.values(), default=0))
        return dict.fromkeys(sizes, Class(capacity))

    def _due(self) -> list[Key]:
        kv = self.composition.kv
        if kv is None:
            return []
        return [key for key, n in self.lengths.items() if n >= max(kv.start, 1) and key not in self._converted]

    def _state(self, key: Key, length: int, how: str) -> RowState:
        place = self._places[key]
        layers = tuple(getattr(layout, how)(key, place, length) for layout in self.layouts)
        if all(layer is None for layer in layers):
            return RowState(length)
        return RowState(length, layers, self._converted.get(key, 0))

    def _segments(self) -> list[Segment]:
        segments: list[Segment] = []
        for row, place in enumerate(self._places.values()):
            if segments and segments[-1].group == place.group:
                segments[-1] = Segment(segments[-1].begin, row + 1, place.group)
            else:
                segments.append(Segment(row, row + 1, place.group))
        return segments

    def _advance(self, turn: Turn, kept: Sequence[int]) -> None:
        if turn is not self._turn:
            raise RuntimeError("this turn is not open")
        for key, start, count in zip(self._places, turn.step.starts, kept, strict=True):
            self.lengths[key] = start + count
            self._written[key] = max(self._written[key], start + turn.step.width)
        self._turn = None

    def _settle(self, prepared: PreparedChange) -> None:
        self.changes += 1
        self._places = prepared.change.places
        self._slots = prepared.change.slots
        self.lengths = {key: prepared.lengths[key] for key in prepared.change.places}
        self._converted = dict(prepared.converted)
        moved = {move.key: self.lengths[move.key] for move in prepared.change.moves}
        self._placed = {key: moved[key] if key in moved else self._placed[key] for key in self.lengths}
        self._written = {key: moved[key] if key in moved else self._written[key] for key in self.lengths}
