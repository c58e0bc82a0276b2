"""Owns acceptance: how much of a verified window a row keeps, and whether it ends there. Pure.

A window is the row's pending token and the proposals behind it, and each of its positions has a sample: what the target
itself draws there. A proposal is accepted where it equals that sample, so the tokens are the target's own whatever is
proposed. The first sample that differs is the correction, and where none does the last one is a bonus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a row makes of its window.

    Attributes:
        emitted: samples to deliver, at least one. It is also how many tokens of the window stay in the state: the
            pending token and all delivered ones but the last, which no forward has read yet.
        accepted: proposals among the delivered samples.
        ended: the last delivered sample ends the row.
    """

    emitted: int
    accepted: int
    ended: bool


def accept(proposals: Sequence[int], samples: Sequence[int], ends: Callable[[int], bool]) -> Accepted:
    """Walk a window to the first mismatch, or to the row's end.

    Args:
        proposals: n tokens, perhaps none.
        samples: at least n + 1 tokens; what is drawn behind them belongs to padding.
        ends: whether the row ends with sample i. Asked in order, once for each sample that is delivered.

    Raises:
        ValueError: a position has no sample.
    """
    if len(samples) <= len(proposals):
        raise ValueError(f"{len(proposals)} proposals need a sample more than that, not {len(samples)}")
    for i, sample in enumerate(samples):
        matches = i < len(proposals) and proposals[i] == sample
        ended = ends(i)
        if ended or not matches:
            return Accepted(i + 1, i + matches, ended)
    raise AssertionError("unreachable: behind the last proposal nothing matches")
