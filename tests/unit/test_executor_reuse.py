"""What rows take from the prefix cache and leave in it: never another token, and never a failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from tiny import Driver, make_executor, make_request, oracle

from mlxbcd.cache.service import PrefixCache, Space
from mlxbcd.engine import executor as executor_module
from mlxbcd.engine.runner import Leaving
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Prefilled
from mlxbcd.plan.request import Caching, Keep, Request

CACHED = Caching(read=True, keep=Keep.RAM)
LONG = 300
AHEAD = pytest.mark.parametrize("ahead", list(Ahead))


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    cache = PrefixCache(1 << 30)
    yield cache
    assert cache.leases == 0
    cache.close()


def driver(cache: PrefixCache, ahead: Ahead = Ahead.BUILD, *, trimmable: bool = True) -> Driver:
    executor = make_executor(ahead=ahead)
    executor.reuse.space = cache.space("tiny", trimmable=trimmable)
    return Driver(executor)


def prompt(seed: int, n: int = LONG) -> list[int]:
    return [(seed * 131 + i * 37 + i * i) % 199 for i in range(n)]


def asking(ids: Sequence[int], max_tokens: int = 6, *, caching: Caching = CACHED, **fields: Any) -> Request:
    return dataclasses.replace(make_request(ids, max_tokens, **fields), caching=caching)


def run(driver: Driver, key: str, request: Request) -> int:
    """Run a request to its end; how many tokens it was restored from."""
    driver.iterate(decode=True, start=[(key, request)])
    restored = next(e.position for e in driver.events if isinstance(e, Prefilled) and e.key == key)
    driver.iterate(piece=(key, len(request.prompt) + len(request.forced) - restored))
    driver.finish()
    return restored


def found(driver: Driver, ids: Sequence[int]) -> int:
    """Tokens that a prompt which begins with `ids` would be restored from."""
    space = driver.executor.reuse.space
    assert space is not None
    return space.explain([*ids, 0]).ram


# ------------------------------------------------------------------------------------------ what is found again


@AHEAD
def test_a_repeat_is_restored_but_for_its_last_token_and_says_the_same(cache: PrefixCache, ahead: Ahead) -> None:
    one = driver(cache, ahead)
    request = asking(prompt(1), temperature=0.8, seed=3)
    assert run(one, "first", request) == 0
    assert run(one, "again", request) == LONG - 1
    assert one.tokens("first") == one.tokens("again") == oracle(request)


@AHEAD
@pytest.mark.parametrize("end", ["length", "stop"])
def test_the_next_turn_extends_what_was_generated(cache: PrefixCache, ahead: Ahead, end: str) -> None:
    one = driver(cache, ahead)
    alone = oracle(make_request(prompt(2), 8))
    eos = [alone[4]] if end == "stop" else []
    assert run(one, "first", asking(prompt(2), 8, eos=eos)) == 0
    drawn = one.tokens("first")
    assert one.ends("first") == [end]
    following = asking([*prompt(2), *drawn, 5, 6, 7])
    restored = run(one, "second", following)
    # The last token of a row that may draw no more is never read; an end token is.
    assert restored == LONG + len(drawn) - (end == "length")
    assert one.tokens("second") == oracle(following)


def test_rows_restored_and_cold_run_together(cache: PrefixCache) -> None:
    one = driver(cache)
    run(one, "first", asking(prompt(3)))
    requests = {"warm": asking([*prompt(3), 9], 20), "cold": asking(prompt(4, 40), 20), "long": asking(prompt(5), 20)}
    for key, request in requests.items():
        one.iterate(start=[(key, request)])
        position = next(e.position for e in one.events if isinstance(e, Prefilled) and e.key == key)
        one.iterate(piece=(key, len(request.prompt) - position))
    one.finish()
    assert {key: one.tokens(key) for key in requests} == {key: oracle(request) for key, request in requests.items()}


def test_each_candidate_leaves_its_own_output(cache: PrefixCache) -> None:
    one = driver(cache)
    request = dataclasses.replace(asking(prompt(6), 5, temperature=1.0, seed=1), candidates=3)
    one.iterate(piece=("n", LONG), start=[("n", request)])
    one.finish()
    outputs = {event.key: [] for event in one.events if hasattr(event, "sample")}
    for event in one.events:
        if hasattr(event, "sample"):
            outputs[event.key].append(event.sample.token)
    assert len(outputs) == 3
    assert all(found(one, [*prompt(6), *tokens[:4]]) == LONG + 4 for tokens in outputs.values())


# ------------------------------------------------------------------------------------------ what is left there


@AHEAD
def test_a_row_whose_text_has_ended_leaves_what_was_delivered(cache: PrefixCache, ahead: Ahead) -> None:
    one = driver(cache, ahead)
    one.prefill("a", asking(prompt(7), 30))
    for _ in range(6):
        one.iterate()
    drawn = one.tokens("a")
    assert len(drawn) > 4
    one.iterate(leave=[Leaving("a", stopped=4)])
    assert one.report.running == ()
    assert found(one, [*prompt(7), *oracle(asking(prompt(7), 9))]) == LONG + 4


@AHEAD
def test_a_cancelled_row_leaves_nothing_but_its_prompt(cache: PrefixCache, ahead: Ahead) -> None:
    one = driver(cache, ahead)
    one.prefill("a", asking(prompt(8), 30))
    for _ in range(5):
        one.iterate()
    drawn = one.tokens("a")
    one.iterate(leave=["a"])
    assert found(one, [*prompt(8), *drawn]) == LONG


@pytest.mark.parametrize("superseded", [True, False])
def test_a_prompt_that_is_given_up_stays_if_one_much_like_it_comes(cache: PrefixCache, superseded: bool) -> None:
    one = driver(cache)
    request = asking(prompt(9, 700))
    one.iterate(piece=("a", 512), start=[("a", request)])
    one.executor.iterate(Iteration(False, Piece("a", 60, ends=False)), [], [], one.events.extend)
    one.iterate(leave=[Leaving("a", superseded=superseded)])
    assert found(one, prompt(9, 700)) == (512 if superseded else 0)


def test_what_is_short_is_not_kept(cache: PrefixCache) -> None:
    one = driver(cache)
    run(one, "short", asking(prompt(10, 200), 20))
    assert cache.index.nodes == {}
    run(one, "long enough", asking(prompt(11, 250), 20))
    assert found(one, [*prompt(11, 250), *one.tokens("long enough")]) == 269


@pytest.mark.parametrize("caching", [Caching(), Caching(read=True), Caching(keep=Keep.RAM)])
def test_who_opts_out_takes_nothing_or_leaves_nothing(cache: PrefixCache, caching: Caching) -> None:
    one = driver(cache)
    run(one, "a", asking(prompt(12), caching=caching))
    assert found(one, prompt(12)) == (LONG if caching.keep is Keep.RAM else 0)
    run(one, "b", asking(prompt(12)))
    assert run(one, "c", asking(prompt(12), caching=caching)) == (LONG - 1 if caching.read else 0)


def test_a_model_that_cannot_be_cut_is_kept_at_boundaries_alone(cache: PrefixCache) -> None:
    one = driver(cache, trimmable=False)
    request = dataclasses.replace(asking(prompt(13), 4), boundaries=(280,))
    one.iterate(piece=("a", 280), start=[("a", request)])
    one.iterate(piece=("a", 20))
    one.finish()
    assert found(one, prompt(13)) == 280
    assert found(one, [*prompt(13), *one.tokens("a")[:3]]) == LONG + 3, "the finished generation"
    assert run(one, "b", request) == 280
    assert one.tokens("b") == one.tokens("a")


def test_a_model_that_can_be_cut_is_kept_as_its_prompt_is_processed(cache: PrefixCache) -> None:
    one, ids = driver(cache), prompt(14, 600)
    one.iterate(piece=("a", 512), start=[("a", dataclasses.replace(asking(ids), boundaries=(512,)))])
    assert (found(one, ids), cache.counters.published) == (512, 2)
    one.iterate(piece=("a", 88))
    assert (found(one, ids), cache.counters.published) == (600, 3), "what was kept is not copied again"
    one.finish()


# ------------------------------------------------------------------------------------------ checkpoints


@AHEAD
@pytest.mark.parametrize("resumable", [True, False])
def test_a_generation_that_may_be_continued_is_kept_on_the_way(
    cache: PrefixCache, ahead: Ahead, resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "_CLEAR_EVERY_STEPS", 8)
    one = driver(cache, ahead)
    request = asking(prompt(14), 40, caching=dataclasses.replace(CACHED, checkpoints=resumable))
    one.prefill("a", request)
    for _ in range(20):
        one.iterate()
    reached = found(one, [*prompt(14), *one.tokens("a")])
    assert LONG + 12 <= reached < LONG + 20 if resumable else reached == LONG
    one.finish()
    assert one.tokens("a") == oracle(request)


@AHEAD
def test_closing_keeps_the_generations_that_may_be_continued(cache: PrefixCache, ahead: Ahead) -> None:
    one = driver(cache, ahead)
    one.prefill("a", asking(prompt(15), 40, caching=dataclasses.replace(CACHED, checkpoints=True)))
    one.prefill("b", asking(prompt(16), 40))
    for _ in range(5):
        one.iterate()
    drawn = {key: one.tokens(key) for key in "ab"}
    one.executor.close()
    assert found(one, [*prompt(15), *drawn["a"]]) >= LONG + len(drawn["a"]) - 1
    assert found(one, [*prompt(16), *drawn["b"]]) == LONG


def test_a_resumed_generation_is_restored_with_its_tokens(cache: PrefixCache) -> None:
    one = driver(cache)
    whole = asking(prompt(17), 20, temperature=0.9, seed=5)
    run(one, "first", whole)
    forced = one.tokens("first")[:12]
    rest = asking(prompt(17), 20, temperature=0.9, seed=5, forced=forced)
    assert run(one, "rest", rest) == LONG + 11
    assert [*forced, *one.tokens("rest")] == one.tokens("first")


# ------------------------------------------------------------------------------------------ what goes wrong


def test_a_state_that_cannot_be_kept_fails_nobody(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(*_: object, **__: object) -> int:
        raise MemoryError

    one = driver(cache)
    monkeypatch.setattr(Space, "publish", publish)
    run(one, "a", asking(prompt(18)))
    assert one.tokens("a") == oracle(asking(prompt(18)))
    assert cache.index.nodes == {}


def test_a_state_of_another_shape_is_computed_anew(cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    one, other = driver(cache), Driver(make_executor("shallow"))
    other.executor.reuse.space = one.executor.reuse.space
    run(one, "a", asking(prompt(19)))
    run(other, "b", asking([*prompt(19), 1]))
    assert other.tokens("b") == oracle(asking([*prompt(19), 1]), "shallow")
    assert "could not be restored" in caplog.text


def test_a_row_that_held_nan_leaves_nothing(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    one = driver(cache)
    one.prefill("a", asking(prompt(20), 30))
    for _ in range(3):
        one.iterate()
    drawn = one.tokens("a")
    head = one.executor.forward.head
    monkeypatch.setattr(type(one.executor.forward), "head", lambda self, hidden: head(hidden) * mx.nan)
    one.finish()
    assert one.ends("a") == ["device_error"]
    assert found(one, [*prompt(20), *drawn]) == LONG


def test_a_piece_that_was_decided_for_another_position_is_not_run(cache: PrefixCache) -> None:
    one = driver(cache)
    run(one, "a", asking(prompt(21)))
    request = asking([*prompt(21), 1, 2, 3])
    piece = Piece("b", 100, ends=True, begin=0)
    report = one.executor.iterate(Iteration(True, piece), [("b", request)], [], one.events.extend)
    assert report.piece is None
    one.iterate(piece=("b", 3))
    one.finish()
    assert one.tokens("b") == oracle(request)


def test_what_was_kept_is_not_touched_by_rows_that_run_on_it(cache: PrefixCache) -> None:
    one = driver(cache)
    run(one, "a", asking(prompt(22)))
    space = one.executor.reuse.space
    assert space is not None
    lease = space.take([*prompt(22), 0])
    before = [bytes(node.payload.bytes()) for node in lease.match.node.path]
    for key in "bcd":
        run(one, key, asking([*prompt(22), ord(key)], 30))
    assert before == [bytes(node.payload.bytes()) for node in lease.match.node.path]
    lease.release()
