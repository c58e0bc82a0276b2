"""Owns `decode`: tokens per second of our engine beside mlx-lm's BatchGenerator, in one process, on the same arrays.

Both sides hold the same ragged greedy rows at the same positions and take turns in short blocks, so that whatever else
the machine does meets both. A block ends when its last step has been computed: neither side runs on into the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from bench import inprocess
from bench.driven import ENDLESS, Driven
from bench.machine import peer_version
from bench.registry import Settings
from bench.stories import token_prompts
from bench.table import Row, Target, compare
from mlxbcd.text.tokenizer import Tokenizer

_BATCHES = (1, 4, 8)
_SHORTEST, _LONGEST = 32, 64
_WARM_STEPS = 4


def run(settings: Settings) -> list[Row]:
    """Rows `decode/B=1`, `decode/B=4` and `decode/B=8`."""
    built = inprocess.built(settings.model)
    peer_model = inprocess.twin(settings.model, built.executor.forward.model)
    tokenizer = Tokenizer.load(settings.model)
    rows = []
    for batch in _BATCHES:
        spread = (_LONGEST - _SHORTEST) // batch
        prompts = token_prompts(tokenizer, [_SHORTEST + row * spread for row in range(batch)])
        ours, peer = Driven(built.executor, prompts), _Peer(peer_model, prompts)
        try:
            rows.append(_interleave(ours, peer, batch, settings))
        finally:
            ours.close()
            peer.close()
    return rows


class _Side(Protocol):
    """Rows in decode.

    Attributes:
        tokens: what each row has generated.
    """

    tokens: list[list[int]]

    def step(self) -> None:
        """One decode step: one more token of every row is known to the host."""

    def settle(self) -> None:
        """Wait for what is being computed."""


def _interleave(ours: _Side, peer: _Side, batch: int, settings: Settings) -> Row:
    rounds, steps = settings.pick(15, 2), settings.pick(12, 4)
    for side in (ours, peer):
        _seconds_per_step(side, _WARM_STEPS)
    figures: dict[_Side, list[float]] = {ours: [], peer: []}
    for turn in range(rounds):
        for side in (ours, peer) if turn % 2 == 0 else (peer, ours):
            figures[side].append(_seconds_per_step(side, steps))
    return compare(
        f"decode/B={batch}",
        batch / median(figures[ours]),
        batch / median(figures[peer]),
        "tok/s",
        "higher",
        peer_version=peer_version(),
        target=Target("ratio", ">=", 1.0),
        note=_agreement(ours.tokens, peer.tokens),
    )


def _seconds_per_step(side: _Side, steps: int) -> float:
    began = perf_counter()
    for _ in range(steps):
        side.step()
    side.settle()
    return (perf_counter() - began) / steps


def _agreement(ours: Sequence[Sequence[int]], peer: Sequence[Sequence[int]]) -> str:
    """How far the two sides' greedy rows agree: they must begin alike, and may part at a near tie."""
    alike = total = 0
    for mine, other in zip(ours, peer, strict=True):
        both = min(len(mine), len(other))
        total += both
        alike += next((i for i in range(both) if mine[i] != other[i]), both)
    return f"{alike} of {total} tokens before rows part"


class _Peer:
    """mlx-lm's BatchGenerator, with its defaults."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        size = len(prompts)
        self._generator = BatchGenerator(model, max_tokens=ENDLESS, completion_batch_size=size, prefill_batch_size=size)
        self._rows = {uid: row for row, uid in enumerate(self._generator.insert([list(prompt) for prompt in prompts]))}
        while not all(self.tokens):
            self.step()

    def step(self) -> None:
        for response in self._generator.next_generated():
            self.tokens[self._rows[response.uid]].append(response.token)

    def settle(self) -> None:
        mx.synchronize(self._generator.stream)

    def close(self) -> None:
        """Let the rows go."""
        self._generator.remove(list(self._rows))
        self._generator.close()
