"""A membership change that fails half-way leaves the running rows as they were, bit by bit, and holds nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
import pytest
from toy_rows import composition, contents, forward, live_arrays, prepared, rows_of, same

from mlxbcd.state import geometry
from mlxbcd.state.composition import KvScheme
from mlxbcd.state.rows import Joiner, PreparedChange, Rows, commit
from mlxbcd.state.schemes import Quantised

ALLOCATING: Final = ("array", "zeros", "concatenate", "contiguous", "quantize", "eval")
"""What a change may allocate with, one way or the other."""

MADE: Final = composition("full", "window", "recurrent", "nested", kv=KvScheme(Quantised(8, 32), start=17))


class Shortage(Exception):
    """There is no memory, says the test."""


class Failing:
    """Makes the n-th call that allocates fail."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def wrap(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise Shortage
            return plain(*args, **kwargs)

        return call


@contextmanager
def failing(at: int) -> Iterator[Failing]:
    """Inside, the call number `at` that allocates fails; 0 is none."""
    fault = Failing(at)
    with pytest.MonkeyPatch.context() as patch:
        for name in ALLOCATING:
            if not isinstance(getattr(mx, name), type):
                patch.setattr(mx, name, fault.wrap(getattr(mx, name)))
        yield fault


@pytest.fixture(autouse=True)
def _small_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "SMALLEST", 16)


def running() -> Rows:
    """Rows in three classes, one of them quantised."""
    rows = rows_of(MADE, {"a": 3, "b": 9, "c": 14, "d": 15})
    forward(rows, 3)
    forward(rows, 1)
    assert rows.order == ["a", "b", "c", "d"]
    assert [rows.place(key).group.quantised for key in rows.order] == [False, False, True, True]
    return rows


def change(rows: Rows, joiners: list[Joiner]) -> PreparedChange:
    """One that makes every kind of move: a hole is filled, buffers grow and are made, a row changes its class."""
    return rows.prepare(keep=["b", "c", "d"], join=joiners, room={"b": 40})


def newcomers() -> list[Joiner]:
    return [Joiner("e", prepared(MADE, "e", 4), 5), Joiner("f", prepared(MADE, "f", 20), 30)]


def test_a_change_that_fails_at_any_allocation_leaves_everything_as_it_was() -> None:
    joiners = newcomers()
    twin = running()
    with failing(0) as counting:
        commit(change(twin, joiners))
    assert counting.calls > 20
    rows = running()
    before, order, arrays, memory = contents(rows), rows.order, live_arrays(), mx.get_active_memory()
    for at in range(1, counting.calls + 1):
        with failing(at), pytest.raises(Shortage):
            change(rows, joiners)
        assert rows.order == order
        assert mx.get_active_memory() <= memory
    assert live_arrays() == arrays
    assert same(before, contents(rows))
    commit(change(rows, joiners))
    assert mx.array_equal(forward(rows, 4), forward(twin, 4)).item()


def test_a_companion_that_fails_leaves_both_collections_as_they_were() -> None:
    target, companion, joiners = running(), running(), newcomers()
    before, arrays = contents(target), live_arrays()
    with failing(0) as counting:
        change(companion, joiners)
    for at in range(1, counting.calls + 1, 7):
        first = change(target, joiners)
        with failing(at), pytest.raises(Shortage):
            change(companion, joiners)
        del first
    assert live_arrays() == arrays
    assert same(before, contents(target))
    assert same(before, contents(companion))
    commit(change(target, joiners), change(companion, joiners))
    assert target.order == companion.order


def test_a_turn_that_fails_to_make_room_leaves_the_rows_as_they_were() -> None:
    rows = running()
    before = contents(rows)
    for at in itertools.count(1):
        try:
            with failing(at):
                rows.begin(4)
        except Shortage:
            assert rows.unsettled(4)
            assert same(before, contents(rows))
        else:
            break
    assert at > 10
    assert not rows.unsettled(4)
