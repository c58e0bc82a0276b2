"""Owns the buffers of one class in one attention layer: rows in slots, positions left-aligned or around a ring.

What measurements decided: one write per part and step, in place (nothing outside a step may hold a view, or the write
copies the buffer); [slots, heads, positions, dim], whose slices along slots and positions Metal's kernels read without
a copy; and reads of the used positions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlxbcd.state.schemes import Parts, Scheme
from mlxbcd.state.step import Segment, Step


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape and type of one token's keys and values, known after a layer's first forward."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, keys: mx.array, values: mx.array) -> Heads:
        return cls(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)


@dataclass(frozen=True, slots=True)
class Prefix:
    """One row's newest keys and values up to its length, in order: parts [1, heads, n, …], the first of them the row's
    position `start`. Plain attention keeps all positions (`start` 0), a window its last ones.

    Attributes:
        roomy: a store of one slot with the row in it, of which `parts` are views. A layer whose store would be exactly
            such a one takes it as it is, instead of a copy.
    """

    parts: Parts
    start: int
    scheme: Scheme
    roomy: Store | None = None

    @property
    def arrays(self) -> list[mx.array]:
        return list(self.parts)

    @property
    def heads(self) -> Heads:
        """Shape and type of a token's keys and values before they were encoded."""
        return Heads(self.parts[0].shape[1], *self.scheme.origin(self.parts))

    def convert(self, scheme: Scheme) -> Prefix:
        """The same row under another scheme.

        Raises:
            ValueError: it is quantised already: going back or on would change what a cold run computes.
        """
        if scheme == self.scheme:
            return self
        if len(self.parts) != 2:
            raise ValueError("a quantised row can't change its scheme")
        return Prefix(scheme.encode(*self.parts), self.start, scheme)


class Store:
    """Buffers of `slots` rows with `ring` positions each.

    Attributes:
        ring: position p lies at index p modulo this.
    """

    __slots__ = ("parts", "ring", "scheme")

    def __init__(self, parts: list[mx.array], ring: int, scheme: Scheme) -> None:
        self.parts = parts
        self.ring = ring
        self.scheme = scheme

    @classmethod
    def empty(cls, heads: Heads, slots: int, ring: int, scheme: Scheme) -> Store:
        """Buffers full of zeros."""
        shape = (1, heads.heads, 1)
        token = scheme.encode(
            mx.zeros((*shape, heads.key_dim), heads.dtype), mx.zeros((*shape, heads.value_dim), heads.dtype)
        )
        parts = [mx.zeros((slots, heads.heads, ring, part.shape[3]), part.dtype) for part in token]
        return cls(parts, ring, scheme)

    def __repr__(self) -> str:
        return f"Store({self.slots} × {self.ring})"

    @property
    def slots(self) -> int:
        return self.parts[0].shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def over(self, arrays: Iterator[mx.array]) -> Store:
        """A store like this one whose buffers are the next of `arrays`."""
        return Store([next(arrays) for _ in self.parts], self.ring, self.scheme)

    def alias(self) -> Store:
        """The same buffers under arrays of its own: whichever is written first while both are alive is copied."""
        return Store([mx.reshape(part, part.shape) for part in self.parts], self.ring, self.scheme)

    def resized(self, slots: int) -> Store:
        """A copy with another number of slots, not yet evaluated."""
        shared = min(slots, self.slots)
        parts = []
        for part in self.parts:
            fresh = mx.zeros((slots, *part.shape[1:]), part.dtype)
            fresh[:shared] = part[:shared]
            parts.append(fresh)
        return Store(parts, self.ring, self.scheme)

    def append(self, step: Step, segment: Segment, new: Parts) -> None:
        """Write the new tokens of a segment's rows at each row's end: one write per part."""
        start = step.uniform(segment)
        rows, slots, ring = segment.rows, self.slots, self.ring
        if start is not None and start % ring + step.width <= ring:
            begin = start % ring
            for buffer, part in zip(self.parts, new, strict=True):
                buffer[:rows, :, begin : begin + step.width] = part
            return
        index = step.indices(segment, slots, ring)
        for i, part in enumerate(new):
            if slots > rows:
                # The index spans every slot, so spare ones are written too; nothing ever reads them.
                part = mx.pad(part, [(0, slots - rows), (0, 0), (0, 0), (0, 0)])
            where = mx.broadcast_to(index, (*part.shape[:3], 1))
            self.parts[i] = mx.put_along_axis(self.parts[i], where, part, axis=2)

    def used(self, step: Step, segment: Segment) -> Parts:
        """What a segment's attention reads: views that must not outlive the step."""
        rows, reach = segment.rows, step.reach(segment, self.ring)
        return tuple(part[:rows, :, :reach] for part in self.parts)

    def read(self, slot: int, begin: int, end: int) -> Prefix:
        """Positions [begin, end) of one row, still views of the buffers (or a small copy where the ring wraps)."""
        first = begin % self.ring
        past = first + end - begin - self.ring
        parts = []
        for part in self.parts:
            row = part[slot : slot + 1]
            if past <= 0:
                parts.append(row[:, :, first : first + end - begin])
            else:
                parts.append(mx.concatenate([row[:, :, first:], row[:, :, :past]], axis=2))
        return Prefix(tuple(parts), begin, self.scheme, self if self.slots == 1 else None)

    def put(self, slot: int, prefix: Prefix) -> None:
        """Write a row's prefix into a slot, in place."""
        n = prefix.parts[0].shape[2]
        first = prefix.start % self.ring
        head = min(n, self.ring - first)
        for buffer, part in zip(self.parts, prefix.parts, strict=True):
            buffer[slot : slot + 1, :, first : first + head] = part[:, :, :head]
            if head < n:
                buffer[slot : slot + 1, :, : n - head] = part[:, :, head:]

    def scrub(self, slot: int) -> None:
        """Zero a slot."""
        for part in self.parts:
            part[slot] = 0
