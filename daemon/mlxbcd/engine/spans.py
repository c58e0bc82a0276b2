"""Owns what is traced of an iteration: its forwards, one after another."""

from __future__ import annotations

import time

from mlxbcd.engine.runner import Report
from mlxbcd.engine.scheduler import Iteration
from mlxbcd.trace import Tracer


def trace(tracer: Tracer, track: str, began: float, iteration: Iteration, report: Report) -> None:
    """Tell what an iteration did. Its forwards ended one after another, the last of them just now."""
    end = time.monotonic()
    rows = sum(rows for rows, _ in report.steps) + sum(one.rows for one in report.rounds)
    forwards = len(report.steps) + len(report.rounds)
    tracer.span("iteration", track, began, end, steps=forwards, rows=rows)
    key = ", ".join(str(piece.key) for piece in iteration.pieces)
    if (piece := report.piece) is not None:
        begin = end - piece.seconds
        tracer.span("prefill", track, begin, end, tokens=piece.width, context=piece.context, key=key)
        end = begin
    if (mixed := report.mixed) is not None and mixed.packed:
        begin, piece = end - mixed.seconds, mixed.piece
        more: dict[str, int] = {"rows": mixed.rows, "context": piece.context}
        tracer.span("mixed forward", track, begin, end, key=key, tokens=piece.width, **more)
        end = begin
    for one in reversed(report.rounds):
        facts = {"rows": one.rows, "width": one.width, "drafted": one.drafted, "accepted": one.accepted}
        tracer.span("round", track, end - one.seconds, end, **facts)
        end -= one.seconds
    for count, seconds in reversed(report.steps):
        tracer.span("decode step", track, end - seconds, end, rows=count)
        end -= seconds
