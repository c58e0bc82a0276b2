"""Owns `mixed`: a decode step and a piece of a prompt as one packed forward, beside two forwards one after the other.

Both sides are ours, over the same rows of made-up keys and values, which every turn gives its tokens back to; nothing
comparable exists in mlx-lm. A side's time is from its open turns to the rows' next tokens and the prompt's new state,
the building of the graph included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from bench import inprocess
from bench.registry import Settings
from bench.table import Row, Target, compare
from mlxbcd.engine.executor import Executor
from mlxbcd.model.forward import Group
from mlxbcd.state.attention import AttentionLayout
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit
from mlxbcd.state.schemes import Plain
from mlxbcd.state.store import Heads, Prefix

_BATCHES = (1, 4, 8)
_CHUNKS = (16, 64, 256)
_SEPARATE = "mlxbc, separate forwards"
_DIFFERENCE = 1e-3

Run: TypeAlias = Callable[[Sequence[Group]], list[mx.array]]


def run(settings: Settings) -> list[Row]:
    """Every batch with every chunk; the larger ones only where it is not a quick run."""
    executor = inprocess.built(settings.model).executor
    if executor.packer is None:
        raise RuntimeError("this model runs no packed forwards")
    heads = _heads(executor)
    batches, chunks = settings.pick((_BATCHES, _CHUNKS), (_BATCHES[-1:], _CHUNKS[:2]))
    return [_mixed(settings, executor, heads, batch, chunk) for batch in batches for chunk in chunks]


def _mixed(settings: Settings, executor: Executor, heads: Sequence[Heads], batch: int, chunk: int) -> Row:
    rounds = settings.pick(15, 2)
    length, context = settings.pick((500, 250), (60, 20))
    assert executor.packer is not None
    sides: dict[str, Run] = {"packed": executor.packer.run, "separate": executor.forward.run}
    decoding = _rows(executor, heads, [length + 7 * row for row in range(batch)], 1)
    prompt = _rows(executor, heads, [context], 1)
    spans: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, mx.array] = {}
    for turn in range(rounds + 1):
        for name in sides if turn % 2 == 0 else reversed(sides):
            took, answers[name] = _together(executor, sides[name], decoding, prompt, chunk)
            if turn:  # the first one allocates
                spans[name].append(1e3 * took)
    apart = _apart(*answers.values())
    if apart > _DIFFERENCE:
        raise RuntimeError(f"the two have computed different things: {apart:.1e} apart")
    ours, separate = (median(spans[name]) for name in sides)
    return compare(
        f"mixed/B={batch}/chunk={chunk}",
        ours,
        separate,
        "ms",
        "lower",
        peer_version=_SEPARATE,
        target=Target("ratio", ">=", 1.0),
        note=f"{length} tokens of context, {context} before the chunk; logits within {apart:.0e}",
    )


def _together(executor: Executor, run: Run, decoding: Rows, prompt: Rows, chunk: int) -> tuple[float, mx.array]:
    """Seconds of a step and a piece, and the step's logits [B, vocab]. The rows are as before."""
    batch = len(decoding)
    step, piece = decoding.begin(1), prompt.begin(chunk)
    groups = [
        Group(mx.arange(batch, dtype=mx.int32)[:, None] + 100, step.caches),
        Group(mx.arange(chunk, dtype=mx.int32)[None] + 50, piece.caches),
    ]
    began = perf_counter()
    own, _ = run(groups)
    logits = executor.forward.head(own)[:, -1]
    mx.eval(mx.argmax(logits, axis=-1), step.arrays(), piece.arrays())
    seconds = perf_counter() - began
    mx.eval(logits)
    step.resolve([0] * batch)
    piece.resolve([0])
    return seconds, logits


def _rows(executor: Executor, heads: Sequence[Heads], lengths: Sequence[int], spare: int) -> Rows:
    """Rows that no model has computed."""
    rows = Rows(executor.composition)
    for key, length in enumerate(lengths):
        parts = [
            tuple(
                mx.random.uniform(-1, 1, (1, each.heads, length, dim)).astype(each.dtype)
                for dim in (each.key_dim, each.value_dim)
            )
            for each in heads
        ]
        state = RowState(length, tuple(Prefix(part, 0, Plain()) for part in parts))
        mx.eval(state.arrays)
        commit(rows.prepare(join=[Joiner(key, state, length + spare)]))
    mx.eval([layout.arrays() for layout in rows.layouts])
    return rows


def _heads(executor: Executor) -> list[Heads]:
    """Shapes of keys and values of every layer, known once it has run; the graph is not evaluated.

    Raises:
        RuntimeError: a layer keeps something else than keys and values of every position.
    """
    rows = Rows(executor.composition)
    commit(rows.prepare(join=[Joiner("shape", COLD, 1)]))
    executor.forward.hidden(mx.zeros((1, 1), dtype=mx.int32), rows.begin(1).caches)
    plain = [layout for layout in rows.layouts if isinstance(layout, AttentionLayout) and layout.window is None]
    heads = [layout.heads for layout in plain if layout.heads is not None]
    if len(heads) != len(rows.layouts):
        raise RuntimeError("this benchmark makes up rows of plain attention only")
    return heads


def _apart(ours: mx.array, other: mx.array) -> float:
    """The largest difference, relative to a row's largest logit."""
    mine, theirs = np.array(ours.astype(mx.float32)), np.array(other.astype(mx.float32))
    return float((np.abs(mine - theirs).max(axis=-1) / np.abs(theirs).max(axis=-1)).max())
