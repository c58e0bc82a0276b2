"""Owns the exactness rule: when tokens count as equal to a reference's, and how often they may part at a near tie.

Given equal logits, tokens are equal. Logits are equal only up to the device's arithmetic, so a token may differ from
the reference's where the reference itself was all but undecided: where both tokens' scores, after processors and noise,
lie within `MARGIN` of the best. From there on the reference follows our tokens (teacher forcing) and judges each next
one by itself. Such positions are counted, and may be at most `SHARE` of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

MARGIN: Final = 1e-3
"""A gap between two scores below this is a near tie."""
SHARE: Final = 0.005
"""Most of all compared positions that may be near ties with another outcome."""

Scores: TypeAlias = Callable[[], npt.NDArray[np.float64]]
"""The reference's scores along our tokens, [n, V]: row i has the first i of them as history. Asked only when needed."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """A position where the tokens parted, and by how much the losing one missed the best score."""

    name: str
    index: int
    ours: int
    reference: int
    gap: float

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]: {self.ours} for {self.reference}, {self.gap:.1e} apart"


@dataclass(slots=True)
class Tally:
    """Comparisons made so far.

    Attributes:
        positions: tokens compared.
        near_ties: the exempted ones.
    """

    positions: int = 0
    near_ties: list[NearTie] = field(default_factory=list)

    def __str__(self) -> str:
        share = 100 * len(self.near_ties) / max(self.positions, 1)
        head = f"{len(self.near_ties)} of {self.positions} positions exempted as near ties ({share:.2f} %)"
        return "\n  ".join([head, *map(str, self.near_ties)])

    def add(self, other: Tally) -> None:
        """Take in another tally's comparisons."""
        self.positions += other.positions
        self.near_ties += other.near_ties

    def compare(self, name: str, ours: Sequence[int], reference: Sequence[int], scores: Scores) -> None:
        """Compare our tokens with those that the reference drew by itself.

        Raises:
            AssertionError: they differ where the reference was decided.
        """
        pairs = zip(ours, reference, strict=False)
        first = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
        if first is None:
            assert len(ours) == len(reference), f"{name}: {len(ours)} tokens, the reference drew {len(reference)}"
            self.positions += len(ours)
            return
        along = scores()
        self.positions += first
        self._judge(name, first, ours[first], reference[first], along[first])
        for index in range(first + 1, len(ours)):
            self._judge(name, index, ours[index], int(np.argmax(along[index])), along[index])

    def compare_forced(self, name: str, ours: Sequence[int], scores: Scores) -> None:
        """Compare our tokens with what the reference would draw next after each prefix of them.

        Raises:
            AssertionError: they differ where the reference was decided.
        """
        along = scores()
        for index, token in enumerate(ours):
            self._judge(name, index, token, int(np.argmax(along[index])), along[index])

    def check(self) -> None:
        """Raises:
        AssertionError: more positions were exempted than may be, or nothing was compared.
        """
        assert self.positions, "nothing was compared"
        assert len(self.near_ties) <= SHARE * self.positions, f"too many exemptions: {self}"

    def _judge(self, name: str, index: int, ours: int, reference: int, scores: npt.NDArray[np.float64]) -> None:
        self.positions += 1
        if ours == reference:
            return
        # Where the tokens first part, the reference's own comes from another forward than these scores.
        tie = NearTie(name, index, ours, reference, float(scores.max() - min(scores[ours], scores[reference])))
        assert tie.gap < MARGIN, f"not a near tie: {tie}"
        self.near_ties.append(tie)
