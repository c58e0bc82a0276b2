"""Owns finding out, by trying, how far ahead a model should decode on this machine, and what its windows cost."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import Final

import mlx.core as mx

from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.speculative import WIDEST
from mlxbcd.model.forward import Forward, Group
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler, sample
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.composition import Composition
from mlxbcd.state.rows import COLD, Joiner, Rows, commit

_WARM: Final = 3
"""Steps whose time isn't taken: the first ones allocate, and compile kernels."""
_STEPS: Final = 9
_PROBE: Final = Request(prompt=(0,), max_tokens=_WARM + _STEPS + 1, eos=frozenset())


_BUDGET_S: Final = 0.4
_WIDTHS: Final = (1, 8, WIDEST, 2, 16, 4)
"""Widths of windows, the telling ones first."""


def verify_curve(forward: Forward, composition: Composition, vocab_size: int) -> dict[int, float]:
    """Seconds of one row's round by the width of its window, as many widths as take 0.4 seconds and three at least.

    What runs in earnest refines it. On the device thread.
    """
    rows = Rows(composition, widest=WIDEST)
    commit(rows.prepare(join=[Joiner("probe", COLD, 2 * WIDEST)]))

    def round_s(width: int) -> float:
        began = time.perf_counter()
        turn = rows.begin(width, reversible=True)
        with turn.forward() as caches:
            (hidden,) = forward.run([Group(mx.zeros((1, width), dtype=mx.int32), caches)])
        samplers = [RowSampler(_PROBE.sampling, (), vocab_size) for _ in range(width)]
        sample(forward.head(hidden)[0], samplers).read()
        turn.resolve([1 if rows.lengths["probe"] == 0 else 0])
        mx.eval(turn.arrays())
        return time.perf_counter() - began

    began = time.perf_counter()
    for width in (1, 1):
        round_s(width)
    curve: dict[int, float] = {}
    while True:
        for width in _WIDTHS:
            curve[width] = min(round_s(width), curve.get(width, math.inf))
            if time.perf_counter() - began > _BUDGET_S and len(curve) >= 3:
                return curve
        if time.perf_counter() - began > _BUDGET_S / 4:
            return curve


def faster_ahead(forward: Forward, composition: Composition, vocab_size: int) -> Ahead:
    """The mode in which a row decodes faster. Takes about 50 decode steps. On the device thread."""
    # There and back, so that neither pays for being first.
    order: list[Ahead] = [*Ahead]
    times = [(_step_s(forward, composition, vocab_size, ahead), ahead) for ahead in order + order[::-1]]
    return min(times, key=lambda tried: tried[0])[1]


def _step_s(forward: Forward, composition: Composition, vocab_size: int, ahead: Ahead) -> float:
    """Median seconds between the tokens of one row that starts from nothing."""
    group = DecodeGroup(forward, Rows(composition) if composition.batches else None, ahead)
    row = Row("probe", _PROBE, RowSampler(_PROBE.sampling, _PROBE.prompt, vocab_size), pending=_PROBE.prompt[0])
    if composition.batches:
        group.join(row, Joiner(row.key, COLD, _PROBE.max_tokens))
    else:
        group.adopt(row, AloneRow(composition, row.key))
    times = [time.perf_counter()]
    for _ in range(_WARM + _STEPS):
        group.step(lambda events: None)
        times.append(time.perf_counter())
    group.settle(lambda events: None)
    group.discard()
    return median(after - before for before, after in zip(times[_WARM:], times[_WARM + 1 :], strict=False))
