"""Owns the geometry of one forward over a collection: positions, write indices and masks, built once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxbcd.state.geometry import Class


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one class in a forward: batch rows [begin, end), which are slots 0 … end − begin − 1."""

    begin: int
    end: int
    group: Class

    @property
    def rows(self) -> int:
        return self.end - self.begin


class Step:
    """One forward of `width` tokens over rows that have processed `starts` tokens each.

    Args:
        starts: positions already processed, in batch order.
        width: tokens every row adds.
        segments: the classes present, in batch order.

    Raises:
        ValueError: a row would be written past its class's capacity.
    """

    def __init__(self, starts: Sequence[int], width: int, segments: Sequence[Segment]) -> None:
        self.starts = tuple(starts)
        self.width = width
        self.segments = tuple(segments)
        for segment in segments:
            rows = self.starts[segment.begin : segment.end]
            if min(rows) < 0 or max(rows) + width > segment.group.capacity:
                raise ValueError(f"rows at {rows} can't take {width} more positions in {segment.group}")
        self._offset: int | mx.array | None = None
        self._indices: dict[tuple[int, int, int], mx.array] = {}
        self._masks: dict[tuple[int, int, int | None, bool], mx.array | str | None] = {}

    def __repr__(self) -> str:
        return f"Step(width {self.width}, starts {self.starts}, {len(self.segments)} classes)"

    @property
    def rows(self) -> int:
        """Batch size."""
        return self.segments[-1].end

    @property
    def offset(self) -> int | mx.array:
        """Position of each row's first new token: an int where all rows agree, else int32 [B]."""
        if self._offset is None:
            first = self.starts[0]
            same = all(start == first for start in self.starts)
            self._offset = first if same else mx.array(self.starts, dtype=mx.int32)
        return self._offset

    def uniform(self, segment: Segment) -> int | None:
        """The start all rows of a segment share, or None."""
        rows = self.starts[segment.begin : segment.end]
        return rows[0] if all(start == rows[0] for start in rows) else None

    def reach(self, segment: Segment, ring: int) -> int:
        """Positions of the buffer that attention must read: up to the longest row's end, all of a wrapped ring."""
        return min(max(self.starts[segment.begin : segment.end]) + self.width, ring)

    def indices(self, segment: Segment, slots: int, ring: int) -> mx.array:
        """Where each slot's new tokens go: int32 [slots, 1, width, 1]. Slots without a row write position 0 onward."""
        key = (segment.begin, slots, ring)
        if key not in self._indices:
            starts = [*self.starts[segment.begin : segment.end], *[0] * (slots - segment.rows)]
            first = mx.array(starts, dtype=mx.int32)[:, None, None, None]
            positions = first + mx.arange(self.width, dtype=mx.int32)[None, None, :, None]
            self._indices[key] = positions % ring if ring < segment.group.capacity else positions
        return self._indices[key]

    def mask(self, segment: Segment, ring: int, window: int | None, *, as_array: bool) -> mx.array | str | None:
        """Attention mask of a segment over buffer positions [0, reach).

        Args:
            ring: positions of the buffer; position p of a row lies at p modulo this.
            window: how many positions a query sees, itself included; None is all.
            as_array: never answer "causal".

        Returns:
            None where every row sees everything, "causal" where rows have one length and the buffer hasn't wrapped,
            else bool [rows, 1, width, reach], true where a key may be seen.
        """
        key = (segment.begin, ring, window, as_array)
        if key not in self._masks:
            self._masks[key] = self._build_mask(segment, ring, window, as_array)
        return self._masks[key]

    def _build_mask(self, segment: Segment, ring: int, window: int | None, as_array: bool) -> mx.array | str | None:
        longest = max(self.starts[segment.begin : segment.end]) + self.width
        wrapped = longest > ring
        windowed = window is not None and longest > window
        if self.uniform(segment) is not None and not windowed and not wrapped and not as_array:
            return None if self.width == 1 else "causal"
        starts = mx.array(self.starts[segment.begin : segment.end], dtype=mx.int32)[:, None, None, None]
        queries = starts + mx.arange(self.width, dtype=mx.int32)[None, None, :, None]
        keys = mx.arange(min(longest, ring), dtype=mx.int32)[None, None, None, :]
        if wrapped:
            # The newest position of the row that is congruent to the buffer's: older ones have been overwritten.
            newest = starts + (self.width - 1)
            keys = newest - (newest - keys) % ring
        seen = keys <= queries
        if wrapped:
            seen = seen & (keys >= 0)
        if windowed:
            assert window is not None
            seen = seen & (keys > queries - window)
        return seen
