"""Owns the rows of `rows` about memory, and about one long row beside short ones.

These run on a small model with random weights wherever a row has 32k tokens: the peer pads every row to the longest.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final

import mlx.core as mx

from bench.batches import MadeRow, Pair, Side, difference
from bench.machine import peer_version
from bench.registry import Settings
from bench.table import Row, Target, compare
from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward

_ROWS = 8
_RAGGED = 7
"""Tokens that each row is shorter than the one before."""
_SHORT = 200
_JOINING = 9
"""Short rows that join one by one: enough to see their class grow."""
_WARM_STEPS = 2
_SMALL: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
}


def measure(settings: Settings, pair: Pair) -> list[Row]:
    """Rows `rows/memory`, `rows/memory-mixed`, `rows/join-alloc` and `rows/step-mixed`; `pair` is the real model."""
    whole = pair.row(0, settings.pick(4096, 500))
    even = [whole.beginning(key, whole.length - _RAGGED * key) for key in range(_ROWS)]
    memory = _memory("rows/memory", pair, even, 1.1)
    small = _small()
    long = small.row(0, settings.pick(32_768, 2000))
    mixed = [long, *(small.row(key, _SHORT - key) for key in range(1, _ROWS))]
    return [
        memory,
        _memory("rows/memory-mixed", small, mixed, 2.2),
        _join_alloc(small, long),
        _step_mixed(settings, small, mixed),
    ]


def _small() -> Pair:
    """A model of the zoo that nobody has trained."""
    model_class, args_class = zoo.model_classes(_SMALL)
    mx.random.seed(0)
    model, twin = (model_class(args_class.from_dict(_SMALL)) for _ in range(2))
    mx.eval(model.parameters())
    twin.update(model.parameters())
    return Pair(Forward(model), str(_SMALL["model_type"]), twin)


def _memory(name: str, pair: Pair, rows: Sequence[MadeRow], limit: float) -> Row:
    """Memory that running rows need, in bytes per byte of their own keys and values."""
    own = sum(row.nbytes // row.length * (row.length + 1) for row in rows)

    def held(side: Side) -> float:
        before = _active()
        side.merge(rows)
        side.step()
        return (_active() - before) / own

    return compare(
        name,
        held(pair.ours()),
        held(pair.theirs()),
        "× own",
        "lower",
        peer_version=peer_version(),
        target=Target("ours", "<=", limit),
        note=f"the rows' own keys and values are {own / 1e6:.0f} MB",
    )


def _join_alloc(pair: Pair, long: MadeRow) -> Row:
    """The most that a short row's joining allocates beside a long one, per byte of the class it joins."""
    joining = [pair.row(key, _SHORT - key) for key in range(1, _JOINING + 1)]
    ours, theirs = pair.ours(), pair.theirs()
    most: dict[Side, float] = {ours: 0.0, theirs: 0.0}
    for side in most:
        side.merge([long])
    for row in joining:
        allocated = {side: _allocated_by_join(side, row) for side in most}
        for side, count in allocated.items():
            most[side] = max(most[side], count / ours.class_bytes(row.key))
    return compare(
        "rows/join-alloc",
        most[ours],
        most[theirs],
        "× class",
        "lower",
        peer_version=peer_version(),
        target=Target("ours", "<=", 1.001),
        note=f"the worst of {_JOINING} rows of {_SHORT} tokens that join one of {long.length}",
    )


def _allocated_by_join(side: Side, row: MadeRow) -> int:
    ready = side.ready(row)
    before = _active()
    mx.reset_peak_memory()
    side.join(ready)
    side.settle()
    # Where nothing was allocated there is no new peak.
    return max(0, mx.get_peak_memory() - before)


def _step_mixed(settings: Settings, pair: Pair, rows: Sequence[MadeRow]) -> Row:
    """A step over one long row and short ones, in steps over the same rows as two groups of ours."""
    sides: tuple[Side, ...] = (pair.ours(), pair.theirs(), pair.ours(), pair.ours())
    ours, theirs, long, short = sides
    spans: dict[Side, list[float]] = {side: [] for side in sides}
    for side, some in zip(sides, (rows, rows, rows[:1], rows[1:]), strict=True):
        side.merge(some)
        for _ in range(_WARM_STEPS):
            side.step()
    logits: dict[Side, mx.array] = {}
    for turn in range(settings.pick(31, 3)):
        for i in range(len(sides)):
            side = sides[(turn + i) % len(sides)]
            began = perf_counter()
            logits[side] = side.step()
            spans[side].append(1e3 * (perf_counter() - began))
    apart = difference(ours, logits[ours], theirs, logits[theirs])
    took = {side: median(spans[side]) for side in sides}
    groups = took[long] + took[short]
    return compare(
        "rows/step-mixed",
        took[ours] / groups,
        took[theirs] / groups,
        "× two groups",
        "lower",
        peer_version=peer_version(),
        target=Target("ours", "<=", 1.25),
        note=f"{took[ours]:.1f} ms together, {groups:.1f} as two groups; logits within {apart:.0e}",
    )


def _active() -> int:
    """Bytes of live arrays. None waits to be collected, nor can a freed buffer, larger than needed, be used again."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
