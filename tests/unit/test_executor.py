"""The device side of the engine: rows in company equal rows alone, and one row's trouble is its own."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from tiny import VOCABULARY, Driver, make_executor, make_request, oracle, parts

from mlxbcd.engine import executor as executor_module
from mlxbcd.engine.executor import Executor
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Drawn, Failed, Prefilled
from mlxbcd.plan.request import Request
from mlxbcd.state.rows import Rows

BOTH = pytest.mark.parametrize("ahead", Ahead)
EITHER = pytest.mark.parametrize("alone", [False, True], ids=["batched", "alone"])


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


MIXED: list[Request] = [
    make_request(prompt(1, 40), 12),
    make_request(prompt(2, 1), 9, temperature=0.9, seed=5),
    make_request(prompt(3, 23), 1),
    make_request(prompt(4, 7), 15, temperature=1.1, top_k=20, top_p=0.9, seed=6),
    make_request(prompt(5, 60), 6, repetition_penalty=1.4, presence_penalty=0.3),
    make_request(prompt(6, 5), 20, temperature=0.7, min_p=0.05, frequency_penalty=0.4, seed=7),
    make_request(prompt(7, 33), 11, logit_bias=((3, 4.0), (9, -2.0))),
]
"""Every kind of sampler, side by side."""


# -- company changes nothing


@BOTH
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_rows_that_join_and_leave_a_batch_at_random_draw_what_they_draw_alone(name: str, ahead: Ahead) -> None:
    chance = random.Random(f"{name} {ahead}")
    driver = Driver(make_executor(name, ahead=ahead))
    for key, request in enumerate(MIXED):
        widths = [chance.randint(1, 30) for _ in range(3)]
        driver.prefill(key, request, widths, decode=chance.random() < 0.7)
    driver.finish()
    assert {key: driver.tokens(key) for key in range(len(MIXED))} == {
        key: oracle(request, name) for key, request in enumerate(MIXED)
    }
    assert all(driver.ends(key) == ["length"] for key in range(len(MIXED)))


def test_a_batch_of_sixteen_draws_what_its_rows_draw_alone() -> None:
    requests = [make_request(prompt(10 + i, 1 + 3 * i), 6, temperature=i % 2, seed=i) for i in range(16)]
    driver = Driver(make_executor())
    for key, request in enumerate(requests):
        driver.prefill(key, request, decode=False)
    driver.finish()
    assert [driver.tokens(key) for key in range(16)] == [oracle(request) for request in requests]


@EITHER
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_prefilled_in_random_chunks_gives_the_tokens_of_one_prefilled_whole(seed: int, alone: bool) -> None:
    request = make_request(prompt(20 + seed, 90), 5, temperature=seed % 2, seed=seed)
    chance = random.Random(seed)
    driver = Driver(make_executor(alone=alone))
    driver.prefill("chunks", request, [chance.randint(1, 25) for _ in range(12)])
    driver.finish()
    assert driver.tokens("chunks") == oracle(request)
    positions = [event.position for event in driver.events if isinstance(event, Prefilled)]
    assert positions == sorted(positions)
    assert (positions[0], positions[-1]) == (0, 90)


@BOTH
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 8}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("had", [1, 4, 9])
def test_a_row_resumed_from_its_tokens_goes_on_as_if_uninterrupted(
    had: int, settings: dict[str, Any], ahead: Ahead
) -> None:
    whole = oracle(make_request(prompt(30, 14), 10, **settings))
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill(0, make_request(prompt(30, 14), 10, forced=whole[:had], **settings), [5])
    driver.finish()
    assert driver.tokens(0) == whole[had:]
    assert driver.ends(0) == ["length"]


@BOTH
def test_logprobs_change_no_token_and_are_told_for_each(ahead: Ahead) -> None:
    plain, asking = Driver(make_executor(ahead=ahead)), Driver(make_executor(ahead=ahead))
    for driver, top in ((plain, 0), (asking, 3)):
        request = make_request(prompt(40, 9), 7, temperature=1.0, seed=1, logprobs=bool(top), top_logprobs=top)
        driver.prefill(0, request)
        driver.prefill(1, make_request(prompt(41, 4), 7))
        driver.finish()
    assert [asking.tokens(key) for key in (0, 1)] == [plain.tokens(key) for key in (0, 1)]
    samples = [event.sample for event in asking.events if isinstance(event, Drawn) and event.key == 0]
    assert all(sample.logprob is not None and len(sample.top) == 3 for sample in samples)


@BOTH
def test_rows_that_outgrow_their_buffers_at_different_times_go_on_unchanged(ahead: Ahead) -> None:
    driver = Driver(make_executor(ahead=ahead))
    requests = [make_request(prompt(45 + key, length), 12) for key, length in enumerate((268, 30, 265))]
    for key, request in enumerate(requests):
        driver.prefill(key, request)
    driver.finish()
    assert [driver.tokens(key) for key in range(3)] == [oracle(request) for request in requests]


# -- how rows end


@BOTH
@EITHER
def test_the_end_token_on_the_last_budgeted_draw_counts_as_a_stop(ahead: Ahead, alone: bool) -> None:
    tokens = oracle(make_request(prompt(50, 12), 5))
    assert tokens.index(tokens[-1]) == 4, "the end token must not come earlier"
    driver = Driver(make_executor(ahead=ahead, alone=alone))
    driver.prefill(0, make_request(prompt(50, 12), 5, eos=[tokens[-1]]))
    driver.finish()
    assert driver.tokens(0) == tokens
    assert driver.ends(0) == ["stop"]


@BOTH
def test_the_end_token_ends_its_row_and_leaves_the_others_running(ahead: Ahead) -> None:
    tokens = oracle(make_request(prompt(51, 12), 10))
    eos = tokens[3]
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill(0, make_request(prompt(51, 12), 10, eos=[eos]))
    driver.prefill(1, make_request(prompt(52, 5), 10))
    driver.finish()
    assert driver.tokens(0) == tokens[: tokens.index(eos) + 1]
    assert driver.ends(0) == ["stop"]
    assert driver.tokens(1) == oracle(make_request(prompt(52, 5), 10))


def test_nothing_is_submitted_for_rows_that_have_all_ended() -> None:
    tokens = oracle(make_request(prompt(55, 12), 10))
    driver = Driver(make_executor(ahead=Ahead.BUILD))
    driver.prefill(0, make_request(prompt(55, 12), 10, eos=[tokens[4]]))
    while not driver.ends(0):
        driver.iterate()
    assert driver.executor._group._flight is None
    assert driver.report.running == ()


def test_a_row_whose_only_token_comes_from_its_prefill_never_decodes() -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(53, 6), 1))
    assert driver.ends(0) == ["length"]
    assert driver.report.running == ()
    assert driver.report.kv_bytes == 0


@BOTH
def test_no_forward_runs_that_nobody_wants(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill(0, make_request(prompt(54, 6), 5), decode=False)
    forwards = count_forwards(monkeypatch, driver.executor)
    driver.finish()
    assert len(driver.tokens(0)) == 5
    assert len(forwards) == 4, "the prefill drew the first token"


# -- leaving


@BOTH
@EITHER
@pytest.mark.parametrize("after", range(6))
def test_a_row_that_leaves_at_any_moment_is_gone_and_others_do_not_notice(
    after: int, alone: bool, ahead: Ahead
) -> None:
    driver = Driver(make_executor(ahead=ahead, alone=alone))
    stays = make_request(prompt(60, 8), 9)
    if not alone:
        driver.prefill("stays", stays)
    leaver = make_request(prompt(61, 20), 9)
    steps: list[dict[str, Any]] = [
        {"piece": ("leaver", 10), "start": [("leaver", leaver)]},
        {"piece": ("leaver", 10)},
        {},
        {},
        {},
        {},
    ]
    for step in steps[: after + 1]:
        driver.iterate(**step)
    drawn = len(driver.tokens("leaver"))
    driver.iterate(leave=["leaver"])
    driver.finish()
    # What was in flight may still be told: whoever cancelled doesn't listen any more.
    assert len(driver.tokens("leaver")) <= drawn + 1
    assert driver.ends("leaver") == []
    if not alone:
        assert driver.tokens("stays") == oracle(stays)
    assert nothing_left(driver)


@BOTH
def test_a_row_that_is_told_to_leave_while_its_last_token_is_in_flight_leaves_once(ahead: Ahead) -> None:
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill("other", make_request(prompt(62, 8), 9))
    driver.prefill("ends", make_request(prompt(63, 8), 3))
    while len(driver.tokens("ends")) < 2:
        driver.iterate()
    driver.iterate(leave=["ends"])
    driver.finish()
    assert driver.tokens("other") == oracle(make_request(prompt(62, 8), 9))
    assert driver.ends("other") == ["length"]
    assert nothing_left(driver)


def test_an_unknown_row_may_be_told_to_leave() -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(64, 8), 4))
    driver.iterate(leave=["nobody"])
    driver.finish()
    assert driver.tokens(0) == oracle(make_request(prompt(64, 8), 4))


# -- failing


@BOTH
@pytest.mark.parametrize("failing", range(1, 7))
def test_a_decode_step_that_raises_fails_its_rows_alone(
    failing: int, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_executor(ahead=ahead))
    for key in (0, 1):
        driver.prefill(key, make_request(prompt(70 + key, 8), 20), decode=False)
    prepares = make_request(prompt(72, 30), 6)
    driver.iterate(decode=False, piece=("prepares", 10), start=[("prepares", prepares)])
    raise_in_forward(monkeypatch, driver.executor, failing, RuntimeError("no such kernel"))
    while not driver.ends(0):
        driver.iterate()
    assert driver.ends(0) == driver.ends(1) == ["device_error"]
    told = len(driver.tokens(0))
    driver.iterate(piece=("prepares", 20))
    driver.prefill("next", make_request(prompt(73, 5), 6))
    driver.finish()
    assert driver.tokens("prepares") == oracle(prepares)
    assert driver.tokens("next") == oracle(make_request(prompt(73, 5), 6))
    assert len(driver.tokens(0)) == told
    assert nothing_left(driver)


def test_an_error_names_what_failed_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(74, 8), 20), decode=False)
    raise_in_forward(monkeypatch, driver.executor, 1, RuntimeError("no such kernel"))
    driver.iterate()
    (failed,) = [event for event in driver.events if isinstance(event, Failed)]
    assert "no such kernel" in failed.error.message
    assert failed.error.retryable


@BOTH
@EITHER
def test_a_prefill_that_raises_fails_alone(alone: bool, ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor(ahead=ahead, alone=alone))
    if not alone:
        driver.prefill("decodes", make_request(prompt(75, 8), 9))
    driver.iterate(piece=("fails", 6), start=[("fails", make_request(prompt(76, 12), 9))])
    with monkeypatch.context() as patch:
        raise_in_forward(patch, driver.executor, 1 if alone else 2, RuntimeError("no such kernel"))
        driver.iterate(piece=("fails", 6))
    assert driver.ends("fails") == ["device_error"]
    driver.prefill("next", make_request(prompt(77, 5), 4))
    driver.finish()
    if not alone:
        assert driver.tokens("decodes") == oracle(make_request(prompt(75, 8), 9))
    assert driver.tokens("next") == oracle(make_request(prompt(77, 5), 4))
    assert nothing_left(driver)


@BOTH
def test_a_row_that_cannot_join_fails_alone(ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill(0, make_request(prompt(78, 8), 12))
    driver.iterate()
    driver.prefill("joins", make_request(prompt(79, 8), 12))
    prepare = Rows.prepare

    def no_memory(rows: Rows, *, join: Sequence[Any] = (), **rest: Any) -> Any:
        if join:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return prepare(rows, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "prepare", no_memory)
        driver.iterate()
    assert driver.ends("joins") == ["out_of_memory"]
    driver.finish()
    assert driver.tokens(0) == oracle(make_request(prompt(78, 8), 12))
    assert nothing_left(driver)


@BOTH
def test_a_step_that_fails_while_it_is_read_for_a_joiner_does_not_fail_the_joiner(
    ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_executor(ahead=ahead))
    driver.prefill(0, make_request(prompt(80, 8), 12))
    driver.iterate()
    joins = make_request(prompt(81, 8), 12)
    driver.prefill("joins", joins)

    def fails(emit: Any) -> None:
        raise RuntimeError("the step in flight failed")

    with monkeypatch.context() as patch:
        patch.setattr(driver.executor._group, "settle", fails)
        driver.iterate(decode=False)
    assert driver.ends(0) == ["device_error"]
    driver.finish()
    assert driver.tokens("joins") == oracle(joins)
    assert nothing_left(driver)


def test_a_request_that_cannot_start_fails_alone() -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(82, 8), 5))
    foreign = make_request([VOCABULARY + 7], 5, presence_penalty=1.0)
    driver.iterate(piece=("foreign", 1), start=[("foreign", foreign)])
    assert driver.ends("foreign") == ["bad_request"]
    driver.finish()
    assert driver.tokens(0) == oracle(make_request(prompt(82, 8), 5))


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_fault_of_the_device_is_not_blamed_on_a_row(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(83, 8), 5), decode=False)
    raise_in_forward(monkeypatch, driver.executor, 1, RuntimeError("[METAL] Command buffer execution failed"))
    what: dict[str, Any] = {
        "decode": {},
        "prefill": {"decode": False, "piece": (1, 4), "start": [(1, make_request(prompt(84, 8), 5))]},
    }
    with pytest.raises(DeviceFault):
        driver.iterate(**what[where])
    assert driver.ends(0) == []


@BOTH
@EITHER
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_infinity_ends_its_row_alone_and_its_slot_is_clean_for_the_next(
    value: float, alone: bool, ahead: Ahead
) -> None:
    driver = Driver(make_executor(ahead=ahead, alone=alone))
    # Of three rows the middle one breaks; a short one takes its slot, whose end a longer one's attention still spans.
    lengths = {1: 40} if alone else {0: 60, 1: 40, 2: 6}
    requests = {key: make_request(prompt(90 + key, length), 14) for key, length in lengths.items()}
    for key, request in requests.items():
        driver.prefill(key, request)
    driver.iterate()
    poison(driver, 1, value)
    while not driver.ends(1):
        driver.iterate()
    assert driver.ends(1) == ["device_error"]
    while 1 in driver.report.running:
        driver.iterate()
    again = make_request(prompt(95, 9), 10)
    driver.prefill("again", again)
    driver.finish()
    assert driver.tokens("again") == oracle(again)
    del requests[1]
    assert {key: driver.tokens(key) for key in requests} == {key: oracle(r) for key, r in requests.items()}
    assert nothing_left(driver)


@EITHER
def test_nan_in_a_prefill_ends_that_row_alone(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor(alone=alone))
    head = driver.executor.forward.head
    with monkeypatch.context() as patch:
        patch.setattr(driver.executor.forward, "head", lambda hidden: head(hidden) * float("nan"))
        driver.prefill(0, make_request(prompt(96, 6), 5))
    assert driver.ends(0) == ["device_error"]
    assert driver.tokens(0) == []
    driver.prefill(1, make_request(prompt(97, 6), 5))
    driver.finish()
    assert driver.tokens(1) == oracle(make_request(prompt(97, 6), 5))


# -- time and memory


def test_an_iteration_reports_what_its_forwards_took() -> None:
    driver = Driver(make_executor())
    report = driver.iterate(piece=(0, 5), start=[(0, make_request(prompt(98, 12), 9))])
    assert report.piece is not None
    assert (report.piece.width, report.piece.context) == (5, 0)
    assert report.piece.seconds > 0
    assert report.steps == ()
    report = driver.iterate(piece=(0, 7))
    assert report.piece is not None
    assert report.piece.context == 5
    assert driver.iterate().steps == (), "the first step is in flight"
    report = driver.iterate()
    assert [rows for rows, _ in report.steps] == [1]
    assert report.kv_bytes > 0


def test_a_step_in_flight_is_timed_before_the_piece_that_follows_it() -> None:
    driver = Driver(make_executor())
    driver.prefill(0, make_request(prompt(99, 4), 9))
    driver.iterate()
    report = driver.iterate(piece=(1, 3), start=[(1, make_request(prompt(98, 12), 9))])
    assert [rows for rows, _ in report.steps] == [1, 1], "the one read, and the one submitted before the piece"
    assert driver.iterate(piece=(1, 3)).steps != ()
    assert driver.iterate().steps == (), "the piece has waited for it"


def test_the_allocators_cache_is_cleared_only_when_nothing_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_executor())
    cleared: list[bool] = []

    def clear() -> None:
        flight = driver.executor._group._flight
        cleared.append(flight is None or flight.timed)

    monkeypatch.setattr(mx, "clear_cache", clear)
    monkeypatch.setattr(executor_module, "_CLEAR_EVERY_STEPS", 4)
    for key in range(4):
        driver.prefill(key, make_request(prompt(100 + key, 9), 12), [4])
    driver.finish()
    assert len(cleared) > 8
    assert all(cleared)


@BOTH
def test_a_thousand_steps_of_changing_membership_leave_no_array_behind(ahead: Ahead) -> None:
    chance = random.Random(7)
    driver = Driver(make_executor("shallow", ahead=ahead))
    counts: list[int] = []
    running: set[int] = set()
    key = 0
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"presence_penalty": 0.5}, {"logprobs": True}]
    for step in range(1000):
        driver.events.clear()
        leave = [k for k in running if chance.random() < 0.02]
        if len(driver.report.running) < 4 and chance.random() < 0.3:
            key += 1
            request = make_request(prompt(key, chance.randint(1, 8)), chance.randint(1, 60), **chance.choice(kinds))
            driver.iterate(piece=(key, len(request.prompt)), start=[(key, request)], leave=leave)
            running.add(key)
        else:
            driver.iterate(leave=leave)
        running = {k for k in running if k in driver.report.running}
        if step % 100 == 99:
            gc.collect()
            counts.append(sum(isinstance(thing, mx.array) for thing in gc.get_objects()))
    assert max(counts[1:]) < counts[0] + 150, counts
    driver.iterate(leave=list(running))
    assert nothing_left(driver)


# -- helpers


def nothing_left(driver: Driver) -> bool:
    """No row, no state and no flight is left on the device."""
    driver.iterate(decode=False)
    executor = driver.executor
    group = executor._group
    state = group._state
    empty = state is None or (isinstance(state, Rows) and not state.lengths)
    return (
        driver.report.running == ()
        and driver.report.kv_bytes == 0
        and not executor._preparing
        and not executor._ready
        and len(group) == 0
        and group._flight is None
        and empty
    )


def count_forwards(patch: pytest.MonkeyPatch, executor: Executor) -> list[int]:
    """A list that grows with every forward."""
    run = executor.forward.run
    seen: list[int] = []

    def counted(groups: Any) -> Any:
        seen.append(len(seen) + 1)
        return run(groups)

    patch.setattr(executor.forward, "run", counted)
    return seen


def raise_in_forward(patch: pytest.MonkeyPatch, executor: Executor, nth: int, error: Exception) -> None:
    """Make the n-th forward from now raise, in the middle of its turn."""
    run = executor.forward.run
    seen: list[int] = []

    def failing(groups: Any) -> Any:
        seen.append(1)
        if len(seen) == nth:
            raise error
        return run(groups)

    patch.setattr(executor.forward, "run", failing)


def poison(driver: Driver, key: Any, value: float) -> None:
    """Put NaN or infinity into the first layer's values of one row, as a broken kernel might."""
    group = driver.executor._group
    group.settle(driver.events.extend)
    state = group._state
    if isinstance(state, Rows):
        place = state.place(key)
        values = state.layouts[0].arrays()[1]
        values[place.slot, :, 0] = value
        mx.eval(values)
    else:
        assert state is not None
        state.caches[0].values[:, :, 0] = value


@pytest.fixture(autouse=True)
def _shared_models_stay_as_they_are() -> Any:
    yield
    for name in ("llama", "qwen3"):
        forward, _ = parts(name)
        assert "run" not in vars(forward)
        assert "head" not in vars(forward)
