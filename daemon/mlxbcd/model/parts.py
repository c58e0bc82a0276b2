"""Owns values that belong to several groups in one packed forward, and how the groups' tokens lie in it.

A packed forward hands a model `Parts` where it expects one group's mask or position, and `PackedView` where it expects
a layer's cache. Only what runs mixers (see `packed`) takes them apart; a model that looks into one gets `Unpackable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NoReturn

import mlx.core as mx

from mlxbcd.model.forward import HeldKeys, attend


class Unpackable(Exception):
    """A module used what belongs to several groups as if it were one group's."""


class Parts:
    """One value per group. Only a mixer takes it apart; whoever else looks into it gets `Unpackable`."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def __getattr__(self, name: str) -> NoReturn:
        # Not an AttributeError, which `hasattr` would take for an answer.
        raise Unpackable(f"it reads {name!r} of several groups at once")

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unpackable("it computes with a value of several groups at once")

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __getitem__ = _refuse


class PackedView(Parts):
    """All groups' views of one layer, in place of the layer's cache.

    Args:
        rows: every token is a row, so positions are known by row and keys may be written.

    Attributes:
        layer: index of the layer's cache.
    """

    def __init__(self, views: Sequence[Any], form: Form, layer: int, *, rows: bool) -> None:
        super().__init__(views)
        self.layer = layer
        self._form = form
        self._rows = rows

    @property
    def offset(self) -> Any:
        """Where each group's rows begin; with `rows` int32 [T], the position of every token."""
        offsets = [view.offset for view in self.parts]
        return self._form.positions(offsets) if self._rows else Parts(offsets)

    @property
    def caches(self) -> list[PackedView]:
        """The views of a layer with several caches."""
        inner = zip(*(view.caches for view in self.parts), strict=True)
        return [PackedView(views, self._form, self.layer, rows=self._rows) for views in inner]

    def by_rows(self) -> PackedView:
        """The same for a mixer in which every token is a row."""
        return PackedView(self.parts, self._form, self.layer, rows=True)

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """Each group's own mask, whatever the width of the whole."""
        masks = [view.make_mask(n, *args, **kwargs) for view, (_, n) in zip(self.parts, self._form.shapes, strict=True)]
        return None if all(mask is None for mask in masks) else Parts(masks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PackedKeys, PackedKeys]:
        """Append keys and values [T, heads, 1, dim], each group's to its own."""
        if not self._rows:
            raise Unpackable("it writes keys of several groups at once")
        new = zip(self.parts, self._form.heads_of(keys), self._form.heads_of(values), strict=True)
        fetched = [view.update_and_fetch(own_keys, own_values) for view, own_keys, own_values in new]
        held_keys, held_values = zip(*fetched, strict=True)
        return PackedKeys(held_keys, self._form), PackedKeys(held_values, self._form)

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """Each group's, for layers that share another's."""
        keys, values = zip(*(view.keys_and_values() for view in self.parts), strict=True)
        return Parts(keys), Parts(values)

    def __getitem__(self, i: int) -> PackedView:  # type: ignore[override]  # of all parts, a view answers
        if not all(hasattr(view, "caches") for view in self.parts):
            raise Unpackable("it reads recurrent state of several groups at once")
        return self.caches[i]

    def __bool__(self) -> bool:  # type: ignore[override]  # the same
        return True


class PackedKeys(Parts, HeldKeys):
    """All groups' keys, or their values, on their way to attention."""

    def __init__(self, parts: Sequence[Any], form: Form) -> None:
        super().__init__(parts)
        self._form = form

    def attend(self, queries: mx.array, values: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of queries [T, heads, 1, dim], group by group."""
        masks = mask.parts if isinstance(mask, Parts) else [mask] * len(self.parts)
        each = zip(self._form.heads_of(queries), self.parts, values.parts, masks, strict=True)
        return self._form.rows_of([attend(own, held, vals, None, scale, seen, sinks) for own, held, vals, seen in each])


class Form:
    """How the tokens of groups of shapes [B, N] lie in one forward.

    Args:
        rows: every token is a row of its own, [T, 1], for models that compute with positions outside their mixers; else
            they are the tokens of one row, [1, T], which every device multiplies as one matrix.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], *, rows: bool) -> None:
        self.shapes = tuple(shapes)
        self.total = sum(batch * width for batch, width in shapes)
        self._rows = rows
        self._axis = 0 if rows else 1
        self._lead = self._flat(self.total)
        self._cuts = list(accumulate(batch * width for batch, width in shapes))[:-1]
        self._positions: mx.array | None = None

    def __repr__(self) -> str:
        return f"Form({self.shapes} as {self._lead})"

    def join(self, pieces: Sequence[mx.array]) -> mx.array:
        """Arrays [B, N, …] of all groups as one."""
        flat = []
        for piece, (batch, width) in zip(pieces, self.shapes, strict=True):
            lead = self._flat(batch * width)
            flat.append(piece if piece.shape[:2] == lead else piece.reshape(*lead, *piece.shape[2:]))
        return mx.concatenate(flat, axis=self._axis)

    def split(self, whole: mx.array) -> list[mx.array]:
        """What `join` joined."""
        pieces = mx.split(whole, self._cuts, axis=self._axis)
        return [
            piece if piece.shape[:2] == shape else piece.reshape(*shape, *piece.shape[2:])
            for piece, shape in zip(pieces, self.shapes, strict=True)
        ]

    def argument(self, whole: mx.array) -> list[mx.array]:
        """The groups' parts of an array that a mixer is given.

        Raises:
            Unpackable: it does not hold one value for each token.
        """
        if self._holds(whole):
            return self.split(whole)
        if self._rows and whole.shape[:3] == (*self._lead, 1) and whole.ndim == 4:
            # Something per position that is to meet queries [B, heads, N, dim].
            return [piece.swapaxes(1, 2) for piece in self.split(whole)]
        raise Unpackable(f"a layer is given an array of shape {whole.shape} with its state")

    def as_rows(self, whole: mx.array) -> mx.array:
        """An array that a mixer is given, with every token as a row.

        Raises:
            Unpackable: it does not hold one value for each token.
        """
        if self._rows:
            return whole
        if self._holds(whole):
            return whole.reshape(self.total, 1, *whole.shape[2:])
        raise Unpackable(f"a layer is given an array of shape {whole.shape} with its state")

    def from_rows(self, answer: Any) -> mx.array:
        """What a mixer answered for rows of one token, as the trunk has its tokens.

        Raises:
            Unpackable: it is not one value for each token.
        """
        if not isinstance(answer, mx.array) or answer.ndim != 3 or answer.shape[:2] != (self.total, 1):
            raise Unpackable("a layer answers more than one value for each token")
        return answer if self._rows else answer.reshape(1, self.total, -1)

    def heads_of(self, array: mx.array) -> list[mx.array]:
        """[T, heads, 1, dim] as [B, heads, N, dim] of every group."""
        parts = mx.split(array, self._cuts)
        _, heads, _, dim = array.shape
        return [
            part if width == 1 else part.reshape(batch, width, heads, dim).swapaxes(1, 2)
            for part, (batch, width) in zip(parts, self.shapes, strict=True)
        ]

    def rows_of(self, parts: Sequence[mx.array]) -> mx.array:
        """What `heads_of` took apart."""
        flat = []
        for part, (batch, width) in zip(parts, self.shapes, strict=True):
            _, heads, _, dim = part.shape
            flat.append(part if width == 1 else part.swapaxes(1, 2).reshape(batch * width, heads, 1, dim))
        return mx.concatenate(flat)

    def positions(self, offsets: Sequence[Any]) -> mx.array:
        """The position of every token, int32 [T], where the groups' rows begin at `offsets`. All layers share it."""
        if self._positions is None:
            each = []
            for offset, shape in zip(offsets, self.shapes, strict=True):
                first = mx.array(offset, dtype=mx.int32).reshape(-1, 1)
                each.append(mx.broadcast_to(first + mx.arange(shape[1], dtype=mx.int32), shape).reshape(-1))
            self._positions = mx.concatenate(each)
        return self._positions

    def _holds(self, array: mx.array) -> bool:
        """Whether the first axes of an array are all tokens."""
        return array.ndim in (2, 3) and array.shape[:2] == self._lead

    def _flat(self, tokens: int) -> tuple[int, int]:
        return (tokens, 1) if self._rows else (1, tokens)
