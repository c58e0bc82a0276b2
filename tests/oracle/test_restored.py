"""A row that is restored, from RAM or from the disk, at any kind of boundary, gives the logits of a cold run."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.cache.index import Why
from mlxbcd.model.forward import Forward
from mlxbcd.model.load import load as load_model
from mlxbcd.state.composition import KvScheme, inspect
from mlxbcd.state.geometry import capacity_for
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from mlxbcd.state.schemes import Quantised
from oracle import coverage
from oracle.alone import LENGTH, texts
from oracle.conversations import CHUNK, Conversation, caching, restored_state, settled, space_of
from oracle.crowd import Crowd, Newcomer, Saved
from oracle.families import FAMILIES, VOCABULARY, Family, load
from oracle.probes import PASS

TABLE = coverage.read()
BATCHING = [name for name in FAMILIES if TABLE[name]["batch"] == PASS]
KINDS = ["llama", "gemma3_text", "mamba2", "qwen3_5", "falcon_h1", "deepseek_v2"]
"""Full attention, windows, recurrent, hybrid, both in one layer, latent attention."""
QUANTISED = KvScheme(Quantised(bits=8, group_size=32), start=11)


def ids_of(name: str, n: int) -> list[int]:
    rng = random.Random(f"{name} {n}")
    return [rng.randrange(VOCABULARY) for _ in range(n)]


def check_boundaries(name: str, directory: Path) -> None:
    """One family, from RAM and after a restart, with a next turn, a branch, a repeat and an interior boundary."""
    family, ids = load(name), ids_of(name, 46)
    with caching(directory) as cache:
        space = space_of(cache, family.composition)
        talk = Conversation(family, space)
        assert talk.request(ids[:30], 21, boundaries=(13,)) == 0
        assert talk.request(ids, 34) == 30, "the finished generation is extended"
        assert talk.request(ids[:34], 34) == 33, "a repeat is all but its last token"
        assert talk.request(ids[:25], 21) == 20, "the prompt's boundary"
        branch = [*ids[:16], (ids[16] + 1) % VOCABULARY, *ids_of(name, 8)]
        assert talk.request(branch, 24) == (16 if space.trimmable else 13), "a branch inside"
    with caching(directory) as cache:
        talk = Conversation(family, space_of(cache, family.composition), read=True)
        assert cache.index.ram.bytes == 0
        assert talk.request(ids, 34) == 33, "after a restart"
        assert talk.request([*branch[:17], 2, 3], 18) == (17 if talk.space.trimmable else 13)
        assert cache.tier is not None
        assert cache.tier.failed == 0


@pytest.mark.parametrize("name", KINDS)
def test_every_boundary_gives_the_logits_of_a_cold_run(name: str, tmp_path: Path) -> None:
    check_boundaries(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BATCHING if name not in KINDS])
def test_every_boundary_of_every_family_gives_the_logits_of_a_cold_run(name: str, tmp_path: Path) -> None:
    check_boundaries(name, tmp_path)


def test_a_quantised_row_is_restored_as_it_was_and_never_before_it_was_quantised(tmp_path: Path) -> None:
    family = load("llama")
    composition = family.quantised(QUANTISED)
    ids = ids_of("llama", 46)
    with caching(tmp_path) as cache:
        talk = Conversation(family, space_of(cache, composition), composition=composition)
        assert talk.request(ids[:30], 21, boundaries=(8,)) == 0
        assert talk.request(ids, 34) == 30
        assert talk.request([*ids[:10], *ids_of("other", 15)], 20) == 8, "what was plain at a planned end"
        assert talk.space.explain([*ids[:12], 1, 2]).why is Why.CONVERTED
    with caching(tmp_path) as cache:
        talk = Conversation(family, space_of(cache, composition), composition=composition, read=True)
        assert talk.request(ids, 34) == 33


@pytest.mark.parametrize("name", KINDS)
def test_restored_running_and_cold_rows_share_a_batch(name: str, tmp_path: Path) -> None:
    """States from RAM, from the disk and from nothing join rows that run, and all go on as if alone."""
    family = load(name)
    first = texts(name)[0]
    with caching(tmp_path) as cache:
        talk = Conversation(family, space_of(cache, family.composition))
        for prompt, end in ((12, 18), (28, 33)):
            talk.request(first.tokens[:end], prompt)
    with caching(tmp_path) as cache:
        space = space_of(cache, family.composition)
        crowd = Crowd(family)
        crowd.admit([Newcomer(1, 9), Newcomer(0, 20)])
        crowd.step(2)
        leases = [space.fetch(first.tokens[:n], lambda *_: True) for n in (19, 34, 34)]
        assert [lease.length for lease in leases] == [18, 33, 33]
        saved = [Saved(0, restored_state(lease, family.composition)) for lease in leases]
        for lease in leases:
            lease.release()
        crowd.restore(saved, newcomers=[1])
        for width in (1, 3, 2, 1, 1):
            crowd.step(width)
        crowd.check_states()


trees = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 40),
        st.integers(1, 9),
        st.integers(0, 6),
        st.sampled_from([0, 0, 5_000, 1 << 30]),
    ),
    min_size=2,
    max_size=6,
)
"""Requests: the earlier one it branches from, after how many of its tokens, tokens that follow, tokens generated, and
bytes that go from RAM before it, which leaves them on the disk alone."""


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
@given(trees)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_random_conversation_trees_give_the_logits_of_cold_runs(
    name: str, requests: list[tuple[int, int, int, int, int]]
) -> None:
    family = load(name)
    rng = random.Random(str(requests))
    with TemporaryDirectory() as directory, caching(Path(directory)) as cache:
        talk = Conversation(family, space_of(cache, family.composition), read=True)
        told: list[list[int]] = [[]]
        published: set[tuple[int, ...]] = set()
        for parent, after, more, generated, shed in requests:
            settled(cache)
            cache.shed(shed)
            kept = told[parent % len(told)][:after]
            prompt = kept + [rng.randrange(VOCABULARY) for _ in range(more)]
            ids = prompt + [rng.randrange(VOCABULARY) for _ in range(generated)]
            if len(prompt) < 2:
                continue
            restored = talk.request(ids, len(prompt))
            usable = [n for n in range(2, len(prompt)) if tuple(prompt[:n]) in published]
            if talk.space.trimmable:
                usable = [n for n in range(2, len(prompt)) if any(p[:n] == tuple(prompt[:n]) for p in published)]
            assert restored == max(usable, default=0)
            published |= {tuple(prompt[:-1]), tuple(ids)}
            told.append(ids)


@pytest.fixture(scope="module")
def real(model_directory: Path) -> Family:
    """The default model, as it is served."""
    model = load_model(model_directory).model
    return Family("default", model, Forward(model), inspect(model, "llama"))


@pytest.mark.model
def test_every_boundary_of_the_real_model_gives_the_logits_of_a_cold_run(real: Family, tmp_path: Path) -> None:
    ids = ids_of("real", LENGTH)
    branch = [*ids[:20], *ids_of("branch", 12)]
    with caching(tmp_path) as cache:
        talk = Conversation(real, space_of(cache, real.composition))
        assert talk.request(ids[:30], 21) == 0
        assert talk.request(ids, 40) == 30, "the finished generation is extended"
        assert talk.request(ids[:40], 40) == 39, "a repeat is all but its last token"
        assert talk.request(branch, 30) == 20, "a branch inside a block"
    with caching(tmp_path) as cache:
        talk = Conversation(real, space_of(cache, real.composition), read=True)
        assert talk.request(ids, 40) == 39, "after a restart"
        assert talk.request([*branch[:25], 2, 3], 27) == 25


@pytest.mark.model
def test_quantised_rows_of_the_real_model_go_on_as_if_they_had_never_been_away(real: Family, tmp_path: Path) -> None:
    """Over 30 layers of rounded values no two ways to cut a text into forwards agree, so both cut it alike."""
    ids = ids_of("real", 40)
    composition = inspect(real.model, "llama", kv=QUANTISED)
    rows = Rows(composition, widest=CHUNK)
    with caching(tmp_path) as cache:
        talk = Conversation(real, space_of(cache, composition), composition=composition)
        commit(rows.prepare(join=[Joiner("row", COLD, 40)]))
        for begin in range(0, 32, CHUNK):
            talk.advance(rows, ids[begin : begin + CHUNK])
        talk.publish(rows, tuple(ids))
        wanted = talk.advance(rows, ids[32:])
    with caching(tmp_path) as cache:
        talk = Conversation(real, space_of(cache, composition), composition=composition, read=True)
        lease = talk.find(ids)
        state = lease.restore(rows.layouts, capacity_for(40))
        lease.release()
        assert (state.length, state.converted_at) == (32, 16)
        again = Rows(composition, widest=CHUNK)
        commit(again.prepare(join=[Joiner("row", state, 40)]))
        assert mx.allclose(talk.advance(again, ids[32:]), wanted, atol=1e-6).item()


def test_an_entry_serves_two_requests_at_once_and_is_as_it_was_afterwards(tmp_path: Path) -> None:
    family, text = load("qwen3_5"), texts("qwen3_5")[0]
    with caching() as cache:
        talk = Conversation(family, space_of(cache, family.composition))
        talk.request(text.tokens[:24], 20)
        one, two = talk.find(text.tokens[:25]), talk.find(text.tokens[:25])
        rows = Rows(family.composition, widest=8)
        states = [lease.restore(rows.layouts) for lease in (one, two)]
        one.release()
        one.release()
        commit(rows.prepare(join=[Joiner(key, state, 48) for key, state in zip("ab", states, strict=True)]))
        before = [mx.array(array) for array in states[1].arrays]
        mx.eval(before)
        turn = rows.begin(4)
        with turn.forward() as caches:
            mx.eval(family.forward.hidden(mx.array([text.tokens[24:28]] * 2), caches), turn.arrays())
        turn.resolve()
        assert all(mx.array_equal(a, b).item() for a, b in zip(before, states[1].arrays, strict=True))
        again = two.restore(rows.layouts)
        assert all(mx.array_equal(a, b).item() for a, b in zip(before, again.arrays, strict=True))
        two.release()


def test_what_another_model_stored_is_never_found(tmp_path: Path) -> None:
    family, text = load("llama"), texts("llama")[0]
    with caching(tmp_path) as cache:
        Conversation(family, space_of(cache, family.composition)).request(text.tokens[:24], 20)
        settled(cache)
        lease = space_of(cache, family.composition, "other weights").take(text.tokens[:24])
        lease.release()
        assert lease.length == 0
