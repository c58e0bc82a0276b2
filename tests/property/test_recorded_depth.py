"""Adaptive depth on traces of acceptance that were recorded from a real model, answer after answer.

`tests/bench/acceptance.py` recorded them: six answers, three kinds of text, of SmolLM2 with its own first layers as
draft models and with prompt lookup.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from test_depth import CURVES, MOST, Trace, costs_of

from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth, lasting_priors

RECORDED: Final[dict[str, list[str]]] = json.loads((Path(__file__).parent / "acceptance.json").read_text())
SHARES: Final = (0.0, 0.1, 0.7)
"""What a drafted token takes, of a plain step: nothing, as a small model does, or as a large one."""


def traces(drafter: str) -> list[Trace]:
    """For each place of each answer how many proposals of a draft that starts there are right."""
    return [[ord(letter) - ord("a") for letter in text] for text in RECORDED[drafter]]


@dataclass(frozen=True)
class Machine:
    """A machine of which everything is known, and rows that run on it one after the other.

    Args:
        share: what a drafted token takes, of a plain step.
    """

    curve: str
    share: float

    def fixed(self, drafter: str, depth: int) -> float:
        """Tokens per millisecond over all answers, at one depth throughout."""
        return self._run(drafter, lambda row, room: min(depth, room), lambda row, drafted, right: None)

    def adaptive(self, drafter: str, told: Callable[[int, int, int], None] = lambda row, drawn, depth: None) -> float:
        """The same at the depth that adapts.

        Args:
            told: of each round: the row, how many tokens it had drawn, and the depth; 0 for plain steps and probes.
        """
        costs, token_s = self._costs()
        depth = Depth(MOST, costs, lasting_priors(), lambda rows, depth: depth * token_s)
        drawn: Counter[int] = Counter()

        def chosen(row: int, room: int) -> int:
            if not drawn[row]:
                depth.renew()
            drafted = depth.next(room, [row])
            told(row, drawn[row], 0 if depth.probing else drafted)
            return drafted

        def saw(row: int, drafted: int, right: int) -> None:
            depth.saw(row, drafted, right)
            drawn[row] += right + 1

        return self._run(drafter, chosen, saw)

    def _costs(self) -> tuple[VerifyCosts, float]:
        costs = costs_of(CURVES[self.curve])
        return costs, self.share * costs.plain(1)

    def _run(self, drafter: str, chosen: Callable[[int, int], int], saw: Callable[[int, int, int], None]) -> float:
        costs, token_s = self._costs()
        seconds = [costs.plain(1), *(costs.round(1, n + 1) + n * token_s for n in range(1, MOST + 1))]
        drawn, clock = 0, 0.0
        for row, trace in enumerate(traces(drafter)):
            at = 0
            while at < len(trace):
                drafted = chosen(row, len(trace) - at - 1)
                right = min(drafted, trace[at])
                clock += seconds[drafted]
                saw(row, drafted, right)
                at += right + 1
            drawn += at
        return drawn / clock


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("drafter", RECORDED)
def test_throughput_comes_within_five_percent_of_the_best_fixed_depth(drafter: str, curve: str, share: float) -> None:
    machine = Machine(curve, share)
    ours = machine.adaptive(drafter)
    fixed = {depth: machine.fixed(drafter, depth) for depth in range(MOST + 1)}
    best = max(fixed, key=fixed.__getitem__)
    print(f"{ours / fixed[best]:.3f} of depth {best}, which is {fixed[best] / fixed[0]:.2f} of plain")
    assert ours >= 0.95 * fixed[best], f"{ours / fixed[best]:.3f} of depth {best}"


@pytest.mark.parametrize("curve", ["cpu, float32", "cpu, context of 1000", "gpu, 4 bits"])
def test_a_draft_model_that_is_seldom_right_is_given_up_within_32_tokens(curve: str) -> None:
    machine = Machine(curve, 0.1)
    assert max(range(MOST + 1), key=lambda depth: machine.fixed("20 layers", depth)) == 0, "it never pays there"
    first: list[tuple[int, int]] = []
    machine.adaptive("20 layers", lambda row, drawn, depth: None if row else first.append((drawn, depth)))
    assert first[0][1] > 0, "a drafter that nobody knows is tried"
    assert not [drawn for drawn, depth in first if depth and drawn >= 32]
