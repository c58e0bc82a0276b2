"""A model's grammars: compiled off the loop, once however many ask, kept for a while and never waited for too long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from test_grammar import TOKENS

from mlxbcd.errors import ServeError
from mlxbcd.residency import grammars
from mlxbcd.residency.grammars import Grammars
from mlxbcd.sampling.grammar import Grammar, Vocabulary
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.text.workers import TextWorkers

A, B = Source("regex", "a+"), Source("regex", "b+")


class Counting(Vocabulary):
    """The tests' vocabulary; it counts what it compiles, and can be made to wait."""

    def __init__(self) -> None:
        self.tokens, self.width = TOKENS.tokens, TOKENS.width
        self.compiled: list[Source] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, source: Source) -> Grammar:
        self.gate.wait(10)
        self.compiled.append(source)
        self.threads.add(threading.get_ident())
        return super().compile(source)


@pytest.fixture
async def workers() -> AsyncIterator[TextWorkers]:
    workers = TextWorkers()
    yield workers
    await workers.close()


async def test_one_compiling_serves_everyone_who_asks(workers: TextWorkers) -> None:
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers)
    first, second, other = await asyncio.gather(kept.get(A), kept.get(A), kept.get(B))
    assert first is second is await kept.get(A)
    assert other is await kept.get(B)
    assert sorted(vocabulary.compiled, key=repr) == sorted([A, B], key=repr)
    assert threading.get_ident() not in vocabulary.threads, "never on the loop's thread"


async def test_the_vocabulary_is_made_when_it_is_needed_and_once(workers: TextWorkers) -> None:
    made = []

    def make() -> Vocabulary:
        made.append(threading.get_ident())
        return TOKENS

    kept = Grammars(make, workers)
    assert made == []
    await asyncio.gather(kept.get(A), kept.get(B))
    assert len(made) == 1
    assert made[0] != threading.get_ident()


async def test_the_grammar_used_longest_ago_goes_first(workers: TextWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_KEPT", 2)
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers)
    for source in (A, B, A, Source("regex", "c+"), A, B):
        await kept.get(source)
    assert vocabulary.compiled == [A, B, Source("regex", "c+"), B]


async def test_kept_grammars_are_bounded_in_size(workers: TextWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_CHARACTERS", 5)
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers)
    for source in (A, B, Source("regex", "abc"), Source("regex", "abcdefgh"), A):
        await kept.get(source)
    assert len(vocabulary.compiled) == 5
    assert "1 kept" in repr(kept)


async def test_an_error_reaches_everyone_and_is_not_kept(workers: TextWorkers) -> None:
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers)
    bad = Source("regex", "(")
    for _ in range(2):
        results = await asyncio.gather(kept.get(bad), kept.get(bad), return_exceptions=True)
        assert [getattr(result, "code", None) for result in results] == ["grammar_invalid"] * 2
    assert vocabulary.compiled == [bad, bad]


async def test_a_vocabulary_that_failed_is_tried_again(workers: TextWorkers) -> None:
    vocabularies = iter([ServeError("bad_request", "not this one"), TOKENS])

    def make() -> Vocabulary:
        made = next(vocabularies)
        if isinstance(made, ServeError):
            raise made
        return made

    kept = Grammars(make, workers)
    with pytest.raises(ServeError, match="not this one"):
        await kept.get(A)
    assert (await kept.get(A)).start()


async def test_nobody_waits_longer_than_the_limit_and_a_late_grammar_is_kept(workers: TextWorkers) -> None:
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers, patience=0.05)
    vocabulary.gate.clear()
    with pytest.raises(ServeError, match="simplify") as refused:
        await kept.get(A)
    assert refused.value.code == "grammar_invalid"
    vocabulary.gate.set()
    patient = Grammars(lambda: vocabulary, workers)
    await patient.get(A)
    while "compiling [S" in repr(kept):
        await asyncio.sleep(0)
    assert (await kept.get(A)).start()
    assert vocabulary.compiled == [A, A]


async def test_one_who_leaves_does_not_stop_the_compiling_for_others(workers: TextWorkers) -> None:
    vocabulary = Counting()
    kept = Grammars(lambda: vocabulary, workers)
    vocabulary.gate.clear()
    leaves, stays = asyncio.ensure_future(kept.get(A)), asyncio.ensure_future(kept.get(A))
    await asyncio.sleep(0)
    leaves.cancel()
    vocabulary.gate.set()
    assert (await stays).start()
    assert vocabulary.compiled == [A]
