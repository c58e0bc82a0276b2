"""Owns showing one answer as it comes, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.cli.terminal import Terminal
from mlxbc.client import Client
from mlxbc.result import Result
from mlxbc.resume import Resumable
from mlxbc.stream import EventStream

_PATIENCE_S = 5.0
"""How long a daemon that has gone may take to listen again. A service manager needs no more; nobody else starts it."""


def start(connect: Callable[[], Client], terminal: Terminal, **fields: Any) -> Resumable:
    """Begin a generation that goes on where it was if the daemon is started anew meanwhile."""

    def lost() -> None:
        terminal.note("mlxbc: the daemon has gone; waiting for it to come back")

    return Resumable(connect, lost=lost, patience=_PATIENCE_S, **fields)


def follow(stream: EventStream, terminal: Terminal, *, streaming: bool = True) -> Result:
    """Stay with a generation until it ends, writing its text as it comes; without `streaming`, show progress only.

    The first Ctrl-C ends the answer where it is, the second ends the program.

    Raises:
        MlxbcError: the generation failed; what came before has been shown.
    """
    try:
        with _cancelled_by_interrupt(stream):
            for event in stream:
                match event:
                    case wire.Token(channel="text") if streaming:
                        terminal.text(event.text)
                    case wire.Token(channel="reasoning") if streaming:
                        terminal.reasoning(event.text)
                    case wire.Accepted():
                        terminal.queued(event)
                    case wire.Progress():
                        terminal.progress(event)
        return stream.result
    finally:
        terminal.end_text()


@contextmanager
def _cancelled_by_interrupt(stream: EventStream) -> Iterator[None]:
    """Turn the first Ctrl-C into a cancellation; the second exits at once, with the code of an interrupt.

    Where interrupts are ignored (`nohup`, a background job of a script), they stay so.
    """
    pressed = 0

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed == 1:
            stream.cancel()
        else:
            # Everything shown has been flushed, and an output that blocks must not keep the program alive.
            os._exit(exits.INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ending(result: Result) -> int:
    """The exit code for how an answer ended. That its time was up is said, since what there is may look whole."""
    if result.reason == "deadline":
        count = result.usage.generated
        exits.explain(f"the deadline passed after {count} token{'s' * (count != 1)}; -o deadline_ms N allows more time")
        return exits.TIMEOUT
    return exits.INTERRUPTED if result.reason == "cancelled" else exits.OK


def stats(result: Result) -> str:
    """One line about where the tokens and the time went."""
    usage, times = result.usage, result.timings
    cached = f" ({usage.cached} cached)" if usage.cached else ""
    parts = [
        result.model,
        f"{usage.prompt} prompt tokens{cached}",
        f"{usage.generated} generated",
        f"first token after {_time(times.first_token)}",
    ]
    waits = (
        ("queue", times.queue),
        ("load", times.load),
        ("prefill", times.prefill),
        ("decode", times.decode),
    )
    parts += [f"{name} {_time(spent)}" for name, spent in waits if spent]
    if usage.drafted:
        per_forward = (usage.generated - 1) / max(usage.forwards, 1)
        parts.append(f"{usage.accepted} of {usage.drafted} guesses right, {per_forward:.1f} tokens per forward")
    if usage.generated > 1 and times.decode:
        # The first token belongs to the prefill: decoding made the others.
        parts.append(f"{1000 * (usage.generated - 1) / times.decode:.1f} tokens/s")
    return ", ".join(parts)


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"
