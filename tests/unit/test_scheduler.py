"""What the next iteration does, case by case; the general laws are in the property tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.scheduler import (
    MOST_TOGETHER,
    Iteration,
    Phase,
    Piece,
    Policy,
    Running,
    State,
    Waiting,
    decide,
    planned_chunks,
)
from mlxbcd.plan.request import Priority, Request

INTERACTIVE, NORMAL, BACKGROUND = Priority
GIB = 1 << 30


def waits(
    key: str, total: int, *, position: int = 0, since: float = 0.0, started: bool = False, **more: Any
) -> Waiting:
    return Waiting(key, position, total, since, started or position > 0, **more)


def decision(
    *rows: Waiting, running: int = 0, now: float = 1.0, policy: Policy | None = None, **state: Any
) -> Iteration:
    decoding = tuple(Running(client=f"other {number}") for number in range(running))
    return decide(State(rows, state.pop("decoding", decoding), now, **state), Costs(), policy or Policy())


def chosen(*rows: Waiting, **about: Any) -> object:
    piece = decision(*rows, **about).piece
    return None if piece is None else piece.key


def test_with_nothing_to_do_the_iteration_is_empty() -> None:
    iteration = decide(State((), (), 0.0), Costs(), Policy())
    assert iteration == Iteration(decode=False, piece=None)
    assert iteration.empty


def test_running_rows_decode_in_every_iteration() -> None:
    assert decision(waits("a", 100), running=3).decode


def test_the_prompt_with_least_left_goes_first() -> None:
    assert chosen(waits("long", 900), waits("short", 60), waits("middle", 300)) == "short"
    assert chosen(waits("nearly done", 900, position=880), waits("short", 60)) == "nearly done"


def test_equal_prompts_go_in_order_of_arrival() -> None:
    assert chosen(waits("second", 60, since=2.0), waits("first", 60, since=1.0), now=3.0) == "first"


def test_a_better_class_goes_first_whatever_the_lengths() -> None:
    rows = (
        waits("background", 10, priority=BACKGROUND),
        waits("normal", 20, priority=NORMAL),
        waits("interactive", 900, priority=INTERACTIVE),
    )
    assert chosen(*rows) == "interactive"
    assert chosen(*rows[:2]) == "normal"


def test_waiting_moves_a_row_up_a_class() -> None:
    rows = (waits("background", 10, priority=BACKGROUND), waits("normal", 20, since=19.0))
    assert chosen(*rows, now=19.5) == "normal"
    assert chosen(*rows, now=20.5) == "background"


def test_a_row_that_starves_gets_one_piece_in_four() -> None:
    rows = (waits("long", 9000, started=True), waits("short", 10, since=58.0))
    turns = [chosen(*rows, now=61.0, pieces=pieces) for pieces in range(8)]
    assert turns == ["long", "short", "short", "short"] * 2
    assert [chosen(*rows, now=59.0, pieces=pieces) for pieces in range(8)] == ["short"] * 8


def test_no_client_gets_far_ahead_of_another() -> None:
    rows = (waits("agent", 10, client="agent"), waits("editor", 900, client="editor"))
    assert chosen(*rows, served={"agent": 5.0, "editor": 4.5}) == "agent"
    assert chosen(*rows, served={"agent": 5.6, "editor": 4.5}) == "editor"
    # Between classes there is nothing to be fair about.
    urgent = waits("agent", 10, client="agent", priority=INTERACTIVE)
    assert chosen(urgent, rows[1], served={"agent": 50.0}) == "agent"


def test_no_row_starts_without_room() -> None:
    policy = Policy(max_rows=4)
    assert chosen(waits("new", 10), running=3, policy=policy) == "new"
    assert chosen(waits("new", 10), running=4, policy=policy) is None
    assert chosen(waits("three at once", 10, rows=3), running=2, policy=policy) is None
    started = waits("started", 500, position=20)
    assert chosen(started, waits("new", 10), running=3, policy=policy) == "started"


def test_the_last_places_are_for_interactive_rows() -> None:
    policy = Policy(max_rows=16)
    assert chosen(waits("normal", 10), running=13, policy=policy) == "normal"
    assert chosen(waits("normal", 10), running=14, policy=policy) is None
    assert chosen(waits("typed", 10, priority=INTERACTIVE), running=15, policy=policy) == "typed"


def test_one_client_leaves_places_to_others() -> None:
    policy = Policy(max_rows=16)
    decoding = (Running(client="agent", rows=12),)
    assert chosen(waits("agent's", 10, client="agent"), decoding=decoding, policy=policy) is None
    assert chosen(waits("editor's", 10, client="editor"), decoding=decoding, policy=policy) == "editor's"


def test_a_row_waits_for_the_bytes_it_may_need() -> None:
    policy = Policy(bytes_limit=4 * GIB)
    decoding = (Running(bytes=3 * GIB),)
    held = decision(waits("big", 10, bytes=2 * GIB), decoding=decoding, policy=policy)
    assert held.piece is None
    assert held.blocked == GIB
    assert held.decode
    assert chosen(waits("small", 10, bytes=GIB), decoding=decoding, policy=policy) == "small"
    assert chosen(waits("big", 10, bytes=2 * GIB), policy=policy) == "big"


def test_what_is_left_does_not_go_past_a_starving_row_that_needs_more() -> None:
    policy = Policy(bytes_limit=4 * GIB)
    rows = (waits("big", 10, bytes=3 * GIB), waits("small", 10, since=60.0, bytes=GIB))
    decoding = (Running(bytes=2 * GIB),)
    assert chosen(*rows, decoding=decoding, policy=policy, now=59.0) == "small"
    assert chosen(*rows, decoding=decoding, policy=policy, now=61.0) is None


def test_background_rows_neither_start_nor_go_on_while_the_machine_says_so() -> None:
    policy = Policy(background=False)
    later = waits("later", 10, priority=BACKGROUND)
    begun = waits("begun", 10, position=2, priority=BACKGROUND)
    assert decision(later, begun, decoding=(Running(BACKGROUND),), policy=policy).empty
    assert chosen(later, begun, waits("other", 900), policy=policy) == "other"
    assert not decision(later, begun, decoding=(Running(BACKGROUND),)).empty


def test_a_step_for_others_takes_background_rows_along() -> None:
    policy = Policy(background=False)
    assert decision(decoding=(Running(BACKGROUND), Running(NORMAL)), policy=policy).decode
    assert not decision(decoding=(Running(BACKGROUND), Running(BACKGROUND)), policy=policy).decode


def held_up_by(resting: Running, **about: Any) -> bool:
    """Whether resting rows go on for a row that waits."""
    iteration = decision(waits("waits", 10, rows=2, bytes=GIB, client="another"), decoding=(resting,), **about)
    assert iteration.piece is None or not iteration.decode
    return iteration.decode


def test_background_rows_that_hold_what_others_wait_for_go_on_until_it_is_free() -> None:
    few = Policy(background=False, max_rows=4)
    assert held_up_by(Running(BACKGROUND, rows=3), policy=few)
    assert not held_up_by(Running(BACKGROUND, rows=2), policy=few), "there is room"
    small = Policy(background=False, bytes_limit=3 * GIB)
    assert held_up_by(Running(BACKGROUND, bytes=3 * GIB), policy=small)
    assert not held_up_by(Running(BACKGROUND, bytes=2 * GIB), policy=small)
    begun = waits("begun", 10, position=2, priority=BACKGROUND, rows=3)
    assert chosen(begun, waits("waits", 10, rows=2, client="another"), policy=few) == "begun"
    others = (Running(BACKGROUND), Running(NORMAL, rows=3))
    busy = decision(begun, waits("waits", 10, rows=2, client="another"), decoding=others, policy=few)
    assert busy.piece is None, "others hold its place, and resting rows make no difference"


def test_background_rows_step_seldom_while_a_keystroke_waits() -> None:
    typed = waits("typed", 200, priority=INTERACTIVE)
    idle = (Running(BACKGROUND), Running(BACKGROUND))
    assert not decision(typed, decoding=idle, now=10.0, stepped=9.5).decode
    assert decision(typed, decoding=idle, now=10.0, stepped=8.9).decode
    assert decision(typed, decoding=(*idle, Running(NORMAL)), now=10.0, stepped=9.5).decode
    assert decision(waits("other", 200), decoding=idle, now=10.0, stepped=9.5).decode


def test_a_piece_ends_with_its_prompt_or_at_a_planned_end() -> None:
    policy = Policy(planned_chunk=100)
    assert decision(waits("a", 20), policy=policy).piece == Piece("a", 20, True, Phase.CHUNK)
    assert decision(waits("a", 500, position=90), policy=policy).piece == Piece("a", 10, True)
    assert decision(waits("a", 500, position=100), policy=policy).piece == Piece("a", 32, False)
    assert decision(waits("a", 500, position=99), policy=policy).piece == Piece("a", 1, True, Phase.DECODE)


def test_a_boundary_of_the_request_is_a_planned_end() -> None:
    policy = Policy(planned_chunk=100)
    row = waits("a", 500, position=90, ends=(40, 95, 300))
    assert decision(row, policy=policy).piece == Piece("a", 5, True)
    request = Request(prompt=(1,) * 250, max_tokens=1, eos=frozenset(), boundaries=(95, 230))
    assert planned_chunks(request, policy) == [95, 5, 100, 30, 20]


@pytest.mark.parametrize("deep", [0, 300])
def test_a_gap_that_was_set_overrides_the_measured_one(deep: int) -> None:
    costs = Costs()
    costs.saw_step(2, 0.01)
    costs.saw_piece(64, 0, 0.01 + 64 * 0.001)

    def width(gap_s: float | None) -> int:
        state = State((waits("a", 500, position=deep, started=True),), (Running(rows=2),), 1.0)
        piece = decide(state, costs, Policy(decode_gap_s=gap_s)).piece
        assert piece is not None
        return piece.width

    assert width(0.0) == 4, "late anyway, and three more cost little"
    assert width(0.03) < width(None) <= width(0.2)


def measured(step: float = 0.03, token: float = 0.001) -> Costs:
    costs = Costs()
    costs.saw_step(1, step)
    costs.saw_piece(512, 0, step + 512 * token)
    return costs


def together(
    *rows: Waiting, policy: Policy | None = None, running: int = 0, costs: Costs | None = None
) -> list[object]:
    state = State(rows, (Running(rows=running),) if running else (), 1.0)
    return [piece.key for piece in decide(state, costs or measured(), policy or Policy(), Cohorts()).pieces]


def test_rows_with_little_left_come_along_with_one_whose_prompt_ends() -> None:
    short = [waits(name, 10 + i, since=0.1 * i) for i, name in enumerate("abc")]
    assert together(*short) == ["a", "b", "c"]
    assert together(*short, waits("tail", 900, position=880)) == ["a", "b", "c", "tail"]
    assert together(short[0], waits("long", 400)) == ["a"], "its tokens cost more than a forward of its own does"
    assert together(waits("long", 400), waits("longer", 500)) == ["long"]
    assert together(*short, costs=Costs()) == ["a"], "nothing was measured"
    assert decide(State(tuple(short), (), 1.0), measured(), Policy()).beside == (), "nothing can share a forward"


def test_who_comes_along_keeps_to_the_gap_the_places_and_the_class() -> None:
    short = [waits(name, 10, since=0.1 * i) for i, name in enumerate("abcdef")]
    assert together(*short, running=1, policy=Policy(decode_gap_s=0.1)) == ["a", "b", "c"]
    assert together(*short, policy=Policy(max_rows=2)) == ["a", "b"]
    later = waits("later", 10, priority=BACKGROUND)
    assert together(*short[:2], later, policy=Policy(max_rows=4)) == ["a", "b"]
    assert together(waits("typed", 10, priority=INTERACTIVE), *short[:2]) == ["typed"]
    many = [waits(str(i), 2, since=i / 100) for i in range(40)]
    assert together(*many, policy=Policy(max_rows=64)) == [str(i) for i in range(MOST_TOGETHER)]


def test_a_forward_beside_a_piece_has_what_the_piece_leaves_of_the_gap() -> None:
    costs = Costs()
    costs.saw_step(2, 0.01)
    costs.saw_piece(64, 0, 0.01 + 64 * 0.001)
    state = State((waits("a", 30, started=True),), (Running(rows=2),), 1.0)
    iteration = decide(state, costs, Policy(decode_gap_s=0.2))
    assert iteration.step_s == pytest.approx(0.2 - 0.01 - 30 * 0.001)
    policy = Policy(decode_gap_s=0.2, max_piece_s=0.15)
    assert decide(replace(state, waiting=()), costs, policy).step_s == 0.15
    nobody_watches = replace(state, running=(Running(BACKGROUND),))
    assert decide(nobody_watches, costs, policy).step_s == 0.15


def test_a_model_whose_steps_are_slow_still_has_rounds() -> None:
    costs = Costs()
    costs.saw_step(2, 0.4)
    assert decide(State((), (Running(rows=2),), 1.0), costs, Policy(max_piece_s=0.25)).step_s == pytest.approx(1.2)
