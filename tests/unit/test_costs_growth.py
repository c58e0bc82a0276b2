"""A long prompt that joins is not held to the width of the short prompts before it."""

from __future__ import annotations

import pytest

from mlxbcd.engine.costs import Costs
from mlxbcd.engine.scheduler import Policy, Running, State, Waiting, decide

ROWS = 4
STEP_S = 0.05


def piece_s(width: int) -> float:
    """Seconds on a machine where a few tokens cost no more than one, and many cost little each."""
    return max(STEP_S, 0.04 + 0.003 * width)


def join(costs: Costs, prompt: int) -> list[int]:
    """Prefill a prompt beside running rows as the scheduler decides; the widths it took."""
    position, widths = 0, []
    while position < prompt:
        waiting = (Waiting("long", position, prompt, 0.0, started=True),)
        piece = decide(State(waiting, (Running(rows=ROWS),), 0.0), costs, Policy()).piece
        assert piece is not None
        costs.saw_step(ROWS, STEP_S)
        costs.saw_piece(piece.width, position, piece_s(piece.width))
        widths.append(piece.width)
        position += piece.width
    return widths


@pytest.mark.parametrize("first", [4, 6])
def test_widths_grow_to_a_good_rate_whatever_was_tried_first(first: int) -> None:
    costs = Costs()
    costs.saw_step(ROWS, STEP_S)
    costs.saw_piece(first, 0, piece_s(first))
    widths = join(costs, 2000)
    rate = 2000 / sum(piece_s(width) for width in widths)
    best = max(width / piece_s(width) for width in (16, 32))
    assert rate > 0.6 * best
