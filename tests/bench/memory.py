"""Owns `memory`: how much a decode step needs beyond what is alive anyway, as a share of the KV cache.

A step that runs ahead must not copy the cache that the step before it still reads. That would show most in a model of
one or two layers, so the real model is cut down to these; the rows' long states are made up, since only their size
counts. The peer's figures are of its BatchGenerator, given the same states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from bench import inprocess
from bench.machine import peer_version
from bench.registry import Settings
from bench.table import Row, Target, compare
from mlxbcd.engine.executor import Executor
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup
from mlxbcd.methods.autoregressive import Row as DecodeRow
from mlxbcd.model.load import read_config
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.rows import COLD, Joiner, Rows, commit

_ROWS = 8
_FEW_LAYERS = 2
_LONG, _SHORT = 8000, 2000
"""Positions per row: with few layers long rows, so that logits and activations are small beside the cache."""
_RAGGED = 7
_WARM_STEPS = 3
_TOKEN = 1
_MADE = "made"
_ENDLESS = 1_000_000
_TARGET = Target("ours", "<=", 5.0)


def run(settings: Settings) -> list[Row]:
    """`memory/step`, the worst of all, and one row per depth and mode."""
    built = inprocess.built(settings.model)
    model: Any = built.executor.forward.model
    peer_model = inprocess.twin(settings.model, model)
    ours: dict[tuple[int, Ahead], float] = {}
    peer: dict[int, float] = {}
    for depth in sorted({1, 2, len(model.layers)}, reverse=True):
        for cut in (model, peer_model):
            cut.model.layers = cut.model.layers[:depth]
        composition = inspect(model, str(read_config(settings.model)["model_type"]))
        length = _LONG if depth <= _FEW_LAYERS else _SHORT
        made = _Made(_state_shape(model, composition), [length - row * _RAGGED for row in range(_ROWS)])
        steps = settings.pick(12, 4)
        peer[depth] = _peer(peer_model, made, steps)
        for ahead in Ahead:
            ours[depth, ahead] = _ours(built.executor, composition, made, ahead, steps)

    def row(name: str, share: float, other: float) -> Row:
        return compare(name, share, other, "% of KV", "lower", peer_version=peer_version(), target=_TARGET)

    worst = row("memory/step", max(ours.values()), max(peer.values()))
    return [worst] + [
        row(f"memory/step/layers={depth}/{ahead.value}-ahead", share, peer[depth])
        for (depth, ahead), share in ours.items()
    ]


@dataclass(frozen=True, slots=True)
class _Made:
    """Made-up states: (heads, head dimension) of every layer, and the rows' lengths."""

    shape: tuple[int, int]
    lengths: list[int]

    def layer(self, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values [1, heads, length, dim] of one layer and row, evaluated."""
        heads, dim = self.shape
        keys, values = mx.zeros((1, heads, length, dim)), mx.zeros((1, heads, length, dim))
        mx.eval(keys, values)
        return keys, values


def _state_shape(model: Any, composition: Composition) -> tuple[int, int]:
    """(heads, head dimension) of a layer's keys, read off one forward."""
    caches = composition.make_stock()
    mx.eval(model(mx.array([[_TOKEN]]), cache=caches))
    keys: mx.array = caches[0].keys
    return keys.shape[1], keys.shape[3]


def _ours(executor: Executor, composition: Composition, made: _Made, ahead: Ahead, steps: int) -> float:
    group = DecodeGroup(executor.forward, Rows(composition), ahead)
    request = Request(prompt=(_TOKEN,), max_tokens=_ENDLESS, eos=frozenset())
    # Room from the start: a row that grows copies itself on purpose, once in a doubling.
    room = max(made.lengths) + _WARM_STEPS + steps + 2
    for key, length in enumerate(made.lengths):
        sampler = RowSampler(request.sampling, request.prompt, executor.vocab_size)
        prepared = _prepared(composition, made, length)
        joiner = Joiner(key, prepared.read(_MADE), room)
        group.join(DecodeRow(key, request, sampler, pending=_TOKEN), joiner)
    return _share(lambda: group.step(_ignore), mx.default_stream(mx.default_device()), lambda: group.nbytes, steps)


def _prepared(composition: Composition, made: _Made, length: int) -> Rows:
    """A collection of one row that has processed `length` tokens, without a model's help."""
    rows = Rows(composition, widest=length)
    commit(rows.prepare(join=[Joiner(_MADE, COLD, length)]))
    turn = rows.begin(length)
    for cache in turn.caches:
        cache.update_and_fetch(*made.layer(length))
    mx.eval(turn.arrays())
    turn.resolve()
    return rows


def _peer(model: Any, made: _Made, steps: int) -> float:
    generator = BatchGenerator(model, max_tokens=_ENDLESS, completion_batch_size=_ROWS, prefill_batch_size=_ROWS)
    caches = [[_stock_cache(made, length) for _ in model.layers] for length in made.lengths]
    waiting = set(generator.insert([[_TOKEN]] * _ROWS, caches=caches))
    del caches
    while waiting:
        waiting -= {response.uid for response in generator.next_generated()}
    share = _share(generator.next_generated, generator.stream, lambda: generator.prompt_cache_nbytes, steps)
    generator.close()
    return share


def _stock_cache(made: _Made, length: int) -> KVCache:
    cache = KVCache()
    cache.state = (*made.layer(length), length)
    return cache


def _share(step: Callable[[], object], stream: Any, kv_bytes: Callable[[], int], steps: int) -> float:
    """Peak of `steps` decode steps beyond what is alive between them, in percent of the KV cache.

    Nothing waits for the device between these steps: what two of them need together is what is measured.
    """
    for _ in range(_WARM_STEPS):
        step()
    mx.synchronize(stream)
    mx.clear_cache()
    alive = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(steps):
        step()
    mx.synchronize(stream)
    return 100 * (mx.get_peak_memory() - alive) / kv_bytes()


def _ignore(_events: object) -> None:
    """What the rows say does not matter here."""
