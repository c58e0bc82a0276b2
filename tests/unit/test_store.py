"""Buffers of one class: how their slots are written, read, resized and cleaned."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxbcd.state.geometry import Class
from mlxbcd.state.schemes import Plain, Quantised, Scheme
from mlxbcd.state.step import Segment, Step
from mlxbcd.state.store import Heads, Prefix, Store

HEADS = Heads(heads=2, key_dim=64, value_dim=32, dtype=mx.float32)
SCHEMES: list[Scheme] = [Plain(), Quantised(8, 32), Quantised(4, 32)]


def tokens(rows: int, width: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Random keys and values of `width` tokens."""
    keys = mx.random.normal((rows, HEADS.heads, width, HEADS.key_dim), key=mx.random.key(seed))
    values = mx.random.normal((rows, HEADS.heads, width, HEADS.value_dim), key=mx.random.key(seed + 1))
    return keys, values


def append(store: Store, starts: list[int], width: int, seed: int = 0) -> tuple[mx.array, ...]:
    """Append random tokens to the first rows; what was written, encoded."""
    segment = Segment(0, len(starts), Class(64))
    new = store.scheme.encode(*tokens(len(starts), width, seed))
    store.append(Step(starts, width, [segment]), segment, new)
    return new


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("starts", [[5, 5, 5], [0, 9, 4]], ids=["equal", "ragged"])
@pytest.mark.parametrize("rows", [3, 2])
def test_what_was_appended_is_read_back(scheme: Scheme, starts: list[int], rows: int) -> None:
    store = Store.empty(HEADS, 3, 64, scheme)
    written = append(store, starts[:rows], 4)
    for slot, start in enumerate(starts[:rows]):
        prefix = store.read(slot, start, start + 4)
        assert prefix.start == start
        for got, wanted in zip(prefix.parts, written, strict=True):
            assert mx.array_equal(got, wanted[slot : slot + 1]).item()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_prefix_that_was_put_is_read_back_around_the_ring(scheme: Scheme) -> None:
    store = Store.empty(HEADS, 2, 10, scheme)
    prefix = Prefix(scheme.encode(*tokens(1, 7)), 16, scheme)
    store.put(1, prefix)
    again = store.read(1, 16, 23)
    assert again.start == 16
    assert all(mx.array_equal(a, b).item() for a, b in zip(again.parts, prefix.parts, strict=True))


@pytest.mark.parametrize("begin", [0, 3, 10, 13])
def test_a_whole_ring_is_read_from_wherever_it_begins(begin: int) -> None:
    store = Store.empty(HEADS, 1, 10, Plain())
    prefix = Prefix(tokens(1, 10), begin, Plain())
    store.put(0, prefix)
    again = store.read(0, begin, begin + 10)
    assert all(mx.array_equal(a, b).item() for a, b in zip(again.parts, prefix.parts, strict=True))


def test_nothing_is_read_from_an_empty_range() -> None:
    assert Store.empty(HEADS, 1, 10, Plain()).read(0, 4, 4).parts[0].shape == (1, 2, 0, 64)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_resized_store_keeps_the_slots_it_still_has(scheme: Scheme) -> None:
    store = Store.empty(HEADS, 2, 64, scheme)
    append(store, [0, 0], 5)
    for slots in (4, 1):
        resized = store.resized(slots)
        assert (resized.slots, resized.ring, resized.scheme) == (slots, 64, scheme)
        for got, wanted in zip(resized.read(0, 0, 5).parts, store.read(0, 0, 5).parts, strict=True):
            assert mx.array_equal(got, wanted).item()


def test_a_scrubbed_slot_holds_zeros_and_its_neighbour_what_it_held() -> None:
    store = Store.empty(HEADS, 2, 64, Plain())
    written = append(store, [0, 0], 5)
    store.scrub(0)
    assert not any(mx.any(part[0]).item() for part in store.parts)
    assert mx.array_equal(store.read(1, 0, 5).parts[0], written[0][1:]).item()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_shape_of_a_token_is_known_from_what_is_stored(scheme: Scheme) -> None:
    assert Prefix(scheme.encode(*tokens(1, 3)), 0, scheme).heads == HEADS


def test_a_row_is_quantised_once_and_stays_so() -> None:
    eight, four = Quantised(8, 32), Quantised(4, 32)
    plain = Prefix(tokens(1, 3), 0, Plain())
    quantised = plain.convert(eight)
    assert plain.convert(Plain()) is plain
    assert quantised.convert(eight) is quantised
    for other in (Plain(), four):
        with pytest.raises(ValueError, match="can't change its scheme"):
            quantised.convert(other)


def test_fewer_bits_take_less_memory() -> None:
    plain, eight, four = (Store.empty(HEADS, 4, 64, scheme).nbytes for scheme in SCHEMES)
    # Scales and biases of a group of 32 cost two bits per value in float32.
    assert eight == plain * 10 // 32
    assert four == plain * 6 // 32
