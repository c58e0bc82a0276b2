"""Owns where a prompt's state is kept for prompts to come. Pure.

Where every prefix of a state is a state, all of the prompt is kept, and cut as needed: piece by piece as it is
processed, since copying out a long prompt at once would keep everybody waiting. Else the state is kept at chosen
lengths, which become planned ends of the prefill.
"""

from __future__ import annotations

from typing import Final

LEAST: Final = 256
"""Shorter states are made again sooner than they are found."""
INTERVAL: Final = 8192
"""Tokens between the lengths at which a long prompt's state is kept, whatever they mean."""
STRIDE: Final = 512
"""The same where that costs no more than the new tokens: planned ends, and multiples of a block."""


def boundaries(
    total: int, *, stable: int, shared: int = 0, matched: int = 0, reused: int = 0, trimmable: bool
) -> tuple[int, ...]:
    """Lengths, ascending, at which the state of a prompt of `total` tokens is kept while it is processed.

    Args:
        stable: tokens that the next turn repeats.
        shared: tokens that other chats begin with.
        matched: tokens that something stored begins with, so that a third prompt may part there too.
        reused: tokens that are restored, and need not be kept again.
        trimmable: every prefix of the state is a state.
    """
    if trimmable:
        return tuple(n for n in range(STRIDE, total, STRIDE) if n > reused)
    last = min(stable, total - 1)
    wanted = {last, shared, matched, *range(INTERVAL, last, INTERVAL)}
    return tuple(sorted(n for n in wanted if LEAST <= n <= last and n > reused))
