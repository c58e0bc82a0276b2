"""Owns the decision what the next iteration does: `decide(state, costs)`, a pure function.

One iteration is at most one decode step of all running rows and one prefill piece, each a forward group. Prompts are
prefilled one at a time, least remaining first, since batching compute-bound prompts only makes all of them wait for the
longest; a row that has waited too long goes first whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxbcd.engine.costs import Costs
from mlxbcd.state.geometry import Key


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings a decision depends on.

    Attributes:
        max_rows: rows in preparation and decode together; 1 for a model whose rows run alone.
        planned_chunk: a prompt's planned ends are multiples of this, whoever shares the machine.
        max_piece_s: no piece is planned longer, so that a cancel is never further away; a single token may be.
        decode_gap_s: None holds the measured default, see `Costs.gap_s`.
        floor_gap_s: the smallest default gap.
        starving_s: a row that has waited this long for its first token goes first.
    """

    max_rows: int = 32
    planned_chunk: int = 512
    max_piece_s: float = 0.25
    decode_gap_s: float | None = None
    floor_gap_s: float = 0.05
    starving_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A row whose prompt is not fully processed.

    Attributes:
        position: prompt tokens processed.
        total: prompt tokens in all.
        since: when it was submitted, in seconds of any clock.
        started: it has a state already and counts toward `max_rows`.
    """

    key: Key
    position: int
    total: int
    since: float
    started: bool


@dataclass(frozen=True, slots=True)
class State:
    """What the scheduler sees.

    Attributes:
        waiting: rows to prefill, in order of arrival.
        running: rows in the decode group or about to join it.
        now: same clock as `Waiting.since`.
    """

    waiting: tuple[Waiting, ...]
    running: int
    now: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A prefill forward: the next `width` prompt tokens of one row, up to a planned end or not."""

    key: Key
    width: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Iteration:
    """What to do next: forward groups in the order they run."""

    decode: bool
    piece: Piece | None

    @property
    def empty(self) -> bool:
        return not self.decode and self.piece is None


def decide(state: State, costs: Costs, policy: Policy) -> Iteration:
    """The next iteration. Empty only when there is nothing to do."""
    decode = state.running > 0
    row = _next_row(state, policy)
    if row is None:
        return Iteration(decode, None)
    budget = policy.max_piece_s
    if decode:
        gap = policy.decode_gap_s
        if gap is None:
            gap = costs.gap_s(state.running, row.position, policy.floor_gap_s)
        budget = min(budget, gap - costs.step(state.running))
    planned_end = min((row.position // policy.planned_chunk + 1) * policy.planned_chunk, row.total)
    left = planned_end - row.position
    width = min(costs.width(budget, row.position), left)
    return Iteration(decode, Piece(row.key, width, ends=width == left))


def _next_row(state: State, policy: Policy) -> Waiting | None:
    started = sum(row.started for row in state.waiting)
    room = policy.max_rows - state.running - started
    candidates = [row for row in state.waiting if row.started or room > 0]
    if not candidates:
        return None
    starving = [row for row in candidates if state.now - row.since > policy.starving_s]
    if starving:
        return min(starving, key=lambda row: row.since)
    return min(candidates, key=lambda row: (row.total - row.position, row.since))
