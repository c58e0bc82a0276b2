"""Owns figures and tables for people: sizes, durations, names of models, aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from mlxbc import wire


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; every line ends with a newline and without padding."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n"
        for row in (header, *rows)
    )


def size(count: int) -> str:
    """A number of bytes in powers of 1000, as disks and models are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    """A span of time in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def titled(process: wire.Process) -> str:
    """A resident model's name, with that of the one which drafts for it."""
    return f"{process.model} + {process.draft}" if process.draft else process.model
