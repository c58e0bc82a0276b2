"""What rows cost in memory: little more than their tokens, and no copies while they run."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from toy_rows import BYTES_PER_TOKEN, DIM, HEADS, composition, forward, live_arrays, prepared

from mlxbcd.cache.service import PrefixCache
from mlxbcd.state import geometry
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Joiner, Rows, RowState, commit
from mlxbcd.state.schemes import Plain
from mlxbcd.state.store import Prefix


def filled(made: Composition, lengths: dict[Key, int]) -> Rows:
    """Rows of full attention with random keys and values, evaluated; nothing else is alive."""
    rows = Rows(made, widest=4)
    for key, length in lengths.items():
        commit(rows.prepare(join=[Joiner(key, random_state(made, length), length + 1)]))
        settle(rows)
    return rows


def random_state(made: Composition, length: int) -> RowState:
    def part() -> mx.array:
        return mx.random.normal((1, HEADS, length, DIM))

    state = RowState(length, tuple(Prefix((part(), part()), 0, Plain()) for _ in made.kinds))
    mx.eval(state.arrays)
    return state


def settle(rows: Rows) -> None:
    """Evaluate what a commit left to be written."""
    mx.eval([array for layout in rows.layouts for array in layout.arrays()])


def peak_above_active(work: Any) -> int:
    """Bytes by which `work` exceeds, at its worst, what is allocated when it begins."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return max(0, mx.get_peak_memory() - before)


@pytest.fixture(scope="module")
def eight() -> Rows:
    """Eight rows of 4k tokens in two layers."""
    return filled(composition("full", "full"), {key: 4096 + key for key in range(8)})


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("lengths", ["equal", "ragged"])
def test_a_decode_step_copies_no_keys_and_values(layers: int, lengths: str) -> None:
    rows = filled(composition(*["full"] * layers), {key: 4096 - key * (lengths == "ragged") for key in range(8)})
    forward(rows)
    for width in (1, 4):
        assert peak_above_active(lambda width=width: forward(rows, width)) <= 0.05 * rows.nbytes


def test_a_view_that_somebody_holds_makes_the_next_step_copy_so_the_measure_can_fail(eight: Rows) -> None:
    forward(eight)
    view = eight.layouts[0].arrays()[0][:1, :, :1]
    mx.eval(view)
    assert peak_above_active(lambda: forward(eight)) > 0.2 * eight.nbytes


def test_an_extract_that_somebody_holds_makes_nothing_copy(eight: Rows) -> None:
    forward(eight)
    held = eight.extract(3)
    assert peak_above_active(lambda: forward(eight)) <= 0.05 * eight.nbytes
    assert held.nbytes == 2 * held.length * BYTES_PER_TOKEN


def test_taking_tokens_back_copies_nothing(eight: Rows) -> None:
    forward(eight)
    kept = [key % 5 for key in range(8)]
    assert peak_above_active(lambda: forward(eight, 4, kept)) <= 0.05 * eight.nbytes


def test_joining_a_free_slot_allocates_no_more_than_the_joiner() -> None:
    made = composition("full", "full")
    rows = filled(made, dict.fromkeys(range(7), 4096))
    state = random_state(made, 4096)

    def join() -> None:
        commit(rows.prepare(join=[Joiner(7, state, 4097)]))
        settle(rows)

    assert peak_above_active(join) <= 1.05 * state.nbytes


def test_a_row_that_is_alone_takes_its_buffers_along() -> None:
    made = composition("full", "full")
    second = Rows(made, widest=1)

    def move(first: Rows) -> None:
        commit(second.prepare(join=[Joiner(0, first.read(0), 4097)]))
        settle(second)

    left = [filled(made, {0: 4096})]
    assert peak_above_active(lambda: move(left[0])) <= 4096
    left.clear()
    assert peak_above_active(lambda: forward(second)) <= 0.05 * second.nbytes, "nobody else holds them"


def test_a_row_that_is_restored_costs_its_buffers_once() -> None:
    made, length = composition("full", "full"), 4000
    rows, capacity = Rows(made), geometry.capacity_for(length + 1)
    cache = PrefixCache(1 << 30)
    space = cache.space("model", trimmable=True)
    space.publish(range(length), length, rows.layouts, random_state(made, length), disk=False)
    lease = space.take(range(length + 1))

    def restore() -> None:
        state = lease.restore(rows.layouts, capacity)
        commit(rows.prepare(join=[Joiner(0, state, length + 1)]))
        settle(rows)

    assert peak_above_active(restore) <= 1.01 * capacity * len(made.kinds) * BYTES_PER_TOKEN
    assert lease.length == rows.lengths[0] == length
    lease.release()
    cache.close()


def test_joining_a_small_class_leaves_the_large_ones_alone() -> None:
    made = composition("full")
    rows = filled(made, {0: 30_000, 1: 100, 2: 100})
    large = buffers(rows, rows.place(0).group)
    state = random_state(made, 200)

    def join() -> None:
        commit(rows.prepare(join=[Joiner(3, state, 201), Joiner(4, state, 201)]))
        settle(rows)

    # Three rows have four slots, five have eight: the small class is copied, once, and nothing else.
    assert peak_above_active(join) <= 8 * geometry.SMALLEST * BYTES_PER_TOKEN + 2.1 * state.nbytes
    assert all(a is b for a, b in zip(buffers(rows, rows.place(0).group), large, strict=True))


def test_a_row_that_grows_leaves_the_other_classes_alone() -> None:
    rows = filled(composition("full"), {0: 30_000, 1: geometry.SMALLEST - 1, 2: 100})
    large, small = buffers(rows, rows.place(0).group), rows.layouts[0].stores[rows.place(2).group]
    grown = 2 * geometry.SMALLEST * BYTES_PER_TOKEN

    def grow() -> None:
        commit(rows.prepare(room={1: geometry.SMALLEST + 1}))
        settle(rows)

    assert peak_above_active(grow) <= 2.1 * grown
    assert all(a is b for a, b in zip(buffers(rows, rows.place(0).group), large, strict=True))
    assert rows.layouts[0].stores[rows.place(2).group] is small


def test_a_row_that_leaves_costs_at_most_the_row_that_takes_its_slot(eight: Rows) -> None:
    state = eight.extract(0)

    def leave() -> None:
        commit(eight.prepare(keep=[key for key in eight.order if key != 0]))
        settle(eight)

    assert peak_above_active(leave) <= 1.05 * state.nbytes
    commit(eight.prepare(join=[Joiner(0, state, state.length + 1)]))
    settle(eight)


def test_rows_of_four_thousand_tokens_cost_a_tenth_more_than_their_tokens(eight: Rows) -> None:
    used = sum(eight.lengths.values()) * 2 * BYTES_PER_TOKEN
    assert used <= eight.nbytes <= 1.1 * used


def test_one_long_row_does_not_make_short_ones_long() -> None:
    rows = Rows(composition("full"))
    for key, length in enumerate([32_768] + [200] * 7):
        commit(rows.prepare(join=[Joiner(key, random_state(rows.composition, length), length + 1)]))
        settle(rows)
    used = sum(rows.lengths.values()) * BYTES_PER_TOKEN
    assert rows.nbytes <= 2.2 * used


def test_memory_goes_back_when_rows_have_left() -> None:
    rows = filled(composition("full"), dict.fromkeys(range(8), 1000))
    full = rows.nbytes
    commit(rows.prepare(keep=[0]))
    assert rows.nbytes <= full / 4
    rows.clear()
    assert rows.nbytes == 0


@pytest.mark.parametrize("steps", [1500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_arrays_and_memory_stay_bounded_over_any_number_of_changes(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "SMALLEST", 16)
    made = composition("full", "window", "nested")
    rng = random.Random(7)
    rows, born = Rows(made, widest=4), 0
    states = [prepared(made, length, length) for length in (1, 7, 15, 30)]
    arrays: list[int] = []
    memory: list[int] = []
    for step in range(steps):
        keep = [key for key in rows.order if rows.lengths[key] < 90 and rng.random() > 0.1]
        joiners = []
        if len(keep) < 16 and rng.random() < 0.5:
            born += 1
            state = rng.choice([*states, rows.extract(keep[0])] if keep else states)
            joiners = [Joiner(born, state, state.length + rng.randint(1, 9))]
        if joiners or len(keep) < len(rows):
            commit(rows.prepare(keep=keep, join=joiners))
        if len(rows):
            forward(rows, rng.randint(1, 4))
        if step % 250 == 249:
            arrays.append(live_arrays())
            memory.append(mx.get_active_memory() - sum(layout.nbytes for layout in rows.layouts))
    assert born > steps / 4
    assert max(arrays[1:]) <= max(arrays[0] + 40, 1.5 * arrays[0])
    assert max(memory) <= min(memory) + 1_000_000
    rows.clear()
    assert rows.nbytes == 0


def buffers(rows: Rows, group: geometry.Class) -> list[mx.array]:
    """The buffers of one class, over all layers."""
    return [part for layout in rows.layouts for part in layout.stores[group].parts]
