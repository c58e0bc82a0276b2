"""Owns the way of a row's state out of its buffers into cached pieces, and back. On the device thread.

Layers that store by position (`Stored.positional`) are cut into pieces; what the others hold at one length is a piece
of its own, an anchor. Arrays leave as copies made by the host out of evaluated views, so no view outlives the call, and
come back as copies too: a piece serves any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mlxbcd.cache.payload import NUMPY, Array, Leaf, Packer, Part, Payload
from mlxbcd.state.layout import Stored
from mlxbcd.state.nested import Nest, NestedLayout
from mlxbcd.state.recurrent import Recurrence
from mlxbcd.state.rows import RowState
from mlxbcd.state.schemes import Plain, Quantised, Scheme
from mlxbcd.state.store import Prefix, Store

_DTYPES: Final[Mapping[mx.Dtype, str]] = {getattr(mx, "bool_" if name == "bool" else name): name for name in NUMPY}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one leaf of a composition is: a layer, or one cache of a layer with several."""

    path: tuple[int, ...]
    positional: bool


def slots(layouts: Sequence[Stored]) -> list[Slot]:
    """The leaves of a collection's layers, in order."""
    return [slot for i, layout in enumerate(layouts) for slot in _slots(layout, (i,))]


def trimmable(layouts: Sequence[Stored]) -> bool:
    """Whether every prefix of a row's state is a row's state."""
    return all(slot.positional for slot in slots(layouts))


def block(layouts: Sequence[Stored], state: RowState, begin: int, end: int) -> Payload:
    """What layers store of positions [begin, end) of a row; `state` may be views of its buffers."""
    packer = Packer()
    views = [
        (slot, held, tuple(array[:, :, begin:end] for array in held.parts))
        for slot in slots(layouts)
        if slot.positional and (held := _at(state, slot.path)) is not None
    ]
    mx.eval([part for *_, parts in views for part in parts])
    return packer.payload(
        [
            Leaf(slot.path, "positions", tuple(_pack(packer, part) for part in parts), scheme=_scheme(held.scheme))
            for slot, held, parts in views
        ]
    )


def anchor(layouts: Sequence[Stored], state: RowState) -> Payload:
    """What the other layers hold of a row at its length."""
    packer = Packer()
    mx.eval(state.arrays)
    leaves = []
    for slot in slots(layouts):
        held = None if slot.positional else _at(state, slot.path)
        if isinstance(held, Prefix):
            parts = tuple(_pack(packer, part) for part in held.parts)
            leaves.append(Leaf(slot.path, "window", parts, held.start, _scheme(held.scheme)))
        elif held is not None:
            arrays = tuple(None if array is None else _pack(packer, array) for array in held.slots)
            leaves.append(Leaf(slot.path, "recurrent", arrays))
    return packer.payload(leaves)


def restore(
    layouts: Sequence[Stored],
    blocks: Sequence[Payload],
    anchored: Payload | None,
    length: int,
    converted_at: int,
    capacity: int = 0,
) -> RowState:
    """A row's state of `length` tokens, from the blocks that cover them in order, and the anchor at its end.

    Args:
        capacity: positions of the class that the row will be in. Where nobody else is in it, the row moves in without
            another copy.

    Raises:
        ValueError: the pieces are not of such a row.
    """
    found: dict[tuple[int, ...], Any] = {}
    scratch: dict[tuple[Any, ...], Array] = {}
    for leaves in zip(*(piece.leaves for piece in blocks), strict=True):
        found[leaves[0].path] = _positions(leaves, blocks, length, max(capacity, length), scratch)
    for leaf in anchored.leaves if anchored is not None else ():
        assert anchored is not None
        arrays = [None if part is None else _unpack(part.dtype, anchored.array(part)) for part in leaf.parts]
        if leaf.kind == "recurrent":
            found[leaf.path] = Recurrence(tuple(arrays))
        else:
            found[leaf.path] = Prefix(tuple(each for each in arrays if each is not None), leaf.start, _of(leaf.scheme))
    layers = tuple(_layer(layout, (i,), found) for i, layout in enumerate(layouts))
    if found:
        raise ValueError(f"pieces of layers that this model doesn't have: {sorted(found)}")
    return RowState(length, layers, converted_at)


def _positions(
    leaves: Sequence[Leaf], blocks: Sequence[Payload], length: int, capacity: int, scratch: dict[tuple[Any, ...], Array]
) -> Prefix:
    """One leaf's keys and values, put together by the host.

    Args:
        scratch: where they are put together, by shape and type. The next leaf finds it in the processor's cache, so
            what remains is to read the pieces once and to write memory once; positions past `length` stay zeros.
    """
    buffers = []
    for i, first in enumerate(leaves[0].parts):
        assert first is not None
        shape = (*first.shape[:2], capacity, *first.shape[3:])
        if (whole := scratch.get((first.dtype, shape))) is None:
            whole = scratch[first.dtype, shape] = np.zeros(shape, NUMPY[first.dtype])
        at = 0
        for leaf, piece in zip(leaves, blocks, strict=True):
            part = leaf.parts[i]
            assert part is not None
            if leaf.path != leaves[0].path or (part.dtype, leaf.scheme) != (first.dtype, leaves[0].scheme):
                raise ValueError("pieces of different states")
            n = min(part.shape[2], length - at)
            whole[:, :, at : at + n] = piece.array(part)[:, :, :n]
            at += n
        if at != length:
            raise ValueError(f"pieces of {at} tokens for a state of {length}")
        buffers.append(_unpack(first.dtype, whole))
    return Store(buffers, capacity, _of(leaves[0].scheme)).read(0, 0, length)


def _layer(layout: Stored, path: tuple[int, ...], found: dict[tuple[int, ...], Any]) -> Any:
    if isinstance(layout, NestedLayout):
        inner = [_layer(each, (*path, i), found) for i, each in enumerate(layout.inner)]
        return None if all(state is None for state in inner) else Nest(tuple(inner))
    return found.pop(path, None)


def _slots(layout: Stored, path: tuple[int, ...]) -> Iterator[Slot]:
    if isinstance(layout, NestedLayout):
        for i, inner in enumerate(layout.inner):
            yield from _slots(inner, (*path, i))
    else:
        yield Slot(path, layout.positional)


def _at(state: RowState, path: tuple[int, ...]) -> Any:
    held = state.layers[path[0]] if state.layers else None
    for i in path[1:]:
        held = None if held is None else held.states[i]
    return held


def _pack(packer: Packer, array: mx.array) -> Part:
    name = _DTYPES[array.dtype]
    return packer.add(name, np.asarray(mx.view(array, mx.uint16) if name == "bfloat16" else array))


def _unpack(name: str, array: Array) -> mx.array:
    made = mx.array(array)
    return mx.view(made, mx.bfloat16) if name == "bfloat16" else made


def _scheme(scheme: Scheme) -> tuple[int, int] | None:
    return (scheme.bits, scheme.group_size) if isinstance(scheme, Quantised) else None


def _of(scheme: tuple[int, int] | None) -> Scheme:
    return Plain() if scheme is None else Quantised(*scheme)
