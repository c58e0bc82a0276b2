"""Laws of scheduling, on made-up machines with a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.scheduler import MOST_TOGETHER, Iteration, Piece, Policy, Running, State, Waiting, _class, decide
from mlxbcd.plan.request import Priority

steady = settings(derandomize=True, deadline=None)
SECONDS = st.floats(0.0, 100.0)


CLIENTS = ("editor", "agent", "shell")


@st.composite
def waiting_rows(draw: st.DrawFn) -> tuple[Waiting, ...]:
    rows = []
    for key in range(draw(st.integers(0, 12))):
        total = draw(st.integers(1, 3000))
        position = draw(st.integers(0, total - 1))
        started = position > 0 or draw(st.booleans())
        rows.append(
            Waiting(
                key,
                position,
                total,
                draw(SECONDS),
                started,
                draw(st.sampled_from(Priority)),
                draw(st.sampled_from(CLIENTS)),
                draw(st.integers(1, 3)),
                draw(st.integers(0, 1000)),
                tuple(sorted(draw(st.sets(st.integers(1, total), max_size=3)))),
            )
        )
    return tuple(rows)


running_rows = st.lists(
    st.builds(Running, st.sampled_from(Priority), st.sampled_from(CLIENTS), st.integers(1, 3), st.integers(0, 1000)),
    max_size=8,
).map(tuple)
services = st.dictionaries(st.sampled_from(CLIENTS), SECONDS)


@st.composite
def measured_costs(draw: st.DrawFn) -> Costs:
    costs = Costs()
    for _ in range(draw(st.integers(0, 4))):
        costs.saw_step(draw(st.integers(1, 32)), draw(st.floats(1e-4, 2.0)))
    for _ in range(draw(st.integers(0, 6))):
        costs.saw_piece(draw(st.integers(1, 512)), draw(st.integers(0, 3000)), draw(st.floats(1e-4, 5.0)))
    return costs


some_cohorts = st.none() | st.builds(
    Cohorts.restored, st.dictionaries(st.sampled_from(["8", "64", "512"]), st.floats(0.1, 3.0))
)

policies = st.builds(
    Policy,
    max_rows=st.integers(1, 32),
    planned_chunk=st.integers(1, 600),
    decode_gap_s=st.none() | st.floats(0.0, 1.0),
    bytes_limit=st.none() | st.integers(1, 5000),
    background=st.booleans(),
)


def may_run(row: Waiting | Running, policy: Policy) -> bool:
    """Whether the machine's power has nothing against it."""
    return policy.background or row.priority is not Priority.BACKGROUND


@steady
@given(waiting_rows(), running_rows, SECONDS, services, st.integers(0, 9), measured_costs(), policies, some_cohorts)
def test_each_decision_keeps_the_rules(
    rows: tuple[Waiting, ...],
    running: tuple[Running, ...],
    now: float,
    served: dict[str, float],
    pieces: int,
    costs: Costs,
    policy: Policy,
    cohorts: Cohorts | None,
) -> None:
    iteration = decide(State(rows, running, now, now - 0.5, served, pieces), costs, policy, cohorts)
    active = [*running, *(row for row in rows if row.started)]
    assert not iteration.decode or running
    if running and not iteration.decode:
        assert iteration.piece is not None or not policy.background
        assert all(row.priority is Priority.BACKGROUND for row in running)
    if iteration.piece is None:
        # Never idle while something could be done: what has begun may not go on, and what waits may not, or lacks room.
        assert not any(row.started and may_run(row, policy) for row in rows)
        assert all(active or not may_run(row, policy) for row in rows)
        if iteration.empty:
            assert not any(may_run(row, policy) for row in (*rows, *running)), "nobody waits for who rests"
        return
    of = {row.key: row for row in rows}
    chosen = [of[piece.key] for piece in iteration.pieces]
    assert len({row.key for row in chosen}) == len(chosen) <= MOST_TOGETHER
    for row in chosen:
        if not row.started and active:
            assert sum(other.rows for other in active) + row.rows <= policy.max_rows
            assert policy.bytes_limit is None or sum(other.bytes for other in active) + row.bytes <= policy.bytes_limit
        if not row.started:
            active.append(row)
        assert row.started or may_run(row, policy)
    for piece, row in zip(iteration.pieces, chosen, strict=True):
        end = row.position + piece.width
        ends = {*range(policy.planned_chunk, row.total, policy.planned_chunk), *row.ends, row.total}
        next_planned_end = min(planned for planned in ends if planned > row.position)
        assert piece.width >= 1
        assert end <= next_planned_end
        assert piece.ends == (end == next_planned_end)
    if iteration.beside:
        assert all(piece.ends for piece in iteration.pieces)
        assert {_class(row, now, policy) <= _class(chosen[0], now, policy) for row in chosen} == {True}
        together = [(piece.width, row.position) for piece, row in zip(iteration.pieces, chosen, strict=True)]
        apart = sum(costs.piece(*part) for part in together)
        assert cohorts is not None
        assert cohorts.expected(together, costs) <= 0.5 * (apart + costs.piece(*together[0]))


@steady
@given(waiting_rows(), measured_costs(), st.integers(0, 8), st.floats(0.01, 1.0))
def test_no_piece_is_planned_longer_than_allowed_once_costs_are_known(
    rows: tuple[Waiting, ...], costs: Costs, running: int, longest: float
) -> None:
    if not costs.widest:
        return
    piece = decide(State(rows, decoding(running), 100.0), costs, Policy(max_piece_s=longest)).piece
    if piece is not None:
        row = next(row for row in rows if row.key == piece.key)
        least = 1.5 * costs.piece(1, row.position)
        assert piece.width == 1 or costs.piece(piece.width, row.position) <= max(longest, least) + 1e-6


@steady
@given(waiting_rows(), measured_costs(), st.integers(1, 8), st.floats(0.0, 1.0))
def test_a_decode_gap_that_was_set_is_kept_once_costs_are_known(
    rows: tuple[Waiting, ...], costs: Costs, running: int, gap: float
) -> None:
    if not costs.widest:
        return
    piece = decide(State(rows, decoding(running), 100.0), costs, Policy(decode_gap_s=gap)).piece
    if piece is not None:
        row = next(row for row in rows if row.key == piece.key)
        least = 1.5 * costs.piece(1, row.position)
        room = max(gap - costs.step(running), least)
        assert piece.width == 1 or costs.piece(piece.width, row.position) <= room + 1e-6


def decoding(rows: int) -> tuple[Running, ...]:
    return tuple(Running() for _ in range(rows))


# -- whole runs


@dataclass
class Job:
    """A request on the made-up machine."""

    arrives: float
    prompt: int
    generate: int
    priority: Priority = Priority.NORMAL
    client: str = ""
    started: bool = False
    position: int = 0
    drawn: int = 0
    first: float | None = None
    over: bool = False


STEP_S = 0.02
ROW_S = 0.004
TOKEN_S = 0.001


class Machine:
    """Carries out what is decided, at known costs, and keeps the time and the accounts as the engine does."""

    def __init__(self, jobs: list[Job], policy: Policy, *, together: bool = True) -> None:
        self.jobs = jobs
        self.cohorts = Cohorts() if together else None
        self.policy = policy
        self.costs = Costs()
        self.now = 0.0
        self.stepped = 0.0
        self.pieces = 0
        self.served: dict[str, float] = dict.fromkeys((job.client for job in jobs), 0.0)
        self.rows_at_once: list[int] = []
        self.gaps: list[tuple[float, float]] = []
        self.ends: dict[int, list[int]] = {key: [] for key in range(len(jobs))}
        self.log: list[Iteration] = []

    def run(self, until: float = float("inf")) -> None:
        while not all(job.over for job in self.jobs) and self.now < until:
            state = self.state()
            iteration = decide(state, self.costs, self.policy, self.cohorts)
            self.log.append(iteration)
            if iteration.empty:
                self.now = min(job.arrives for job in self.jobs if job.arrives > self.now)
                continue
            for piece in iteration.pieces:
                self.jobs[piece.key].started = True
            self.rows_at_once.append(sum(job.started and not job.over for job in self.jobs))
            began = self.now
            if iteration.decode:
                self.decode()
            if iteration.pieces:
                self.prefill(iteration.pieces)
            if any(row.priority is not Priority.BACKGROUND for row in state.running):
                self.gaps.append((began, self.now - began))

    def state(self) -> State:
        waiting = tuple(
            Waiting(key, job.position, job.prompt, job.arrives, job.started, job.priority, job.client)
            for key, job in enumerate(self.jobs)
            if job.arrives <= self.now and job.first is None
        )
        running = tuple(Running(job.priority, job.client) for job in self.decoding())
        return State(waiting, running, self.now, self.stepped, self.served, self.pieces)

    def decoding(self) -> list[Job]:
        return [job for job in self.jobs if job.first is not None and not job.over]

    def decode(self) -> None:
        rows = self.decoding()
        seconds = STEP_S + ROW_S * len(rows)
        self.now += seconds
        self.stepped = self.now
        self.costs.saw_step(len(rows), seconds)
        for job in rows:
            self.served[job.client] += seconds / len(rows)
            job.drawn += 1
            job.over = job.drawn >= job.generate

    def prefill(self, pieces: Sequence[Piece]) -> None:
        jobs = [self.jobs[piece.key] for piece in pieces]
        parts = [(piece.width, job.position) for piece, job in zip(pieces, jobs, strict=True)]
        seconds = STEP_S + sum(width * (TOKEN_S + 2e-6 * context) for width, context in parts)
        self.now += seconds
        self.pieces += 1
        if self.cohorts is not None:
            self.cohorts.saw(parts, seconds, self.costs)
        if len(parts) == 1:
            self.costs.saw_piece(*parts[0], seconds)
        for piece, job in zip(pieces, jobs, strict=True):
            self.served[job.client] += seconds * piece.width / sum(width for width, _ in parts)
            job.position += piece.width
            if piece.ends:
                self.ends[piece.key].append(job.position)
            if job.position == job.prompt:
                job.first, job.drawn = self.now, 1
                job.over = job.drawn >= job.generate


jobs = st.lists(
    st.builds(
        Job,
        arrives=st.floats(0.0, 20.0),
        prompt=st.integers(1, 900),
        generate=st.integers(1, 60),
        priority=st.sampled_from(Priority),
        client=st.sampled_from(CLIENTS),
    ),
    min_size=1,
    max_size=12,
)


@settings(steady, max_examples=40)
@given(jobs, st.integers(1, 6))
def test_every_request_is_served_within_the_allowed_rows(work: list[Job], max_rows: int) -> None:
    machine = Machine([replace(job) for job in work], Policy(max_rows=max_rows, planned_chunk=128))
    machine.run()
    assert all(job.position == job.prompt and job.drawn >= job.generate for job in machine.jobs)
    assert max(machine.rows_at_once) <= max_rows


@settings(steady, max_examples=40)
@given(jobs, st.integers(1, 6))
def test_planned_ends_depend_on_the_prompt_alone(work: list[Job], max_rows: int) -> None:
    machine = Machine([replace(job) for job in work], Policy(max_rows=max_rows, planned_chunk=128))
    machine.run()
    for key, job in enumerate(machine.jobs):
        assert machine.ends[key] == [*range(128, job.prompt, 128), job.prompt]


@settings(steady, max_examples=40)
@given(jobs)
def test_rows_that_run_alone_run_one_after_the_other_from_prefill_to_end(work: list[Job]) -> None:
    machine = Machine([replace(job) for job in work], Policy(max_rows=1))
    machine.run()
    assert max(machine.rows_at_once) == 1
    assert not any(iteration.decode and iteration.piece for iteration in machine.log)


@settings(steady, max_examples=12)
@given(st.integers(500, 900), st.floats(0.05, 0.4), st.sampled_from(Priority))
def test_a_stream_of_short_prompts_delays_a_long_one_no_further_than_the_starving_bound(
    long_prompt: int, every: float, priority: Priority
) -> None:
    policy = Policy(max_rows=8, starving_s=3.0, aging_s=1.0)
    shorts = [Job(i * every, 40, 2, Priority.INTERACTIVE, "editor") for i in range(int(60 / every))]
    machine = Machine([Job(0.0, long_prompt, 2, priority, "agent"), *shorts], policy)
    machine.run()
    first = machine.jobs[0].first
    assert first is not None
    # One piece in four is its own from then on, of sixteen tokens or more, and no iteration takes longer than a gap.
    worst = max((seconds for _, seconds in machine.gaps), default=policy.max_piece_s)
    assert first <= policy.starving_s + 4 * worst * (long_prompt / 16 + 1)


@settings(steady, max_examples=60)
@given(jobs, st.sampled_from([0.15, 0.3, 0.6]))
def test_the_gap_is_held_once_costs_are_known(work: list[Job], gap: float) -> None:
    warm = Job(arrives=0.0, prompt=600, generate=1)
    machine = Machine([warm, *(replace(job, arrives=job.arrives + 5.0) for job in work)], Policy(decode_gap_s=gap))
    machine.run()
    # Steps of more rows than were ever seen cost more than the nearest figure says, by so much.
    unknown = ROW_S * len(work)
    for began, seconds in machine.gaps:
        # Where the gap leaves no room for a token, what comes along costs at most half of one more.
        assert began < 5.0 or seconds <= max(1.05 * gap, STEP_S + 1.5 * (STEP_S + TOKEN_S * 3)) + unknown


@settings(steady, max_examples=10)
@given(st.integers(1, 40), st.integers(50, 400), st.integers(1, 30), st.integers(0, 3))
def test_equal_clients_get_equal_service_however_many_streams_one_has(
    streams: int, prompt: int, generate: int, skew: int
) -> None:
    """Both always have work: one as single requests in a row of two, the other with any number at once."""
    agent = [Job(0.01 * i, prompt, generate, client="agent") for i in range(max(streams, 10) * 4)]
    editor = [Job(0.01 * i, prompt + skew, generate, client="editor") for i in range(80)]
    machine = Machine([*agent, *editor], Policy(max_rows=16, starving_s=1e9, aging_s=1e9, client_lead_s=0.2))
    horizon = 0.0
    while horizon < 60.0 and all(any(job.first is None for job in side) for side in (agent, editor)):
        horizon += 0.1
        machine.run(until=horizon)
    shares = machine.served["agent"], machine.served["editor"]
    if min(shares) > 10 * machine.policy.client_lead_s:
        assert abs(shares[0] - shares[1]) <= 0.1 * max(shares) + machine.policy.client_lead_s


@settings(steady, max_examples=30)
@given(st.integers(1, 24), st.integers(200, 3000), st.floats(0.5, 20.0))
def test_a_keystroke_waits_for_one_piece_whatever_the_background_has_running(
    streams: int, prompt: int, arrives: float
) -> None:
    back = [Job(0.0, prompt, 400, Priority.BACKGROUND, "agent") for _ in range(streams)]
    shared = Job(arrives, 200, 1, Priority.INTERACTIVE, "editor")
    warm = Job(0.0, 512, 1)
    idle = Machine([warm, replace(shared, arrives=10.0)], Policy())
    idle.run()
    busy = Machine([replace(warm), *back, shared], Policy())
    busy.run()
    took = [job.first - job.arrives for job in (idle.jobs[1], busy.jobs[-1]) if job.first is not None]
    piece, step = busy.policy.max_piece_s, STEP_S + ROW_S * streams
    # The iteration that runs when it arrives, and at most one step for each second that its own prompt takes.
    assert took[1] <= took[0] + piece + STEP_S + step * (2 + int(took[0] / busy.policy.background_gap_s))


@settings(steady, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=10), st.integers(0, 3))
def test_short_prompts_that_come_at_once_wait_no_longer_together(prompts: list[int], running: int) -> None:
    """And rarely as long: what is saved is a forward for each that comes along."""
    warm = [Job(0.0, 512, 2), *(Job(0.0, 8, 10_000) for _ in range(running))]
    at_once = [Job(10.0, prompt, 1) for prompt in prompts]
    waited = []
    for together in (True, False):
        machine = Machine([replace(job) for job in (*warm, *at_once)], Policy(), together=together)
        machine.run(until=60.0)
        firsts = [job.first for job in machine.jobs[len(warm) :]]
        waited.append(sum(first - 10.0 for first in firsts if first is not None))
        assert None not in firsts
        assert any(iteration.beside for iteration in machine.log) == together or max(prompts) > 8
    assert waited[0] <= waited[1] + STEP_S
