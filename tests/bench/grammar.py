"""Owns `grammar`: what a grammar adds to a decode step, of all rows of a batch or of one among others.

The peer is our own engine with the same rows and no grammar, by turns. Both executors share one model.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import ClassVar

from bench import inprocess
from bench.driven import Driven
from bench.registry import Settings
from bench.stories import token_prompts
from bench.table import Row, Target, compare
from mlxbcd.sampling.constraint import RowConstraint
from mlxbcd.sampling.grammar import Vocabulary
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.text.tokenizer import Tokenizer

_BATCHES = (1, 8)
_LENGTH = 48
_WARM_STEPS = 4
_SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
        "required": ["name", "age"],
    },
}
"""One that never ends."""


class _Timed(RowConstraint):
    """Tells what its masks took."""

    spans: ClassVar[list[float]] = []

    def mask(self) -> object:
        began = perf_counter()
        try:
            return super().mask()
        finally:
            self.spans.append(perf_counter() - began)


def run(settings: Settings) -> list[Row]:
    """Rows `grammar/B=1`, `grammar/B=8`, and `grammar/B=8/one` where one of eight rows has a grammar."""
    built = inprocess.built(settings.model)
    tokenizer = Tokenizer.load(settings.model)
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, built.vocab_size, tokenizer.eos_ids)
    grammar = vocabulary.compile(Source.of_schema(_SCHEMA))

    def follow() -> RowConstraint:
        return _Timed(built.vocab_size, tokenizer.eos_ids, grammar.start())

    cases = [(f"grammar/B={batch}", batch, batch) for batch in _BATCHES] + [("grammar/B=8/one", 8, 1)]
    rows = []
    for name, batch, constrained in cases:
        prompts = token_prompts(tokenizer, [_LENGTH] * batch)
        ours = Driven(built.executor, prompts, [follow if row < constrained else None for row in range(batch)])
        plain = Driven(replace(built.executor), prompts)
        try:
            rows.append(_interleave(name, ours, plain, settings))
        finally:
            ours.close()
            plain.close()
    return rows


def _interleave(name: str, ours: Driven, plain: Driven, settings: Settings) -> Row:
    rounds, steps = settings.pick(15, 2), settings.pick(12, 4)
    for side in (ours, plain):
        _seconds_per_step(side, _WARM_STEPS)
    _Timed.spans.clear()
    figures: dict[Driven, list[float]] = {ours: [], plain: []}
    for turn in range(rounds):
        for side in (ours, plain) if turn % 2 == 0 else (plain, ours):
            figures[side].append(_seconds_per_step(side, steps))
    masks = f"a mask takes {median(_Timed.spans) * 1e6:.0f} µs, {max(_Timed.spans) * 1e6:.0f} at most"
    return compare(
        name,
        median(figures[ours]) * 1e3,
        median(figures[plain]) * 1e3,
        "ms",
        "lower",
        peer_version="no grammar",
        target=Target("ratio", ">=", 0.95),
        note=masks,
    )


def _seconds_per_step(side: Driven, steps: int) -> float:
    began = perf_counter()
    for _ in range(steps):
        side.step()
    side.settle()
    return (perf_counter() - began) / steps
