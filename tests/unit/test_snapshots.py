"""Where a prompt's state is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.cache.index import BLOCK
from mlxbcd.engine.scheduler import Policy
from mlxbcd.plan.snapshots import INTERVAL, LEAST, STRIDE, boundaries

lengths = st.integers(0, 40_000)


def test_a_state_that_can_be_cut_is_kept_as_it_grows_wherever_texts_may_part() -> None:
    assert boundaries(512, stable=500, shared=300, matched=700, trimmable=True) == ()
    assert boundaries(1500, stable=1490, shared=300, matched=700, trimmable=True) == (512, 1024)


def test_keeping_on_the_way_plans_no_ends_of_its_own_and_leaves_whole_blocks() -> None:
    assert STRIDE % Policy().planned_chunk == STRIDE % BLOCK == 0


def test_else_it_is_kept_where_the_next_turn_and_other_chats_go_on() -> None:
    assert boundaries(5000, stable=4990, shared=300, matched=700, trimmable=False) == (300, 700, 4990)
    assert boundaries(5000, stable=5000, trimmable=False) == (4999,)
    assert boundaries(20_000, stable=20_000, trimmable=False) == (8192, 16_384, 19_999)


def test_what_is_restored_is_not_kept_again() -> None:
    assert boundaries(5000, stable=4990, shared=300, matched=700, reused=700, trimmable=False) == (4990,)


@given(lengths, lengths, lengths, lengths, lengths)
def test_boundaries_are_ascending_long_enough_and_inside(
    total: int, stable: int, shared: int, matched: int, reused: int
) -> None:
    found = boundaries(total, stable=stable, shared=shared, matched=matched, reused=reused, trimmable=False)
    assert list(found) == sorted({*found})
    assert all(LEAST <= n < total and n <= stable and n > reused for n in found)
    gaps = [b - a for a, b in zip((reused, *found), found, strict=False)]
    assert all(gap <= INTERVAL for gap in gaps[1:])
