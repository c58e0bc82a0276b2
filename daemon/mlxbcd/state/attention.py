"""Owns the layout of attention layers: full, sliding-window and quantised, one store per class.

A row's length lives in the collection, so taking tokens back only lowers a number. A sliding window keeps its positions
around a ring of the window plus the widest step less one: that is how many a step's first query still needs when its
last token has been written, and it is also what lets a step be taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxbcd.model import cuda
from mlxbcd.model.forward import HeldKeys
from mlxbcd.state.geometry import Change, Class, Key, Move, Place
from mlxbcd.state.layout import Trace
from mlxbcd.state.schemes import Parts, Plain, Scheme
from mlxbcd.state.step import Segment, Step
from mlxbcd.state.store import Heads, Prefix, Store


@dataclass(slots=True)
class Prepared:
    """An attention layer's half of a prepared change: everything it allocated, to be evaluated."""

    layout: AttentionLayout
    change: Change
    heads: Heads | None
    fresh: dict[Class, Store] = field(default_factory=dict)
    moved: list[tuple[Move, Prefix]] = field(default_factory=list)

    def arrays(self) -> list[mx.array]:
        own = [array for move, prefix in self.moved if move.source for array in prefix.arrays]
        return [array for store in self.fresh.values() for array in store.parts] + own

    def commit(self) -> None:
        self.layout.apply(self)


class AttentionLayout:
    """One attention layer's rows.

    Args:
        window: positions a query sees, itself included; None for full attention.
        widest: tokens of the widest step, which a window's ring leaves room for.
        scheme: how rows of quantised classes are stored.
        opaque: the model does not look into its keys and values.
        grouped_mask: the model's scores have an axis for the query heads of a group, so its masks need one too.
    """

    def __init__(
        self,
        *,
        window: int | None = None,
        widest: int = 1,
        scheme: Scheme | None = None,
        opaque: bool = True,
        grouped_mask: bool = False,
    ) -> None:
        self.window = window
        self.opaque = opaque
        self.grouped_mask = grouped_mask
        self.stores: dict[Class, Store] = {}
        self.heads: Heads | None = None
        self._limit = None if window is None else window + widest - 1
        self._scheme: Scheme = scheme or Plain()

    def __repr__(self) -> str:
        held = ", ".join(map(repr, self.stores.values()))
        return f"AttentionLayout({'' if self.window is None else f'window {self.window}, '}{held or 'empty'})"

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores.values())

    @property
    def positional(self) -> bool:
        return self.window is None

    def ring(self, group: Class) -> int:
        """Positions a slot of this class really has."""
        return group.capacity if self._limit is None else min(group.capacity, self._limit)

    def floor(self, length: int) -> int:
        """The oldest position that a row of `length` tokens must keep."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def retained(self, place: Place, trace: Trace) -> int:
        if self.window is None:
            return 0
        # A slot holds what was put there and written since, but no more than its ring.
        oldest = max(self.floor(trace.placed), trace.written - self.ring(place.group))
        return oldest + self.window - 1 if oldest > 0 else 0

    def arrays(self) -> list[mx.array]:
        return [part for store in self.stores.values() for part in store.parts]

    def over(self, arrays: Iterator[mx.array]) -> AttentionLayout:
        other = copy.copy(self)
        other.stores = {group: store.over(arrays) for group, store in self.stores.items()}
        return other

    def replace(self, arrays: Iterator[mx.array]) -> None:
        for store in self.stores.values():
            store.parts = [next(arrays) for _ in store.parts]

    def view(self, step: Step) -> AttentionView:
        return AttentionView(self, step)

    def read(self, key: Key, place: Place, length: int) -> Prefix | None:
        store = self.stores.get(place.group)
        return None if store is None else store.read(place.slot, self.floor(length), length)

    def extract(self, key: Key, place: Place, length: int) -> Prefix | None:
        view = self.read(key, place, length)
        return None if view is None else Prefix(tuple(map(mx.contiguous, view.parts)), view.start, view.scheme)

    def prepare(self, change: Change, lengths: Mapping[Key, int], joiners: Mapping[Key, Prefix | None]) -> Prepared:
        known = [prefix for prefix in joiners.values() if prefix is not None]
        heads = self.heads
        if heads is None and known:
            heads = known[0].heads
        prepared = Prepared(self, change, heads)
        if heads is None:
            return prepared
        for move in change.moves:
            prefix = joiners.get(move.key)
            if move.source is not None:
                prefix = self.extract(move.key, move.source, lengths[move.key])
            if prefix is None:
                continue
            group = move.target.group
            prefix = prefix.convert(self._scheme_of(group))
            if prefix.roomy is not None and self._may_take(prefix.roomy, group, change.slots[group]):
                prepared.fresh[group] = prefix.roomy.alias()
            else:
                prepared.moved.append((move, prefix))
        for group, slots in change.slots.items():
            present = self.stores.get(group)
            if group in prepared.fresh:
                continue
            if present is None:
                prepared.fresh[group] = self._empty(heads, group, slots)
            elif present.slots != slots:
                prepared.fresh[group] = present.resized(slots)
        return prepared

    def apply(self, prepared: Prepared) -> None:
        """Commit: swap in the buffers and write the moved rows. Lazy, and in place where nothing else holds them."""
        self.heads = prepared.heads
        kept = {group: store for group, store in self.stores.items() if group in prepared.change.slots}
        self.stores = kept | prepared.fresh
        for move, prefix in prepared.moved:
            self.stores[move.target.group].put(move.target.slot, prefix)

    def append(self, step: Step, keys: mx.array, values: mx.array) -> None:
        """Append new keys and values [B, heads, width, dim] at every row's end."""
        if self.heads is None:
            self.heads = Heads.of(keys, values)
        for segment in step.segments:
            store = self.stores.get(segment.group)
            if store is None:
                store = self.stores[segment.group] = self._empty(self.heads, segment.group, segment.rows)
            part = slice(segment.begin, segment.end)
            whole = len(step.segments) == 1
            new = store.scheme.encode(*((keys, values) if whole else (keys[part], values[part])))
            store.append(step, segment, new)

    def scrub(self, place: Place) -> None:
        store = self.stores.get(place.group)
        if store is not None:
            store.scrub(place.slot)

    def _may_take(self, store: Store, group: Class, slots: int) -> bool:
        """Whether a row's own store is all that this class needs."""
        alone = group not in self.stores and slots == store.slots == 1
        return alone and store.ring == self.ring(group) and store.scheme == self._scheme_of(group)

    def _scheme_of(self, group: Class) -> Scheme:
        return self._scheme if group.quantised else Plain()

    def _empty(self, heads: Heads, group: Class, slots: int) -> Store:
        return Store.empty(heads, slots, self.ring(group), self._scheme_of(group))


class AttentionView:
    """One forward's access to one layer: the cache protocol of the zoo's attention layers.

    Rows of one length and class come as plain arrays, where the device has no better way. Else `update_and_fetch`
    returns handles that the attention seam resolves class by class; a model that computes with its keys itself
    (`opaque` False) always gets arrays.
    """

    def __init__(self, layout: AttentionLayout, step: Step) -> None:
        self._layout = layout
        self._step = step
        self._opaque = layout.opaque

    @property
    def offset(self) -> int | mx.array:
        return self._step.offset

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """See `Step.mask`; a sliding layer is windowed whether the model says so or not."""
        assert self._step.width == N, "a forward's width is fixed when it begins"
        window = window_size if self._layout.window is None else self._layout.window
        masks = [
            self._step.mask(segment, self._layout.ring(segment.group), window, as_array=return_array)
            for segment in self._step.segments
        ]
        if len(masks) > 1:
            return Masks(tuple(masks))
        (mask,) = masks
        return mask[:, :, None] if self._layout.grouped_mask and isinstance(mask, mx.array) else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append [B, heads, N, dim] and return all positions up to the longest row's end."""
        self._layout.append(self._step, keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the step's write returned, also for layers that share this layer's keys and values."""
        used = [
            (segment, self._layout.stores[segment.group].used(self._step, segment)) for segment in self._step.segments
        ]
        one_plain_class = len(used) == 1 and len(used[0][1]) == 2
        alike = self._step.uniform(used[0][0]) is not None and not cuda.prefers(self._step.width)
        if one_plain_class and (not self._opaque or alike):
            keys, values = used[0][1]
            return keys, values
        handle = Handle(self._layout, self._step, tuple(used))
        return handle, handle

    @property
    def keys(self) -> mx.array:
        """The keys' buffer, for models that tie other work to it with `mx.depends`."""
        return self._only_store().parts[0]

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        self._only_store().parts[0] = tied

    @property
    def values(self) -> mx.array:
        """The values' buffer; see `keys`."""
        return self._only_store().parts[1]

    @values.setter
    def values(self, unused: mx.array) -> None:
        """The zoo's indexers blank values nobody reads, to keep graphs short. Ours are evaluated with the keys."""

    def _only_store(self) -> Store:
        (store,) = self._layout.stores.values()
        return store


@dataclass(frozen=True, slots=True)
class Handle(HeldKeys):
    """Keys and values of several rows, opaque to the model.

    Attributes:
        used: what attention reads of each class.
    """

    layout: AttentionLayout
    step: Step
    used: tuple[tuple[Segment, Parts], ...]

    @property
    def shape(self) -> tuple[Any, ...]:
        """[rows, heads, positions, dim], with the positions of each row: some layers read where they are off it."""
        heads = self.layout.heads
        assert heads is not None
        return self.step.rows, heads.heads, self.step.offset + self.step.width, heads.key_dim

    def attend(self, queries: mx.array, values: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention once per class."""
        outs = []
        for i, (segment, parts) in enumerate(self.used):
            scheme = self.layout.stores[segment.group].scheme
            rows = queries[segment.begin : segment.end]
            outs.append(scheme.attend(rows, parts, scale, mask.parts[i] if isinstance(mask, Masks) else mask, sinks))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=0)


@dataclass(frozen=True, slots=True)
class Masks:
    """A mask per class, opaque to the model."""

    parts: tuple[Any, ...]
