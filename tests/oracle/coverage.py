"""Owns COVERAGE.md, the table of what every family of the zoo does; `python -m oracle.coverage` in tests/ writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import mlx.core as mx

from oracle.families import FAMILIES, MISSING, load, small_classes
from oracle.probes import COLUMNS, PASS, cells

PATH: Final = Path(__file__).with_name("COVERAGE.md")

_INTRODUCTION: Final = """\
# What each family of the zoo does

Written by `cd tests && python -m oracle.coverage`; a test holds every cell to be true. Each family is a tiny random
float32 model. A cell says `pass` where rows in a shared batch give the logits and the state that each of them gives
alone with mlx-lm's own caches, and otherwise why they don't share one.

- **batch**: rows of several lengths share forwards, come and leave.
- **window**: the same around sliding windows, with steps of one and of several tokens.
- **rollback**: in one batch, each row takes back another number of tokens.
- **quantised**: 8-bit keys and values in a batch; alone means mlx-lm's own cache, holding them rounded to 8 bits.
- **restore**: copies of rows, cut back where the layers can be, run on among others in batches of up to 16.
- **compiled**: decode steps run through traced functions, each traced once.
- **packs**: rows that decode and pieces of prompts share one packed forward, around windows where there are some.
"""


def read() -> dict[str, dict[str, str]]:
    """The table as it is checked in: family → column → cell."""
    lines = [line for line in PATH.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(heads[1:], line, strict=True)) for name, *line in rows}


def render(table: dict[str, dict[str, str]]) -> str:
    """The page that says this table."""
    passing = {column: sum(row[column].startswith(PASS) for row in table.values()) for column in COLUMNS}
    lines = [["family", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    lines += [[name, *(row[column] for column in COLUMNS)] for name, row in table.items()]
    counts = ", ".join(f"{column} {count}" for column, count in passing.items())
    parts = [
        _INTRODUCTION,
        f"Of {len(table)} families pass: {counts}.\n",
        "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n",
        "Modules of the zoo that are not here:\n",
        "\n".join(f"- {name}: {why}." for name, why in MISSING.items()) + "\n",
    ]
    return "\n".join(parts)


def main() -> int:
    """Run every family and write the table; 1 where one computes something wrong, which the table never says."""
    mx.disable_compile()
    table = {}
    failures = 0
    for name in FAMILIES:
        try:
            with small_classes():
                table[name] = cells(load(name))
        except Exception as error:
            failures += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            print(name, *table[name].values(), sep=" | ", flush=True)
    if not failures:
        PATH.write_text(render(table), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
