"""A decode step and a piece of a prompt as one forward: who is in it draws what it draws alone, and fails by itself."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from test_executor import BOTH, MIXED, prompt
from tiny import Driver, make_executor, make_request, oracle

from mlxbcd.engine import executor
from mlxbcd.engine.executor import Executor
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup
from mlxbcd.methods.events import Failed
from mlxbcd.model.packed import Packer
from mlxbcd.sampling.sampler import Samplers
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.state.rows import Rows

RUNNING = make_request(prompt(1, 9), 20)
COMING = make_request(prompt(2, 40), 6)


class Known(VerifyCosts):
    """Costs that are what they are, however busy this machine is."""

    def saw_plain(self, rows: int, seconds: float) -> None:
        pass

    def saw_round(self, rows: int, width: int, seconds: float) -> None:
        pass


def running(ahead: Ahead = Ahead.BUILD) -> Driver:
    """One row decodes; another one has begun its prompt."""
    driver = Driver(make_executor(ahead=ahead, packs=True))
    driver.prefill("running", RUNNING)
    driver.iterate()
    driver.iterate(start=[("coming", COMING)], piece=("coming", 4))
    return driver


def codes(driver: Driver) -> dict[Any, str]:
    return {event.key: event.error.code for event in driver.events if isinstance(event, Failed)}


@BOTH
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_whose_prompts_run_packed_with_others_draw_what_they_draw_alone(name: str, ahead: Ahead) -> None:
    chance = random.Random(f"{name} {ahead}")
    driver = Driver(make_executor(name, ahead=ahead, packs=True))
    together = 0
    for key, request in enumerate(MIXED):
        left, start = len(request.prompt), [(key, request)]
        while left:
            width = min(chance.randint(1, 15), left)
            report = driver.iterate(piece=(key, width), start=start, packed=chance.random() < 0.8)
            together += report.mixed is not None and report.mixed.packed
            start, left = [], left - width
    driver.finish()
    assert together >= 8
    assert {key: driver.tokens(key) for key in range(len(MIXED))} == {
        key: oracle(request, name) for key, request in enumerate(MIXED)
    }
    assert all(driver.ends(key) == ["length"] for key in range(len(MIXED)))


@BOTH
def test_rounds_of_proposals_keep_their_forward_and_plain_steps_between_them_share_theirs(ahead: Ahead) -> None:
    """Rows that are told what they will draw, so that proposals are right once there are some."""
    chance = random.Random(5)
    verify = Known({1: 0.01, 2: 0.011, 4: 0.012, 8: 0.013})
    driver = Driver(make_executor(ahead=ahead, packs=True, verify=verify))
    known = make_request(prompt(8, 9), 60)
    known = dataclasses.replace(known, echo=(tuple(oracle(known)),))
    requests = [known, *(make_request(prompt(20 + i, 30), 12, temperature=i % 2, seed=i) for i in range(4))]
    packed = separate = 0
    for key, request in enumerate(requests):
        left, start = len(request.prompt), [(key, request)]
        while left:
            width = min(chance.randint(1, 4), left)
            report = driver.iterate(piece=(key, width), start=start, packed=True)
            packed += report.mixed is not None and report.mixed.packed
            separate += report.piece is not None and key > 0
            start, left = [], left - width
    driver.finish()
    assert packed
    assert separate, "no round kept its forward"
    assert [driver.tokens(key) for key in range(5)] == [oracle(request) for request in requests]


@BOTH
@pytest.mark.parametrize(("within", "rounds"), [(0.001, False), (10.0, True)])
def test_rounds_beside_a_piece_keep_to_the_time_that_is_left_for_them(
    ahead: Ahead, within: float, rounds: bool
) -> None:
    driver = Driver(make_executor(ahead=ahead, verify=Known({1: 0.01, 2: 0.011, 4: 0.012, 8: 0.013})))
    known = make_request(prompt(8, 9), 60)
    driver.prefill("known", dataclasses.replace(known, echo=(tuple(oracle(known)),)))
    long = make_request(prompt(9, 40), 3)
    beside = driver.iterate(start=[("long", long)], piece=("long", 2), step_s=within).rounds
    for _ in range(18):
        beside += driver.iterate(piece=("long", 2), step_s=within).rounds
    assert bool(beside) is rounds
    alone = [driver.iterate().rounds for _ in range(4)]
    assert rounds or any(alone), "nothing was worth a round"
    driver.iterate(piece=("long", 2), step_s=within)
    driver.finish()
    assert (driver.tokens("known"), driver.tokens("long")) == (oracle(known), oracle(long))


def test_a_packed_forward_is_reported_as_one_and_not_as_a_step_or_a_piece() -> None:
    driver = running()
    report = driver.iterate(piece=("coming", 8), packed=True)
    assert report.piece is None
    assert report.steps == ()
    mixed = report.mixed
    assert mixed is not None
    assert (mixed.rows, mixed.piece.rows, mixed.packed, mixed.comparable) == (1, ((8, 4),), True, True)
    assert mixed.seconds > 0


def test_separate_forwards_of_one_iteration_are_reported_together_too() -> None:
    driver = running()
    report = driver.iterate(piece=("coming", 8))
    assert report.piece is not None
    assert report.mixed is not None
    assert not report.mixed.packed
    assert report.mixed.comparable
    assert report.mixed.seconds >= report.piece.seconds + sum(seconds for _, seconds in report.steps)


def test_a_time_that_work_from_before_is_part_of_is_not_compared() -> None:
    driver = running()
    driver.iterate()
    report = driver.iterate(piece=("coming", 8), packed=True)
    assert report.mixed is not None
    assert not report.mixed.comparable
    driver.iterate()
    assert driver.iterate(piece=("coming", 8)).mixed is None


@BOTH
def test_if_preparation_makes_no_forward_decode_runs_alone(ahead: Ahead) -> None:
    driver = running(ahead)
    report = driver.iterate(piece=("coming", 8), leave=["coming"], packed=True)
    assert (report.piece, report.mixed) == (None, None)
    driver.finish()
    assert driver.tokens("running") == oracle(RUNNING)


@BOTH
def test_if_decode_makes_no_forward_the_piece_runs_by_itself(ahead: Ahead) -> None:
    driver = Driver(make_executor(ahead=ahead, packs=True))
    driver.prefill("ending", make_request(prompt(3, 7), 2))
    driver.iterate()
    report = driver.iterate(start=[("coming", COMING)], piece=("coming", 40), packed=True)
    assert driver.ends("ending") == ["length"]
    assert report.mixed is None
    assert report.piece is not None
    driver.finish()
    assert driver.tokens("coming") == oracle(COMING)


def test_rows_that_end_by_what_was_in_flight_leave_the_prompt_its_packed_forward() -> None:
    tokens = oracle(make_request(prompt(51, 12), 10))
    driver = Driver(make_executor(packs=True))
    driver.prefill("ending", make_request(prompt(51, 12), 10, eos=[tokens[1]]))
    driver.iterate()
    driver.iterate(start=[("coming", COMING)], piece=("coming", 40), packed=True)
    assert driver.ends("ending") == ["stop"]
    driver.finish()
    assert driver.tokens("coming") == oracle(COMING)


# -- failures


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], None]:
    """Makes one method of a class raise, once."""

    def breaks(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(owner, name, plain)
            raise RuntimeError("broken for once")

        monkeypatch.setattr(owner, name, call)

    return breaks


def goes_on(driver: Driver, *left: str) -> None:
    """Who is left draws what it draws alone, and so does whoever comes."""
    requests = {"running": RUNNING, "coming": COMING}
    if "coming" in left:
        driver.iterate(piece=("coming", 36))
    driver.prefill("new", make_request(prompt(4, 11), 5))
    driver.finish()
    for key in left:
        assert driver.tokens(key) == oracle(requests[key])
    assert driver.tokens("new") == oracle(make_request(prompt(4, 11), 5))


@BOTH
def test_a_packed_forward_that_cannot_be_built_fails_both_groups(
    ahead: Ahead, broken: Callable[[type, str], None]
) -> None:
    driver = running(ahead)
    broken(Packer, "run")
    report = driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"running": "device_error", "coming": "device_error"}
    assert (report.piece, report.mixed, report.running) == (None, None, ())
    goes_on(driver)


@BOTH
def test_a_packed_forward_that_cannot_be_computed_fails_both_groups(
    ahead: Ahead, broken: Callable[[type, str], None]
) -> None:
    driver = running(ahead)
    broken(DecodeGroup, "wait")
    driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"running": "device_error", "coming": "device_error"}
    goes_on(driver)


def test_a_piece_of_a_packed_forward_that_cannot_be_computed_fails_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = running()
    plain = mx.eval

    def call(*arrays: Any) -> None:
        if len(arrays) == 1 and isinstance(arrays[0], list):
            monkeypatch.setattr(mx, "eval", plain)
            raise RuntimeError("broken for once")
        plain(*arrays)

    monkeypatch.setattr(mx, "eval", call)
    driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"running": "device_error", "coming": "device_error"}
    goes_on(driver)


def test_a_decode_that_fails_before_its_forward_fails_alone(broken: Callable[[type, str], None]) -> None:
    driver = running()
    broken(DecodeGroup, "_unsettled")
    report = driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"running": "device_error"}
    assert report.piece is not None
    assert report.mixed is None
    driver.iterate(piece=("coming", 28))
    driver.finish()
    assert driver.tokens("coming") == oracle(COMING)


def test_a_draw_that_fails_after_the_packed_forward_fails_alone(broken: Callable[[type, str], None]) -> None:
    driver = running()
    broken(Samplers, "draw")
    driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"running": "device_error"}
    driver.iterate(piece=("coming", 28))
    driver.finish()
    assert driver.tokens("coming") == oracle(COMING)


def test_a_prompt_that_fails_before_its_forward_fails_alone(broken: Callable[[type, str], None]) -> None:
    driver = running()
    broken(Rows, "begin")
    driver.iterate(piece=("coming", 8), packed=True)
    assert codes(driver) == {"coming": "device_error"}
    driver.finish()
    assert driver.tokens("running") == oracle(RUNNING)


def test_no_array_of_a_packed_forward_outlives_its_iteration() -> None:
    def live(executor: Executor) -> int:
        gc.collect()
        return sum(isinstance(found, mx.array) for found in gc.get_objects())

    driver = running()
    driver.iterate(piece=("coming", 8))
    driver.iterate(piece=("coming", 8))
    before = live(driver.executor)
    driver.iterate(piece=("coming", 8), packed=True)
    assert live(driver.executor) <= before + 2


# -- several prompts in one forward


@BOTH
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_whose_prompts_share_forwards_draw_what_they_draw_alone(name: str, packed: bool, ahead: Ahead) -> None:
    driver = Driver(make_executor(name, ahead=ahead, packs=True))
    driver.prefill("running", RUNNING)
    driver.iterate()
    for first in range(0, len(MIXED), 3):
        group = dict(enumerate(MIXED[first : first + 3], first))
        left = {key: len(request.prompt) for key, request in group.items()}
        start = list(group.items())
        while left:
            widths = {key: min(5 + 3 * key, tokens) for key, tokens in left.items()}
            report = driver.iterate(
                piece=next(iter(widths.items())), beside=[*widths.items()][1:], start=start, packed=packed
            )
            left = {key: tokens - widths[key] for key, tokens in left.items() if tokens > widths[key]}
            start = []
            cost = report.piece or (report.mixed.piece if report.mixed is not None else None)
            assert cost is not None
            assert [width for width, _ in cost.rows] == list(widths.values())
    driver.finish()
    assert driver.tokens("running") == oracle(RUNNING, name)
    for key, request in enumerate(MIXED):
        assert driver.tokens(key) == oracle(request, name)


def coming_together(driver: Driver, **how: Any) -> None:
    """Two prompts begin in one forward, beside a row that decodes."""
    requests = [("one", make_request(prompt(61, 10), 4)), ("other", make_request(prompt(62, 7), 4))]
    driver.iterate(piece=("one", 10), beside=[("other", 7)], start=requests, **how)


def test_a_prompt_that_can_not_begin_leaves_the_forward_to_the_others(broken: Callable[[type, str], None]) -> None:
    driver = running()
    broken(Rows, "begin")
    coming_together(driver, decode=False)
    assert codes(driver) == {"one": "device_error"}
    driver.finish()
    assert driver.tokens("other") == oracle(make_request(prompt(62, 7), 4))


def test_a_first_token_that_can_not_be_drawn_is_that_rows_failure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = executor.sample

    def once(*args: Any) -> Any:
        monkeypatch.setattr(executor, "sample", plain)
        raise RuntimeError("broken for once")

    driver = running()
    monkeypatch.setattr(executor, "sample", once)
    coming_together(driver, packed=True)
    assert codes(driver) == {"one": "device_error"}
    driver.iterate(piece=("coming", 36))
    driver.finish()
    assert driver.tokens("other") == oracle(make_request(prompt(62, 7), 4))
    assert driver.tokens("running") == oracle(RUNNING)
    assert driver.tokens("coming") == oracle(COMING)


@pytest.mark.parametrize(("packed", "lost"), [(False, {"one", "other"}), (True, {"one", "other", "running"})])
def test_a_shared_forward_that_can_not_be_built_fails_all_that_share_it(
    broken: Callable[[type, str], None], packed: bool, lost: set[str]
) -> None:
    driver = running()
    broken(Packer, "run")
    coming_together(driver, packed=packed)
    assert codes(driver) == dict.fromkeys(lost, "device_error")
    driver.iterate(piece=("coming", 36))
    driver.finish()
    assert driver.tokens("coming") == oracle(COMING)
    if not packed:
        assert driver.tokens("running") == oracle(RUNNING)
