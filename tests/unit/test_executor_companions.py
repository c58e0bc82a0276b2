"""What a drafter keeps of a row: found by the next turn, of exactly the tokens that it says, never another token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from tiny import VOCABULARY, Driver, make_request, oracle, parts

from mlxbcd.cache.service import PrefixCache
from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Prefilled
from mlxbcd.plan.request import Caching, Keep, Request
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.draft_model import CHUNK, ModelDrafter
from mlxbcd.spec.drafter import Asked
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit

CACHED = Caching(read=True, keep=Keep.RAM)
LONG = 300
AHEAD = pytest.mark.parametrize("ahead", list(Ahead))


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    cache = PrefixCache(1 << 30)
    yield cache
    assert cache.leases == 0
    cache.close()


def drafted(
    cache: PrefixCache, *, by: str = "llama", of: str = "twin", ahead: Ahead = Ahead.BUILD
) -> tuple[Driver, ModelDrafter]:
    """A model that drafts for itself, as deep as may be, since nobody has measured what verifying costs.

    Args:
        by: another model that drafts instead.
        of: names its part of the cache.
    """
    forward, composition = parts("llama")
    drafter = ModelDrafter(*parts(by), VOCABULARY)
    executor = Executor(forward, composition, VOCABULARY, ahead, verify=VerifyCosts(), drafter=drafter)
    space = executor.reuse.space = cache.space("tiny", trimmable=True)
    space.companions = cache.space(of, trimmable=True)
    return Driver(executor), drafter


def prompt(seed: int) -> list[int]:
    return [(seed * 131 + i * 37 + i * i) % 199 for i in range(LONG)]


def asking(ids: Sequence[int], max_tokens: int = 30, *, caching: Caching = CACHED, draft: bool = True) -> Request:
    request = make_request(ids, max_tokens, temperature=0.8, seed=3)
    return dataclasses.replace(request, caching=caching, drafts=frozenset({"model"} if draft else ()))


def begin(driver: Driver, key: str, request: Request) -> None:
    """Process the prompt."""
    driver.iterate(start=[(key, request)])
    restored = next(e.position for e in driver.events if isinstance(e, Prefilled) and e.key == key)
    driver.iterate(piece=(key, len(request.prompt) - restored))


def run(driver: Driver, key: str, request: Request) -> list[int]:
    begin(driver, key, request)
    driver.finish()
    return driver.tokens(key)


def kept(driver: Driver, ids: Sequence[int]) -> int:
    """Tokens of a text whose companion is kept."""
    space = driver.executor.reuse.space
    assert space is not None
    assert space.companions is not None
    return space.companions.explain([*ids, 0]).ram


def last_logits(drafter: ModelDrafter, state: RowState, token: int) -> mx.array:
    """What the draft model makes of a token behind a state."""
    rows = Rows(drafter.composition)
    commit(rows.prepare(join=[Joiner("row", state, state.length + 1)]))
    turn = rows.begin(1)
    hidden = drafter.forward.hidden(mx.array([[token]]), turn.caches)
    turn.resolve()
    return drafter.forward.head(hidden)[0, -1]


def anew(drafter: ModelDrafter, text: Sequence[int]) -> RowState:
    rows = Rows(drafter.composition, widest=len(text))
    commit(rows.prepare(join=[Joiner("row", COLD, len(text))]))
    turn = rows.begin(len(text))
    drafter.forward.hidden(mx.array([list(text)]), turn.caches)
    turn.resolve()
    return rows.extract("row")


@AHEAD
def test_the_next_turn_is_drafted_for_at_once(cache: PrefixCache, ahead: Ahead) -> None:
    one, drafter = drafted(cache, ahead=ahead)
    drawn = run(one, "first", asking(prompt(1)))
    assert drawn == oracle(asking(prompt(1)))
    text = [*prompt(1), *drawn]
    assert kept(one, text) >= len(text) - 2
    request = asking([*text, 5, 6, 7])
    begin(one, "second", request)
    one.iterate()
    assert len(one.tokens("second")) > 2, "its first round was drafted"
    companion = drafter.capture("second")
    row = [*request.prompt, *one.tokens("second")]
    wanted = last_logits(drafter, anew(drafter, row[: companion.length]), 9)
    assert mx.allclose(last_logits(drafter, companion.state, 9), wanted, rtol=1e-3, atol=1e-3).item()
    one.finish()
    assert one.tokens("second") == oracle(request)


def test_without_anything_kept_the_text_is_read_first(cache: PrefixCache) -> None:
    one, _ = drafted(cache)
    drawn = run(one, "first", asking(prompt(2)))
    request = asking([*prompt(2), *drawn, 5], caching=dataclasses.replace(CACHED, read=False))
    begin(one, "second", request)
    one.iterate()
    assert len(one.tokens("second")) < 3
    one.finish()
    assert one.tokens("second") == oracle(request)


def test_what_was_drafted_ahead_of_the_text_is_left_out(cache: PrefixCache) -> None:
    """A row may end while guesses about it are out."""
    one, drafter = drafted(cache)
    request = asking(prompt(3))
    begin(one, "a", request)
    for _ in range(LONG // CHUNK + 2):
        one.iterate()
    text = [*prompt(3), *one.tokens("a")]
    covered = len(text) - 1
    sampler = RowSampler(request.sampling, text, VOCABULARY, len(one.tokens("a")))
    owed = len(drafter._own.owed["a"])
    drafter.draft([Asked("a", text[-1], sampler, 4)], 4)
    assert drafter._own.rows.lengths["a"] == covered + 4
    state = drafter.held("a", covered)
    assert state is not None
    assert (state.length, owed < CHUNK) == (covered, True)
    one.iterate(leave=[Leaving("a", stopped=len(one.tokens("a")))])
    assert kept(one, text) in (covered, covered + 1)
    space = one.executor.reuse.space
    assert space is not None
    assert space.companions is not None
    lease = space.companions.take(text)
    restored = lease.restore(drafter.kept)
    lease.release()
    wanted = last_logits(drafter, anew(drafter, text[: restored.length]), 9)
    assert mx.allclose(last_logits(drafter, restored, 9), wanted, rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("how", ["not kept", "not drafted"])
def test_a_request_may_leave_nothing(cache: PrefixCache, how: str) -> None:
    one, _ = drafted(cache)
    caching = Caching() if how == "not kept" else CACHED
    drawn = run(one, "a", asking(prompt(4), caching=caching, draft=how != "not drafted"))
    assert kept(one, [*prompt(4), *drawn]) == 0


def test_another_drafter_finds_nothing_of_it(cache: PrefixCache) -> None:
    one, _ = drafted(cache)
    drawn = run(one, "a", asking(prompt(5)))
    other, _ = drafted(cache, of="another")
    assert kept(other, [*prompt(5), *drawn]) == 0
    request = asking([*prompt(5), *drawn, 8])
    assert run(other, "b", request) == oracle(request)


def test_a_companion_that_does_not_fit_is_read_anew(cache: PrefixCache, caplog: pytest.LogCaptureFixture) -> None:
    one, _ = drafted(cache)
    drawn = run(one, "a", asking(prompt(6)))
    other, _ = drafted(cache, by="shallow")
    request = asking([*prompt(6), *drawn, 8])
    assert run(other, "b", request) == oracle(request)
    assert "could not be restored" in caplog.text
