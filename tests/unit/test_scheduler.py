"""What the next iteration does, case by case; the general laws are in the property tests."""

from __future__ import annotations

from mlxbcd.engine.costs import Costs
from mlxbcd.engine.scheduler import Iteration, Piece, Policy, State, Waiting, decide


def waits(key: str, total: int, *, position: int = 0, since: float = 0.0, started: bool = False) -> Waiting:
    return Waiting(key, position, total, since, started or position > 0)


def next_piece(*rows: Waiting, running: int = 0, now: float = 1.0, policy: Policy | None = None) -> Piece | None:
    return decide(State(rows, running, now), Costs(), policy or Policy()).piece


def chosen(*rows: Waiting, running: int = 0, now: float = 1.0, policy: Policy | None = None) -> object:
    piece = next_piece(*rows, running=running, now=now, policy=policy)
    return None if piece is None else piece.key


def test_with_nothing_to_do_the_iteration_is_empty() -> None:
    iteration = decide(State((), 0, 0.0), Costs(), Policy())
    assert iteration == Iteration(decode=False, piece=None)
    assert iteration.empty


def test_running_rows_decode_in_every_iteration() -> None:
    assert decide(State((waits("a", 100),), 3, 1.0), Costs(), Policy()).decode


def test_the_prompt_with_least_left_goes_first() -> None:
    assert chosen(waits("long", 900), waits("short", 60), waits("middle", 300)) == "short"
    assert chosen(waits("nearly done", 900, position=880), waits("short", 60)) == "nearly done"


def test_equal_prompts_go_in_order_of_arrival() -> None:
    assert chosen(waits("second", 60, since=2.0), waits("first", 60, since=1.0), now=3.0) == "first"


def test_a_row_that_starves_goes_first_whatever_its_length() -> None:
    rows = (waits("long", 9000, since=0.0), waits("short", 10, since=50.0))
    assert chosen(*rows, now=29.0) == "short"
    assert chosen(*rows, now=31.0) == "long"


def test_no_row_starts_without_room() -> None:
    policy = Policy(max_rows=4)
    assert chosen(waits("new", 10), running=3, policy=policy) == "new"
    assert chosen(waits("new", 10), running=4, policy=policy) is None
    started = waits("started", 500, position=20)
    assert chosen(started, waits("new", 10), running=3, policy=policy) == "started"


def test_a_piece_ends_with_its_prompt_or_at_a_planned_end() -> None:
    policy = Policy(planned_chunk=100)
    assert next_piece(waits("a", 20), policy=policy) == Piece("a", 20, ends=True)
    assert next_piece(waits("a", 500, position=90), policy=policy) == Piece("a", 10, ends=True)
    assert next_piece(waits("a", 500, position=100), policy=policy) == Piece("a", 32, ends=False)


def test_a_gap_that_was_set_overrides_the_measured_one() -> None:
    costs = Costs()
    costs.saw_step(2, 0.01)
    costs.saw_piece(64, 0, 0.01 + 64 * 0.001)

    def width(gap_s: float | None) -> int:
        state = State((waits("a", 500),), 2, 1.0)
        piece = decide(state, costs, Policy(decode_gap_s=gap_s)).piece
        assert piece is not None
        return piece.width

    assert width(0.0) == 1
    assert width(0.03) < width(None) <= width(0.2)
