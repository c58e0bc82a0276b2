"""Owns a benchmark's rows: what a ratio means, what is aimed at, and how rows become a table and JSON. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a row should reach.

    Attributes:
        of: whether the figure itself or its ratio to the peer's is judged.
    """

    of: Literal["ours", "ratio"]
    sense: Literal[">=", "<="]
    limit: float

    def __str__(self) -> str:
        return f"{'ratio ' if self.of == 'ratio' else ''}{self.sense} {_figure(self.limit)}"

    def met(self, row: Row) -> bool | None:
        """Whether `row` reaches it; None where there is nothing to judge."""
        value = row.ours if self.of == "ours" else row.ratio
        if value is None:
            return None
        return value >= self.limit if self.sense == ">=" else value <= self.limit


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours beside the peer's.

    Attributes:
        name: `bench/what`.
        peer: None where nothing comparable exists.
        ratio: how many times better ours is, whatever the unit: above 1 is better.
        peer_version: name and version of the peer; None without one.
        target: what the row should reach, for the table alone.
        note: what a reader of the table should know.
    """

    name: str
    ours: float
    peer: float | None
    ratio: float | None
    unit: str
    peer_version: str | None
    target: Target | None = None
    note: str = ""


def compare(
    name: str,
    ours: float,
    peer: float | None,
    unit: str,
    better: Better,
    *,
    peer_version: str | None = None,
    target: Target | None = None,
    note: str = "",
) -> Row:
    """A row whose ratio follows from its figures and from which direction is better."""
    version = None if peer is None else peer_version
    return Row(name, ours, peer, _ratio(ours, peer, better), unit, version, target, note)


def _ratio(ours: float, peer: float | None, better: Better) -> float | None:
    """Above 1 where ours is better; None without a peer, or where a figure is no positive number."""
    if peer is None or not (0 < ours < math.inf and 0 < peer < math.inf):
        return None
    return ours / peer if better == "higher" else peer / ours


def to_json(rows: Iterable[Row]) -> str:
    """A JSON array of objects with the keys name, ours, peer, ratio, unit and peer_version."""
    objects: list[dict[str, Any]] = [
        {
            "name": row.name,
            "ours": _finite(row.ours),
            "peer": _finite(row.peer),
            "ratio": _finite(row.ratio),
            "unit": row.unit,
            "peer_version": row.peer_version,
        }
        for row in rows
    ]
    return json.dumps(objects, indent=2, allow_nan=False) + "\n"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


_HEADINGS = ("name", "ours", "peer", "ratio", "unit", "target", "", "note")
_RIGHT = frozenset({"ours", "peer", "ratio"})
_MARKS = {True: "met", False: "MISSED", None: ""}


def render(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table whose columns also line up in a terminal."""
    lines = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    rule = tuple(
        "-" * (width - 1) + ":" if heading in _RIGHT else "-" * width
        for heading, width in zip(_HEADINGS, widths, strict=True)
    )
    return "\n".join(_line(line, widths) for line in (lines[0], rule, *lines[1:]))


def _cells(row: Row) -> tuple[str, ...]:
    target = row.target
    return (
        row.name,
        _figure(row.ours),
        _figure(row.peer),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.unit,
        "" if target is None else str(target),
        "" if target is None else _MARKS[target.met(row)],
        row.note,
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
        for cell, width, heading in zip(cells, widths, _HEADINGS, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _figure(value: float | None) -> str:
    """About three significant digits, without an exponent."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
