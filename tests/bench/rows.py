"""Owns `rows`: membership, rollback and decode steps over our rows, beside mlx-lm's batch caches, on the real model.

A change may defer its work, so each is timed through the evaluation of the state and of the next decode step. Both
sides pay for that step and it hides how they differ, so `…/change` has the time until the state was evaluated. What a
side does before a change, such as processing the joiner's prompt, is not timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import mlx.core as mx

from bench import inprocess, rows_memory
from bench.batches import MadeRow, Pair, Side, difference
from bench.machine import peer_version
from bench.registry import Settings
from bench.table import Row, Target, compare
from mlxbcd.model.load import read_config

_BATCHES = (1, 8, 16)
_ROWS = 8
_RAGGED = 7
"""Tokens that each row is shorter than the one before."""
_VERIFIED = 4
_KEPT = (4, 1, 3, 0, 2, 4, 1, 2)
"""Tokens of a verified window that each row keeps."""
_WARM_STEPS = 2

Change: TypeAlias = Callable[[Side], None]


def run(settings: Settings) -> list[Row]:
    """Joining, dropping and taking back; steps at several batch sizes; and the rows of `rows_memory`."""
    forward = inprocess.built(settings.model).executor.forward
    twin = inprocess.twin(settings.model, forward.model)
    pair = Pair(forward, str(read_config(settings.model)["model_type"]), twin)
    steps = [_step(settings, pair, batch) for batch in _BATCHES]
    return [*_changes(settings, pair), _growing_join(settings, pair), *steps, *rows_memory.measure(settings, pair)]


def _changes(settings: Settings, pair: Pair) -> list[Row]:
    """Round by round, one row leaves and joins again, and all rows give back a part of what they have just added."""
    rounds, length = settings.pick(9, 2), settings.pick(2000, 100)
    made = [pair.row(key, length - _RAGGED * key) for key in range(_ROWS)]
    ours, theirs = pair.ours(widest=_VERIFIED), pair.theirs()
    for side in (ours, theirs):
        side.merge(made)
        side.step()
    change_alone: dict[tuple[str, Side], list[float]] = defaultdict(list)
    with_step: dict[tuple[str, Side], list[float]] = defaultdict(list)
    apart = 0.0
    for turn in range(rounds):
        row = made[turn % _ROWS]
        ready: dict[Side, Any] = {side: side.ready(row) for side in (ours, theirs)}
        for name, change in _round(row, ready).items():
            logits = {}
            for side in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
                if name == "rollback":
                    side.verify(_VERIFIED)
                alone, whole, logits[side] = _clock(side, change)
                change_alone[name, side].append(alone)
                with_step[name, side].append(whole)
            apart = max(apart, difference(ours, logits[ours], theirs, logits[theirs]))

    def row_of(name: str, what: str, spans: Mapping[tuple[str, Side], list[float]], note: str = "") -> Row:
        mine, other = median(spans[what, ours]), median(spans[what, theirs])
        target = Target("ratio", ">=", 3.0)
        return compare(name, mine, other, "ms", "lower", peer_version=peer_version(), target=target, note=note)

    steady = " and ".join(f"{median(with_step['nothing', side]):.0f}" for side in (ours, theirs))
    rows = []
    for what in ("join", "drop", "rollback"):
        note = f"the step alone takes {steady} ms; logits within {apart:.0e}"
        rows.append(row_of(f"rows/{what}", what, with_step, note))
        rows.append(row_of(f"rows/{what}/change", what, change_alone))
    return rows


def _round(row: MadeRow, ready: Mapping[Side, Any]) -> dict[str, Change]:
    """What happens in a round, in this order."""
    kept = dict(enumerate(_KEPT))
    return {
        "drop": lambda side: side.drop(row.key),
        "join": lambda side: side.join(ready[side]),
        "rollback": lambda side: side.take_back(kept),
        "nothing": lambda side: None,
    }


def _growing_join(settings: Settings, pair: Pair) -> Row:
    """A ninth row joins: our buffers, full until then, double. The joins before and after are `rows/join`."""
    length = settings.pick(2000, 100)
    made = [pair.row(key, length - _RAGGED * key) for key in range(_ROWS + 1)]

    def joined(side: Side) -> float:
        side.merge(made[:-1])
        side.step()
        ready = side.ready(made[-1])
        _, whole, _ = _clock(side, lambda side: side.join(ready))
        return whole

    spans = [(joined(pair.ours()), joined(pair.theirs())) for _ in range(settings.pick(5, 1))]
    mine, other = (median(side) for side in zip(*spans, strict=True))
    note = "the worst of our joins: eight slots become twelve"
    return compare("rows/join/growing", mine, other, "ms", "lower", peer_version=peer_version(), note=note)


def _clock(side: Side, change: Change) -> tuple[float, float, mx.array]:
    """Milliseconds of a change alone, and of the change with the step after it; the step's logits."""
    began = perf_counter()
    change(side)
    side.settle()
    changed = perf_counter()
    logits = side.step()
    return 1e3 * (changed - began), 1e3 * (perf_counter() - began), logits


def _step(settings: Settings, pair: Pair, batch: int) -> Row:
    """Decode steps by turns; also over the peer's caches with everything else ours, which isolates the layouts."""
    rounds, steps = settings.pick(15, 2), settings.pick(3, 2)
    length = settings.pick(1000, 120)
    made = [pair.row(key, length - _RAGGED * key) for key in range(batch)]
    ours, theirs, mixed = sides = pair.ours(), pair.theirs(), pair.theirs_in_our_forward()
    for side in sides:
        side.merge(made)
        for _ in range(_WARM_STEPS):
            side.step()
    spans: dict[Side, list[float]] = {side: [] for side in sides}
    logits: dict[Side, mx.array] = {}
    for turn in range(rounds):
        for i in range(len(sides)):
            side = sides[(turn + i) % len(sides)]
            for _ in range(steps):
                began = perf_counter()
                logits[side] = side.step()
                spans[side].append(1e3 * (perf_counter() - began))
    apart = difference(ours, logits[ours], theirs, logits[theirs])
    return compare(
        f"rows/step/B={batch}",
        median(spans[ours]),
        median(spans[theirs]),
        "ms",
        "lower",
        peer_version=peer_version(),
        target=Target("ratio", ">=", 1.0),
        note=f"{median(spans[mixed]):.1f} with their caches in our forward; logits within {apart:.0e}",
    )
