"""Owns the geometry of steps and rounds that share one traced function: which do, and positions that come as an array.

Tracing needs fixed shapes, and a step's shapes follow from its rows, their classes and how far attention reads. So
reads are rounded up to a bucket, never to the capacity, and everything that depends on where exactly rows are is
computed inside the function, from their positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from mlxbcd.state.step import Segment, Step

_FINEST: Final = 64
"""Positions by which the smallest buckets of steps of one token differ."""
_COARSER: Final = 256
"""The same for wider ones, whose rows grow by several tokens at once: a bucket should last for as many."""
_PARTS: Final = 8
"""Buckets from one power of two to the next: a step reads at most an eighth more than it uses, above the smallest."""


def rounded(reach: int, capacity: int, finest: int = _FINEST) -> int:
    """The bucket of a read of `reach` positions, not above `capacity`."""
    power = 1 << max(reach - 1, 1).bit_length() - 1
    grain = max(finest, power // _PARTS)
    return min(-(-reach // grain) * grain, capacity)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the steps of one traced function have in common.

    Attributes:
        segments: the classes present, in batch order.
        reaches: for each, the positions that full attention reads.
        width: tokens that every row adds.
    """

    segments: tuple[Segment, ...]
    reaches: tuple[int, ...]
    width: int = 1

    @classmethod
    def of(cls, step: Step) -> Bucket:
        """The bucket of a step."""
        finest = _FINEST if step.width == 1 else _COARSER
        capacities = [segment.group.capacity for segment in step.segments]
        pairs = zip(step.segments, capacities, strict=True)
        reaches = tuple(rounded(step.reach(segment, most), most, finest) for segment, most in pairs)
        return cls(step.segments, reaches, step.width)


class TracedStep(Step):
    """A step whose positions are unknown while its graph is built.

    Args:
        starts: int32 [B], tokens that every row has processed; with the step's own no more than its segment's reach.
    """

    def __init__(self, bucket: Bucket, starts: mx.array) -> None:
        # Not Step's own: what it checks is known on the host only, where the turn's step has checked it.
        self.width = bucket.width
        self.segments = bucket.segments
        self._reaches = dict(zip(bucket.segments, bucket.reaches, strict=True))
        self._offset = starts
        self._positions = starts
        self._indices = {}
        self._masks = {}

    def __repr__(self) -> str:
        return f"TracedStep(width {self.width}, {self._reaches})"

    def uniform(self, segment: Segment) -> int | None:
        """Nobody knows."""
        return None

    def reach(self, segment: Segment, ring: int) -> int:
        """See `Step.reach`; rounded up."""
        return min(self._reaches[segment], ring)

    def indices(self, segment: Segment, slots: int, ring: int) -> mx.array:
        """See `Step.indices`."""
        key = (segment.begin, slots, ring)
        if key not in self._indices:
            rows = self._rows_of(segment)
            if slots > segment.rows:
                rows = mx.concatenate([rows, mx.zeros(slots - segment.rows, dtype=mx.int32)])
            positions = rows[:, None, None, None] + self._ahead()
            self._indices[key] = positions % ring if ring < segment.group.capacity else positions
        return self._indices[key]

    def _build_mask(self, segment: Segment, ring: int, window: int | None, as_array: bool) -> mx.array | str | None:
        longest = self._reaches[segment]
        starts = self._rows_of(segment)[:, None, None, None]
        queries = starts + self._ahead()
        keys = mx.arange(min(longest, ring), dtype=mx.int32)[None, None, None, :]
        wraps = longest > ring
        if wraps:
            # As in `Step`. Where the buffer hasn't wrapped yet, positions not written come out below zero.
            newest = starts + (self.width - 1)
            keys = newest - (newest - keys) % ring
        seen = keys <= queries
        if wraps:
            seen = seen & (keys >= 0)
        if window is not None and longest > window:
            seen = seen & (keys > queries - window)
        return seen

    def _ahead(self) -> mx.array:
        """How far each new token of a row is behind its first one: int32 [1, 1, width, 1]."""
        return mx.arange(self.width, dtype=mx.int32)[None, None, :, None]

    def _rows_of(self, segment: Segment) -> mx.array:
        if segment.rows == self.rows:
            return self._positions
        return self._positions[segment.begin : segment.end]
