"""Owns the short programs behind the table: one for each of its columns, or the reason why there is none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

from mlxbcd.methods.step import Off
from mlxbcd.state.composition import KvScheme
from mlxbcd.state.rows import Rows
from mlxbcd.state.schemes import Quantised
from oracle.alone import Conversion, rounded_texts
from oracle.crowd import CHUNK, WIDEST, Crowd, Newcomer
from oracle.families import Family
from oracle.mixed import MixedCrowd, packing_of
from oracle.traced import CompiledCrowd
from tracing import CAN_TRACE, traced

PASS: Final = "pass"
FULL: Final = 16
"""Rows of the largest batch."""

_CONVERSION: Final = Conversion(Quantised(bits=8, group_size=32), start=8)


def cells(family: Family) -> dict[str, str]:
    """A family's line of the table.

    Raises:
        AssertionError: a row does not give what it gives alone.
    """
    return {column: probe(family) for column, probe in COLUMNS.items()}


def batch(family: Family) -> str:
    """Rows of several lengths share forwards, come and leave."""
    if family.composition.reason:
        return f"alone: {family.composition.reason}"
    crowd = Crowd(family)
    first, *_ = crowd.admit([Newcomer(0, 1), Newcomer(1, 5, 9), Newcomer(0, 13)], widths=[3, 1, 5])
    crowd.step()
    crowd.step(WIDEST)
    crowd.admit([Newcomer(1, 26), Newcomer(0, 7)], widths=[CHUNK, 7])
    crowd.step()
    crowd.filter(set(crowd.keys) - {first})
    crowd.step(3)
    crowd.step()
    crowd.check_states()
    return PASS


def window(family: Family) -> str:
    """Rows shorter and longer than the windows go round them, by single and by several tokens."""
    if family.composition.reason:
        return "alone"
    if not family.windows:
        return "no sliding window"
    crowd = Crowd(family)
    crowd.admit([Newcomer(0, 6), Newcomer(1, 3 * max(family.windows)), Newcomer(1, 1)], widths=[5, CHUNK, 2])
    for width in (1, 1, 1, WIDEST, 1, 3, 1, WIDEST, 1):
        crowd.step(width)
    crowd.check_states()
    return PASS


def rollback(family: Family) -> str:
    """Each row takes back another number of tokens, over and over, across window edges and into larger classes."""
    if family.composition.reason:
        return "alone"
    if family.composition.rollback_reason:
        return family.composition.rollback_reason
    rng = random.Random(family.name)
    crowd = Crowd(family)
    crowd.admit([Newcomer(0, 5), Newcomer(1, 13), Newcomer(1, 7), Newcomer(0, 22)])
    crowd.step(WIDEST, kept=[0, 1, 3, 4])
    for width in (WIDEST, 3, WIDEST, 2, WIDEST):
        crowd.step(width, kept=[rng.randint(0, width) for _ in crowd.keys])
    crowd.step(WIDEST, kept=[2] * len(crowd))
    crowd.step()
    crowd.check_states()
    return PASS


def quantised(family: Family) -> str:
    """Rows converted to 8 bits together give what each gives alone over keys and values rounded to 8 bits."""
    if family.composition.reason:
        return "alone"
    if family.composition.kv_reason:
        return family.composition.kv_reason
    try:
        composition = family.quantised(KvScheme(_CONVERSION.scheme, _CONVERSION.start))
    except ValueError as refused:
        return str(refused)
    alone = rounded_texts(family.name, _CONVERSION)
    crowd = Crowd(family, composition, alone)
    # Rows are converted at the end of a step: each has one that ends at the conversion's length.
    for newcomer in (Newcomer(0, 21), Newcomer(1, 13), Newcomer(0, 8), Newcomer(1, 6)):
        crowd.admit([newcomer], widths=[_CONVERSION.start, 5])
    for width in (1, 1, 1, WIDEST):
        crowd.step(width)
    saved = crowd.extract(crowd.keys[0])
    assert saved.state.converted_at == _CONVERSION.start
    crowd.filter(crowd.keys[1:])
    crowd.restore([saved])
    if not composition.rollback_reason:
        crowd.step(WIDEST, kept=[1, 0, 4, 3])
    crowd.step()
    crowd.check_states()
    return PASS


def restore(family: Family) -> str:
    """Copies of rows, whole or cut back where that can be, join others and cold rows, until the batch is full."""
    if family.composition.reason:
        return "alone"
    crowd = Crowd(family)
    crowd.admit([Newcomer(0, 24), Newcomer(1, 11)])
    crowd.step(WIDEST)
    if crowd.reversible:
        crowd.step(WIDEST, kept=[0, 1])
    saved = [crowd.extract(key, length) for key in crowd.keys for length in _lengths(crowd.rows, key)]
    crowd.step()
    again = Crowd(family)
    again.restore(saved[:1])
    again.step(2)
    again.restore(saved, newcomers=[1])
    again.restore([saved[i % len(saved)] for i in range(FULL - len(again))])
    again.step()
    again.step(2)
    again.check_states()
    return PASS


def compiled(family: Family) -> str:
    """Decode steps run through traced functions, from class to class and around windows, each traced once."""
    if family.composition.reason:
        return "alone"
    if not CAN_TRACE:
        return PASS
    crowd = CompiledCrowd(family)
    with traced():
        first, *_ = crowd.admit([Newcomer(0, 5), Newcomer(1, 13), Newcomer(1, 15)])
        for _ in range(3):
            crowd.step()
        crowd.filter(set(crowd.keys) - {first})
        crowd.step()
        crowd.step()
    crowd.check_states()
    if crowd.off == {Off.UNTRACEABLE}:
        return Off.UNTRACEABLE.value
    crowd.check_traces()
    assert crowd.compiled == 5
    return PASS


def packs(family: Family) -> str:
    """Rows that decode, pieces of one prompt or of two, and windows of several tokens share packed forwards."""
    if family.composition.reason:
        return "alone"
    packing = packing_of(family.name)
    if packing.reason is not None:
        return packing.reason.value
    assert packing.packer is not None
    crowd = MixedCrowd(family, packing.packer)
    crowd.admit([Newcomer(0, 1), Newcomer(1, 5, 9), Newcomer(0, 13)])
    # Each window of eight is filled, wrapped and left behind, among the rows and in the prompt.
    crowd.admit_beside(Newcomer(1, 26, 9), [3, CHUNK, 6, 1])
    first, second = crowd.prompt(Newcomer(0, 9)), crowd.prompt(Newcomer(1, 6))
    crowd.step_beside([first, second], [5, 2])
    crowd.step_beside([first, second], [4, 4], WIDEST)
    crowd.step()
    crowd.check_states()
    return PASS


def _lengths(rows: Rows, key: int) -> list[int]:
    """Where to cut a row: not at all, and as far back as it can be."""
    return sorted({rows.lengths[key], max(rows.retained(key), 1)})


COLUMNS: Final[Mapping[str, Callable[[Family], str]]] = {
    "batch": batch,
    "window": window,
    "rollback": rollback,
    "quantised": quantised,
    "restore": restore,
    "compiled": compiled,
    "packs": packs,
}
