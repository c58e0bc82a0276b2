"""Owns a daemon whose device is made up: one millisecond per decode step, and canned tokens for every row.

All else is real: the engine's loop, the device thread, the text stage, sessions and the socket. For every line that it
reads it writes one: the processor time it has used so far, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench.stories import words
from mlxbcd.config.sources import fixed
from mlxbcd.device import Device
from mlxbcd.engine.engine import Engine
from mlxbcd.engine.runner import Leaving, Report
from mlxbcd.engine.scheduler import Iteration, Policy
from mlxbcd.methods.events import Drawn, Emit, Event, Prefilled
from mlxbcd.model.blas import BlasReport
from mlxbcd.plan.request import Request
from mlxbcd.plan.resolve import Capabilities
from mlxbcd.residency.build import Built
from mlxbcd.residency.grammars import Grammars
from mlxbcd.residency.names import resolve
from mlxbcd.residency.resident import Resident
from mlxbcd.residency.words import Words
from mlxbcd.sampling.sampler import Sample
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.contract import Fault, Service
from mlxbcd.serve.live import LiveService
from mlxbcd.serve.main import run
from mlxbcd.serve.options import Options
from mlxbcd.state.geometry import Key

STEP_S = 0.001
_CONTEXT = 1_000_000
_CANNED_WORDS = 2000


@dataclass(slots=True)
class _Row:
    """A row of the made-up device."""

    key: Key
    request: Request
    position: int = 0
    drawn: int = 0

    @property
    def decoding(self) -> bool:
        return 0 < self.drawn < self.request.max_tokens


class CannedRunner:
    """A runner that computes nothing: a decode step sleeps, then every row draws its next token of a fixed text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._rows: dict[Key, _Row] = {}

    def iterate(
        self,
        iteration: Iteration,
        start: Sequence[tuple[Key, Request]],
        leave: Sequence[Leaving],
        emit: Emit,
    ) -> Report:
        """See `mlxbcd.engine.runner.Runner.iterate`."""
        for leaving in leave:
            self._rows.pop(leaving.key, None)
        self._rows |= {key: _Row(key, request) for key, request in start}
        if start:
            emit([Prefilled(key, 0) for key, _ in start])
        decoding = [row for row in self._rows.values() if row.decoding]
        if iteration.decode and decoding:
            time.sleep(STEP_S)
            emit([self._draw(row) for row in decoding])
        if iteration.piece is not None:
            row = self._rows[iteration.piece.key]
            row.position += iteration.piece.width
            events: list[Event] = [Prefilled(row.key, row.position)]
            if row.position == len(row.request.prompt):
                events.append(self._draw(row))
            emit(events)
        self._rows = {key: row for key, row in self._rows.items() if row.drawn < row.request.max_tokens}
        return Report(running=tuple(row.key for row in self._rows.values() if row.decoding))

    def close(self) -> None:
        """Drop all rows."""
        self._rows.clear()

    def _draw(self, row: _Row) -> Drawn:
        token = self._tokens[row.drawn % len(self._tokens)]
        row.drawn += 1
        over = row.drawn == row.request.max_tokens
        return Drawn(row.key, Sample(token=token, finite=True), "length" if over else None)


async def build(options: Options, on_fatal: Fault) -> Service:
    """The real service, with a model in memory that needs none."""
    source = resolve(options.model)
    vocabulary = Words.load(source.path)
    tokenizer = vocabulary.tokenizer
    runner = CannedRunner(tokenizer.encode(words(_CANNED_WORDS, 0)))
    device = Device()
    device.start()
    engine = Engine(device, runner, Policy(), on_fatal)
    built = Built(
        cast("Any", runner),
        device="none",
        dtype="float32",
        costs_at=source.path / "nowhere" / "costs.json",
        bytes=0,
        context=_CONTEXT,
        vocab_size=tokenizer.vocab_size,
        reason="",
        capabilities=Capabilities(),
    )
    service = LiveService(
        device, Configuration(fixed(options)), on_fatal, BlasReport("native", "nothing is multiplied")
    )
    grammars = Grammars(_no_grammars, service._workers)
    service._residency.models[source.path] = Resident(source, vocabulary, grammars, engine, built, 0.0)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _report)
    return service


def _no_grammars() -> Any:
    raise NotImplementedError("nothing is drawn here, so nothing can be constrained")


def _report() -> None:
    for _ in range(os.read(sys.stdin.fileno(), 64).count(b"\n")):
        print(time.process_time(), flush=True)


def main() -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", required=True)
    args = parser.parse_args()
    # There are no states to keep: prompts are not processed.
    return run(Options(socket=args.socket, model=args.model, preload=False, cache_ram=0), build)


if __name__ == "__main__":
    sys.exit(main())
