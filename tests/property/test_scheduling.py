"""Laws of scheduling, on made-up machines with a simulated clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.engine.costs import Costs
from mlxbcd.engine.scheduler import Iteration, Piece, Policy, State, Waiting, decide

steady = settings(derandomize=True, deadline=None)
SECONDS = st.floats(0.0, 100.0)


@st.composite
def waiting_rows(draw: st.DrawFn) -> tuple[Waiting, ...]:
    rows = []
    for key in range(draw(st.integers(0, 12))):
        total = draw(st.integers(1, 3000))
        position = draw(st.integers(0, total - 1))
        started = position > 0 or draw(st.booleans())
        rows.append(Waiting(key, position, total, draw(SECONDS), started))
    return tuple(rows)


@st.composite
def measured_costs(draw: st.DrawFn) -> Costs:
    costs = Costs()
    for _ in range(draw(st.integers(0, 4))):
        costs.saw_step(draw(st.integers(1, 32)), draw(st.floats(1e-4, 2.0)))
    for _ in range(draw(st.integers(0, 6))):
        costs.saw_piece(draw(st.integers(1, 512)), draw(st.integers(0, 3000)), draw(st.floats(1e-4, 5.0)))
    return costs


policies = st.builds(
    Policy,
    max_rows=st.integers(1, 16),
    planned_chunk=st.integers(1, 600),
    decode_gap_s=st.none() | st.floats(0.0, 1.0),
)


@steady
@given(waiting_rows(), st.integers(0, 16), SECONDS, measured_costs(), policies)
def test_each_decision_keeps_the_rules(
    rows: tuple[Waiting, ...], running: int, now: float, costs: Costs, policy: Policy
) -> None:
    started = sum(row.started for row in rows)
    iteration = decide(State(rows, running, now), costs, policy)
    assert iteration.decode == (running > 0)
    startable = any(row.started for row in rows) or (bool(rows) and running + started < policy.max_rows)
    assert (iteration.piece is not None) == startable, "never idle while something could be done"
    if iteration.piece is None:
        return
    piece, (row,) = iteration.piece, [row for row in rows if row.key == iteration.piece.key]
    assert row.started or running + started < policy.max_rows, "never more rows than allowed"
    end = row.position + piece.width
    next_planned_end = min((row.position // policy.planned_chunk + 1) * policy.planned_chunk, row.total)
    assert piece.width >= 1
    assert end <= next_planned_end
    assert piece.ends == (end == next_planned_end)


@steady
@given(waiting_rows(), measured_costs(), st.integers(0, 8), st.floats(0.01, 1.0))
def test_no_piece_is_planned_longer_than_allowed_once_costs_are_known(
    rows: tuple[Waiting, ...], costs: Costs, running: int, longest: float
) -> None:
    if not costs.widest:
        return
    piece = decide(State(rows, running, 100.0), costs, Policy(max_piece_s=longest)).piece
    if piece is not None:
        row = next(row for row in rows if row.key == piece.key)
        assert piece.width == 1 or costs.piece(piece.width, row.position) <= longest + 1e-6


@steady
@given(waiting_rows(), measured_costs(), st.integers(1, 8), st.floats(0.0, 1.0))
def test_a_decode_gap_that_was_set_is_kept_once_costs_are_known(
    rows: tuple[Waiting, ...], costs: Costs, running: int, gap: float
) -> None:
    if not costs.widest:
        return
    piece = decide(State(rows, running, 100.0), costs, Policy(decode_gap_s=gap)).piece
    if piece is not None:
        row = next(row for row in rows if row.key == piece.key)
        assert piece.width == 1 or costs.step(running) + costs.piece(piece.width, row.position) <= gap + 1e-6


# -- whole runs


@dataclass
class Job:
    """A request on the made-up machine."""

    arrives: float
    prompt: int
    generate: int
    started: bool = False
    position: int = 0
    drawn: int = 0
    first: float | None = None
    over: bool = False


class Machine:
    """Carries out what is decided, at known costs, and keeps the time."""

    def __init__(self, jobs: list[Job], policy: Policy) -> None:
        self.jobs = jobs
        self.policy = policy
        self.costs = Costs()
        self.now = 0.0
        self.rows_at_once: list[int] = []
        self.ends: dict[int, list[int]] = {key: [] for key in range(len(jobs))}
        self.log: list[Iteration] = []

    def run(self) -> None:
        while not all(job.over for job in self.jobs):
            state = self.state()
            iteration = decide(state, self.costs, self.policy)
            self.log.append(iteration)
            if iteration.empty:
                self.now = min(job.arrives for job in self.jobs if job.arrives > self.now)
                continue
            if iteration.piece is not None:
                self.jobs[iteration.piece.key].started = True  # type: ignore[call-overload]
            self.rows_at_once.append(sum(job.started and not job.over for job in self.jobs))
            if iteration.decode:
                self.decode(state.running)
            if iteration.piece is not None:
                self.prefill(iteration.piece)

    def state(self) -> State:
        waiting = tuple(
            Waiting(key, job.position, job.prompt, job.arrives, job.started)
            for key, job in enumerate(self.jobs)
            if job.arrives <= self.now and job.first is None
        )
        return State(waiting, sum(job.first is not None and not job.over for job in self.jobs), self.now)

    def decode(self, rows: int) -> None:
        seconds = 0.02 + 0.004 * rows
        self.now += seconds
        self.costs.saw_step(rows, seconds)
        for job in self.jobs:
            if job.first is not None and not job.over:
                job.drawn += 1
                job.over = job.drawn >= job.generate

    def prefill(self, piece: Piece) -> None:
        job = self.jobs[piece.key]  # type: ignore[call-overload]
        seconds = 0.02 + piece.width * (0.001 + 2e-6 * job.position)
        self.now += seconds
        self.costs.saw_piece(piece.width, job.position, seconds)
        job.position += piece.width
        if piece.ends:
            self.ends[piece.key].append(job.position)  # type: ignore[index]
        if job.position == job.prompt:
            job.first, job.drawn = self.now, 1
            job.over = job.drawn >= job.generate


jobs = st.lists(
    st.builds(Job, arrives=st.floats(0.0, 20.0), prompt=st.integers(1, 900), generate=st.integers(1, 60)),
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
@given(st.integers(500, 900), st.floats(0.05, 0.4))
def test_a_stream_of_short_prompts_delays_a_long_one_no_further_than_the_starving_bound(
    long_prompt: int, every: float
) -> None:
    policy = Policy(max_rows=8, starving_s=3.0)
    shorts = [Job(arrives=i * every, prompt=40, generate=2) for i in range(int(60 / every))]
    machine = Machine([Job(arrives=0.0, prompt=long_prompt, generate=2), *shorts], policy)
    machine.run()
    first = machine.jobs[0].first
    assert first is not None
    # From then on it goes first, so all that is left is its own prefill beside the rows that decode.
    assert first <= policy.starving_s + 10.0
