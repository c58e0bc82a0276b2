"""Owns the decision what the next iteration does: `decide(state, costs, policy)`, a pure function.

One iteration is at most one decode step of all running rows and one prefill piece, each a forward group. Whose prompt
goes on is chosen by class (a row ages into the next better one), then between clients (none may be far ahead of the
least served), then least remaining first, since batching compute-bound prompts only makes all of them wait for the
longest. A row that has waited past the starving bound gets every fourth piece, oldest first, whatever the others are.
Where a piece ends its row's prompt or planned chunk, rows of no worse class with little left may come along as a
*cohort*, in the order in which they would be chosen (`engine/cohorts.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import nsmallest
from itertools import pairwise
from typing import Final

from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs
from mlxbcd.plan.request import Priority, Request
from mlxbcd.state.geometry import Key

MOST_TOGETHER: Final = 16
"""Rows of a cohort."""

_STEPS_A_ROUND: Final = 3


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings a decision depends on.

    Attributes:
        max_rows: rows in preparation and decode together; 1 for a model whose rows run alone.
        reserved_rows: of these, kept free for interactive rows, where there are more than a few.
        planned_chunk: a prompt's planned ends are multiples of this, whoever shares the machine.
        max_piece_s: no piece is planned longer, so that a cancel is never further away; a single token may be. Nor is a
            forward that verifies proposals, however many tokens it brings: see `round_s`.
        decode_gap_s: None holds the measured default, see `Costs.gap_s`.
        floor_gap_s: the smallest default gap.
        background_gap_s: while an interactive prompt is prefilled, rows that are all background step this seldom.
        aging_s: waiting this long lets a row compete with those of the next better class.
        starving_s: a row that has waited this long for its first token gets one of `starving_share` pieces.
        client_lead_s: device time by which a client may be ahead of the least served one that waits in the same class.
        bytes_limit: bytes that the states of all rows may come to need; None is no limit.
        bytes_most: what that limit could become if all went that can be made again: what needs more is refused. None
            is `bytes_limit`.
        background: rows of the background class may use the machine, as its power says. If not, none starts, and those
            that have begun rest with their state until they may, or until a better row waits for a place they hold. A
            step that is made for others takes them along: the weights are read once for all its rows.
    """

    max_rows: int = 32
    reserved_rows: int = 2
    planned_chunk: int = 512
    max_piece_s: float = 0.25
    decode_gap_s: float | None = None
    floor_gap_s: float = 0.05
    background_gap_s: float = 1.0
    aging_s: float = 20.0
    starving_s: float = 60.0
    starving_share: int = 4
    client_lead_s: float = 1.0
    bytes_limit: int | None = None
    bytes_most: int | None = None
    background: bool = True

    def round_s(self, step_s: float) -> float:
        """How long a forward that verifies proposals may take, where a plain step of its rows takes `step_s`: more only
        for models so slow that there would be none."""
        return max(self.max_piece_s, _STEPS_A_ROUND * step_s)

    def row_limit(self, priority: Priority) -> int:
        """Rows there may be once a row of that class has started."""
        reserved = min(self.reserved_rows, self.max_rows // 8)
        return self.max_rows if priority is Priority.INTERACTIVE else self.max_rows - reserved

    @property
    def client_rows(self) -> int:
        """Rows one client may have, so that another's always find a place."""
        return max(1, self.max_rows - self.max_rows // 4)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A row whose prompt is not fully processed.

    Attributes:
        position: prompt tokens processed.
        total: prompt tokens in all.
        since: when it was submitted, in seconds of any clock.
        started: it has a state already and counts toward `max_rows`.
        priority: its own class, before aging.
        client: whose it is.
        rows: rows it becomes once it decodes: its candidates.
        bytes: that its rows' states may come to need.
        ends: positions that are planned ends besides the multiples of the planned chunk, ascending.
    """

    key: Key
    position: int
    total: int
    since: float
    started: bool
    priority: Priority = Priority.NORMAL
    client: str = ""
    rows: int = 1
    bytes: int = 0
    ends: tuple[int, ...] = ()

    @property
    def remaining(self) -> int:
        return self.total - self.position

    def planned_end(self, chunk: int) -> int:
        """The next position at which its state is settled, whoever shares the machine."""
        end = min((self.position // chunk + 1) * chunk, self.total)
        return next((boundary for boundary in self.ends if self.position < boundary < end), end)


@dataclass(frozen=True, slots=True)
class Running:
    """A request that decodes, or is about to: how many rows it has, and what they may come to need."""

    priority: Priority = Priority.NORMAL
    client: str = ""
    rows: int = 1
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What the scheduler sees.

    Attributes:
        waiting: rows to prefill, in order of arrival.
        running: requests in the decode group or about to join it.
        now: same clock as `Waiting.since`.
        stepped: when the last decode step was, same clock.
        served: device seconds that each client's rows have taken.
        pieces: prefill pieces so far.
    """

    waiting: tuple[Waiting, ...]
    running: tuple[Running, ...]
    now: float
    stepped: float = 0.0
    served: Mapping[str, float] = field(default_factory=dict)
    pieces: int = 0


class Phase(Enum):
    """What kind of forward a piece is."""

    CHUNK = "chunk"
    """A whole planned chunk."""
    TAIL = "tail"
    """Part of one."""
    DECODE = "decode"
    """One position."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A prefill forward: the next `width` prompt tokens of one row, up to a planned end or not.

    Attributes:
        begin: the position it was decided for; a row that turns out to be elsewhere does not run it.
    """

    key: Key
    width: int
    ends: bool
    phase: Phase = Phase.TAIL
    begin: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Iteration:
    """What to do next: forward groups in the order they run.

    Attributes:
        blocked: a row that can't start for want of this many bytes, once something else has let go of them.
        gap_s: how long the running rows should wait for this, at most.
        step_s: how long their forward may take, if it is more than a step.
        packed: the first forward of each runs as one, where both make one.
        beside: pieces of other rows, in one forward with `piece`.
    """

    decode: bool
    piece: Piece | None
    blocked: int = 0
    gap_s: float = field(default=math.inf, compare=False)
    step_s: float = field(default=math.inf, compare=False)
    packed: bool = False
    beside: tuple[Piece, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.decode and self.piece is None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (self.piece, *self.beside) if self.piece is not None else ()


def planned_chunks(request: Request, policy: Policy) -> list[int]:
    """Tokens between the planned ends of a request that runs from its first token."""
    total = len(request.prompt) + len(request.forced)
    ends = sorted({*range(policy.planned_chunk, total, policy.planned_chunk), *request.boundaries, total})
    return [end - begin for begin, end in pairwise([0, *ends])]


def decide(state: State, costs: Costs, policy: Policy, cohorts: Cohorts | None = None) -> Iteration:
    """The next iteration. Empty only when there is nothing to do, or nothing that may be done.

    Args:
        cohorts: None where pieces of several rows can't be one forward.
    """
    running = sum(row.rows for row in state.running)
    candidates, blocked, held_up = _candidates(state, policy)
    rest = not policy.background and not held_up
    if rest:
        candidates = [row for row in candidates if row.priority is not Priority.BACKGROUND]
    decode = any(not rest or row.priority is not Priority.BACKGROUND for row in state.running)
    if not candidates:
        return Iteration(decode, None, blocked, step_s=policy.round_s(costs.step(running)))
    row = _choose(candidates, state, policy)
    budget, gap = policy.max_piece_s, math.inf
    if decode:
        if all(other.priority is Priority.BACKGROUND for other in state.running):
            # Nobody watches these rows: they wait for a keystroke's prompt, though not for ever.
            urgent = row.priority is Priority.INTERACTIVE
            decode = not urgent or state.now - state.stepped >= policy.background_gap_s
        else:
            wanted = policy.decode_gap_s
            gap = costs.gap_s(running, row.position, policy.floor_gap_s) if wanted is None else wanted
            budget = min(budget, gap - costs.step(running))
    piece = _piece(row, costs.width(budget, row.position), policy)
    beside: list[Piece] = []
    seconds = costs.piece(piece.width, row.position)
    if cohorts is not None and piece.ends:
        beside = _companions(row, candidates, state, costs, policy, cohorts, budget)
        seconds = cohorts.expected([(each.width, each.begin or 0) for each in (piece, *beside)], costs)
    step = min(gap - seconds, policy.round_s(costs.step(running)))
    return Iteration(decode, piece, blocked, gap, step, beside=tuple(beside))


def _piece(row: Waiting, width: int, policy: Policy) -> Piece:
    """A row's next piece, of that many tokens or what is left up to a planned end."""
    left = row.planned_end(policy.planned_chunk) - row.position
    width = min(width, left)
    whole = width == left and row.position % policy.planned_chunk == 0
    phase = Phase.DECODE if width == 1 else Phase.CHUNK if whole else Phase.TAIL
    return Piece(row.key, width, width == left, phase, row.position)


def _companions(
    first: Waiting,
    candidates: Sequence[Waiting],
    state: State,
    costs: Costs,
    policy: Policy,
    cohorts: Cohorts,
    budget: float,
) -> list[Piece]:
    """The pieces that come along with a row's, each up to a planned end."""
    taken = _Taken([*state.running, *(row for row in state.waiting if row.started or row is first)])
    parts = [(first.planned_end(policy.planned_chunk) - first.position, first.position)]
    most = _class(first, state.now, policy)
    others = [row for row in candidates if row is not first and _class(row, state.now, policy) <= most]
    others = _fair(others, _least_served([first, *others], state), state, policy)
    left = nsmallest(MOST_TOGETHER - 1, others, key=lambda row: (row.remaining, row.since))
    beside: list[Piece] = []
    while left:
        row = _choose(left, state, policy)
        left.remove(row)
        part = (row.planned_end(policy.planned_chunk) - row.position, row.position)
        if not cohorts.takes(parts, part, costs, budget):
            continue
        if not row.started:
            if not taken.admits(row, policy) or taken.lacks(row, policy):
                continue
            taken.add(row)
        parts.append(part)
        beside.append(_piece(row, part[0], policy))
    return beside


class _Taken:
    """The places that some rows have."""

    def __init__(self, rows: Sequence[Running | Waiting]) -> None:
        self.none = True
        self._rows = self._bytes = 0
        self._of_client: Counter[str] = Counter()
        for row in rows:
            self.add(row)

    def add(self, row: Running | Waiting) -> None:
        """One more takes its places."""
        self.none = False
        self._rows += row.rows
        self._bytes += row.bytes
        self._of_client[row.client] += row.rows

    def admits(self, row: Waiting, policy: Policy) -> bool:
        """Whether there may be that many rows more, its bytes apart."""
        theirs = self._of_client[row.client]
        fits = self._rows + row.rows <= policy.row_limit(row.priority)
        return fits and (not theirs or theirs + row.rows <= policy.client_rows)

    def lacks(self, row: Waiting, policy: Policy) -> int:
        """Bytes that are missing for it."""
        return 0 if policy.bytes_limit is None else max(0, self._bytes + row.bytes - policy.bytes_limit)


def _candidates(state: State, policy: Policy) -> tuple[list[Waiting], int, bool]:
    """The rows that may be prefilled now; the bytes that the first new one is short of, may it run or not; and whether
    a row that may start is held up by background rows alone."""
    started = [row for row in state.waiting if row.started]
    active: list[Running | Waiting] = [*state.running, *started]
    taken = _Taken(active)
    by_others = _Taken([row for row in active if row.priority is not Priority.BACKGROUND])
    candidates: list[Waiting] = []
    short, held_up = 0, False
    for row in state.waiting:
        if row.started:
            candidates.append(row)
            continue
        if row.priority is Priority.BACKGROUND and not policy.background:
            continue
        fits, lacking = taken.admits(row, policy), taken.lacks(row, policy)
        if (fits and not lacking) or taken.none:
            candidates.append(row)
            short = short or lacking
            continue
        held_up = held_up or by_others.none or (by_others.admits(row, policy) and not by_others.lacks(row, policy))
        if fits and lacking and not short:
            short = lacking
        if state.now - row.since > policy.starving_s:
            # What the others leave must not go to yet others before it suffices for this one.
            return started, short, held_up
    return candidates, short, held_up


def _choose(candidates: Sequence[Waiting], state: State, policy: Policy) -> Waiting:
    starving = [row for row in candidates if state.now - row.since > policy.starving_s]
    if starving and state.pieces % policy.starving_share == 0:
        return min(starving, key=lambda row: row.since)
    best = min(row.priority for row in candidates)
    candidates = [row for row in candidates if _class(row, state.now, policy) <= best]
    fair = _fair(candidates, _least_served(candidates, state), state, policy)
    return min(fair, key=lambda row: (row.remaining, row.since))


def _least_served(rows: Sequence[Waiting], state: State) -> float:
    """Device time of the client that has had the least."""
    return min(state.served.get(row.client, 0.0) for row in rows)


def _fair(rows: Sequence[Waiting], least: float, state: State, policy: Policy) -> list[Waiting]:
    """The rows whose client is not too far ahead."""
    return [row for row in rows if state.served.get(row.client, 0.0) <= least + policy.client_lead_s]


def _class(row: Waiting, now: float, policy: Policy) -> int:
    """The class a row counts in now: its own, or a better one that it has waited long enough for."""
    return row.priority - int(max(0.0, now - row.since) / policy.aging_s)
