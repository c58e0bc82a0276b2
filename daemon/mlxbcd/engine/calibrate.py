"""Owns finding out, by trying both, how far ahead decode should run with one model on this machine."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.model.forward import Forward
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.composition import Composition
from mlxbcd.state.rows import COLD, Joiner, Rows

_WARM: Final = 3
"""Steps whose time isn't taken: the first ones allocate, and compile kernels."""
_STEPS: Final = 9
_PROBE: Final = Request(prompt=(0,), max_tokens=_WARM + _STEPS + 1, eos=frozenset())


def faster_ahead(forward: Forward, composition: Composition, vocab_size: int) -> Ahead:
    """The mode in which a row decodes faster. Takes about 25 decode steps. On the device thread."""
    return min(Ahead, key=lambda ahead: _step_s(forward, composition, vocab_size, ahead))


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
