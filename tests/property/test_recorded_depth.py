"""Adaptive depth on traces of acceptance that were recorded from a real model, answer after answer.

`tests/bench/acceptance.py` recorded them: six answers, three kinds of text, of SmolLM2 with its own first layers as
draft models and with prompt lookup.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
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
        return self._run(drafter, lambda row, room: (min(depth, room), False), lambda row, drafted, right: None)

    def adaptive(
        self,
        drafter: str,
        told: Callable[[int, int, int], None] = lambda row, drawn, depth: None,
        *,
        shadows: bool = True,
    ) -> float:
        """The same at the depth that adapts.

        Args:
            told: of each round: the row, how many tokens it had drawn, and the depth; 0 for plain steps and probes.
            shadows: plain steps can be shadowed.
        """
        costs, token_s = self._costs()
        depth = Depth(MOST, costs, lasting_priors(), lambda rows, depth: depth * token_s)
        drawn: Counter[int] = Counter()

        def chosen(row: int, room: int) -> tuple[int, bool]:
            if not drawn[row]:
                depth.renew()
            drafted = depth.next(room, [row], shadows=shadows)
            told(row, drawn[row], 0 if depth.probing else drafted)
            return drafted, depth.shadowing

        def saw(row: int, drafted: int, right: int) -> None:
            depth.saw(row, drafted, right)
            drawn[row] += 1 if depth.shadowing else right + 1

        return self._run(drafter, chosen, saw)

    def _costs(self) -> tuple[VerifyCosts, float]:
        costs = costs_of(CURVES[self.curve])
        return costs, self.share * costs.plain(1)

    def _run(
        self, drafter: str, chosen: Callable[[int, int], tuple[int, bool]], saw: Callable[[int, int, int], None]
    ) -> float:
        """Tokens per millisecond.

        Args:
            chosen: a row's next depth, given how many tokens it has room for; and whether its step is shadowed.
            saw: told of each step: the row, tokens drafted, and how many of them were right.
        """
        costs, token_s = self._costs()
        seconds = [costs.plain(1), *(costs.round(1, n + 1) + n * token_s for n in range(1, MOST + 1))]
        drawn, clock = 0, 0.0
        for row, trace in enumerate(traces(drafter)):
            at = 0
            while at < len(trace):
                drafted, shadowed = chosen(row, len(trace) - at - 1)
                clock += seconds[drafted]
                if shadowed:
                    clock += token_s + costs.idle(1)
                    saw(row, 1, min(1, trace[at]))
                    at += 1
                    continue
                right = min(drafted, trace[at])
                saw(row, drafted, right)
                at += right + 1
            drawn += at
        return drawn / clock


@cache
def adaptive(machine: Machine, drafter: str) -> float:
    return machine.adaptive(drafter)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("drafter", RECORDED)
def test_throughput_comes_within_five_percent_of_the_best_fixed_depth(drafter: str, curve: str, share: float) -> None:
    machine = Machine(curve, share)
    ours = adaptive(machine, drafter)
    fixed = {depth: machine.fixed(drafter, depth) for depth in range(MOST + 1)}
    best = max(fixed, key=fixed.__getitem__)
    print(f"{ours / fixed[best]:.3f} of depth {best}, which is {fixed[best] / fixed[0]:.2f} of plain")
    assert ours >= 0.95 * fixed[best], f"{ours / fixed[best]:.3f} of depth {best}"


def test_shadows_are_no_worse_than_rounds_that_probe() -> None:
    """On the whole; of one machine and drafter, where some answers happen to be probed at worse places, within two
    percent. Where a drafter takes most of a plain step it is hardly probed at all."""
    gains = {}
    for drafter, curve, share in itertools.product(RECORDED, CURVES, SHARES[:-1]):
        machine = Machine(curve, share)
        gains[drafter, curve, share] = adaptive(machine, drafter) / machine.adaptive(drafter, shadows=False)
    mean = math.exp(sum(map(math.log, gains.values())) / len(gains))
    print(f"{mean:.4f} on the whole, {min(gains.values()):.4f} to {max(gains.values()):.4f}")
    assert mean >= 1.0
    assert min(gains.values()) >= 0.98, min(gains, key=gains.__getitem__)
    assert sum(gain != 1.0 for gain in gains.values()) > len(gains) / 2, "they are used"


@pytest.mark.parametrize("curve", ["cpu, float32", "cpu, context of 1000", "gpu, 4 bits"])
def test_a_draft_model_that_is_seldom_right_is_given_up_within_32_tokens(curve: str) -> None:
    machine = Machine(curve, 0.1)
    assert max(range(MOST + 1), key=lambda depth: machine.fixed("20 layers", depth)) == 0, "it never pays there"
    first: list[tuple[int, int]] = []
    machine.adaptive("20 layers", lambda row, drawn, depth: None if row else first.append((drawn, depth)))
    assert first[0][1] > 0, "a drafter that nobody knows is tried"
    assert not [drawn for drawn, depth in first if depth and drawn >= 32]
