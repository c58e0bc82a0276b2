"""Owns the list of benchmarks and what each is given.

A benchmark is a module of this package with one function, ``run(settings: Settings) -> list[Row]``, and one line in
`BENCHES`. It runs in a fresh process of its own, so it may import MLX, start servers, and leave nothing behind for the
next. `Row.name` begins with the benchmark's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from bench.table import Row
from mlxbcd.model.blas import enable

T = TypeVar("T")

BENCHES: Final[Mapping[str, str]] = {
    "decode": "bench.decode",
    "served": "bench.served",
    "startup": "bench.startup",
    "wire": "bench.wire",
    "http": "bench.endpoint",
    "memory": "bench.memory",
    "rows": "bench.rows",
    "cache": "bench.cache",
    "grammar": "bench.grammar",
    "spec": "bench.spec",
    "mixed": "bench.mixed",
    "gap": "bench.gap",
    "priority": "bench.priority",
}
"""Name → module, in the order in which all of them run."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a benchmark is given.

    Attributes:
        model: the model's directory.
        quick: run small, to see that it works; the figures mean nothing.
        llama_server, gguf: llama.cpp's server and the same model for it, where it is to be compared with too.
    """

    model: Path
    quick: bool = False
    llama_server: Path | None = None
    gguf: Path | None = None

    def pick(self, full: T, quick: T) -> T:
        """A size for a real run, or for a quick one."""
        return quick if self.quick else full


def run_bench(name: str, settings: Settings) -> list[Row]:
    """Run one benchmark in this process, which must not have imported MLX yet."""
    enable()
    rows: list[Row] = importlib.import_module(BENCHES[name]).run(settings)
    return rows
