"""A collection of rows: what it takes and refuses, and that its membership changes wholly or not at all."""

from __future__ import annotations

import mlx.core as mx
import pytest
from toy_rows import composition, contents, forward, live_arrays, prepared, rows_of, same

from mlxbcd.state import geometry
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit

KINDS = ("full", "window", "recurrent", "nested")


@pytest.fixture(autouse=True)
def _small_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "SMALLEST", 16)


def test_rows_run_in_the_order_of_their_classes() -> None:
    rows = rows_of(composition("full"), {"long": 20, "short": 3, "brief": 1})
    assert rows.order == ["short", "brief", "long"]
    assert [rows.place(key).group.capacity for key in rows.order] == [16, 16, 32]


def test_a_row_answers_in_company_what_it_answers_alone() -> None:
    made = composition(*KINDS)
    lengths: dict[Key, int] = {"a": 3, "b": 14, "c": 20}
    rows = rows_of(made, lengths)
    alone = {key: rows_of(made, {key: length}) for key, length in lengths.items()}
    for width in (1, 4, 1):
        answers = forward(rows, width)
        for i, key in enumerate(rows.order):
            assert mx.allclose(forward(alone[key], width)[0], answers[i], atol=1e-5).item()


def test_rows_of_a_model_that_reads_its_keys_itself_share_one_class() -> None:
    rows = rows_of(composition("full", opaque=False), {"a": 20, "b": 3})
    assert len({place.group for place in map(rows.place, rows.order)}) == 1
    commit(rows.prepare(keep=["b"]))
    forward(rows, 4)
    assert rows.lengths == {"b": 7}


def test_a_row_grows_into_a_larger_class_when_a_turn_needs_it() -> None:
    rows = rows_of(composition(*KINDS), {"a": 15, "b": 3})
    assert not rows.unsettled(1)
    assert rows.unsettled(2)
    forward(rows, 2)
    assert rows.order == ["b", "a"]
    assert rows.place("a").group.capacity == 32


def test_room_that_is_asked_for_is_there() -> None:
    rows = rows_of(composition(*KINDS), {"a": 3})
    commit(rows.prepare(room={"a": 33}))
    assert rows.place("a").group.capacity == 64
    assert not rows.unsettled(4)


@pytest.mark.parametrize("kept", [[3, 3], [1], [1, 2, 3], [-1, 0]])
def test_a_turn_cant_keep_other_tokens_than_it_added(kept: list[int]) -> None:
    rows = rows_of(composition("full"), {"a": 3, "b": 5})
    turn = rows.begin(2)
    with pytest.raises(ValueError, match="can't keep"):
        turn.resolve(kept)


def test_taking_tokens_back_leaves_each_row_as_if_it_had_not_seen_them() -> None:
    made = composition("full", "window")
    rows = rows_of(made, {"a": 3, "b": 14})
    forward(rows, 4, kept=[2, 0])
    assert rows.lengths == {"a": 5, "b": 14}
    again = rows_of(made, {"a": 5, "b": 14})
    assert mx.allclose(forward(rows, 1), forward(again, 1), atol=1e-5).item()


def test_keys_and_values_can_be_cut_back_and_recurrent_states_cannot() -> None:
    rows = rows_of(composition("full"), {"a": 3})
    rows.trim("a", 2)
    assert rows.lengths == {"a": 2}
    with pytest.raises(ValueError, match="can't be cut"):
        rows_of(composition("recurrent"), {"a": 3}).trim("a", 2)


def test_a_recurrent_state_is_not_made_up_for_a_row_that_has_none() -> None:
    rows = rows_of(composition("recurrent"), {"a": 3})
    with pytest.raises(ValueError, match="processed nothing"):
        rows.prepare(join=[Joiner("b", COLD, 1)])


def test_a_window_is_cut_back_only_as_far_as_it_is_all_there() -> None:
    rows = rows_of(composition("window"), {"a": 30})
    assert rows.retained("a") == 30
    forward(rows, 2)
    assert rows.retained("a") == 30
    forward(rows, 4)
    assert rows.retained("a") == 32
    forward(rows, 4, kept=[0])
    assert rows.retained("a") == rows.lengths["a"] == 36
    with pytest.raises(ValueError, match="can't be cut"):
        rows.extract("a", 35)


def test_membership_cant_change_inside_a_turn() -> None:
    rows = rows_of(composition("full"), {"a": 3})
    turn = rows.begin(1)
    with pytest.raises(RuntimeError, match="inside a turn"):
        rows.prepare(keep=[])
    with pytest.raises(RuntimeError, match="open already"):
        rows.begin(1)
    turn.resolve([0])
    with pytest.raises(RuntimeError, match="not open"):
        turn.resolve([0])


@pytest.mark.parametrize("width", [0, 5])
def test_a_turn_has_a_width_that_the_collection_was_made_for(width: int) -> None:
    with pytest.raises(ValueError, match="at most 4"):
        rows_of(composition("full"), {"a": 3}).begin(width)


def test_a_turn_needs_a_row() -> None:
    with pytest.raises(RuntimeError, match="at least one row"):
        Rows(composition("full")).begin(1)


def test_unknown_rows_and_rows_that_are_in_already_are_refused() -> None:
    rows = rows_of(composition("full"), {"a": 3})
    with pytest.raises(ValueError, match="not in this collection"):
        rows.prepare(keep=["a", "b"])
    with pytest.raises(ValueError, match="already"):
        rows.prepare(join=[Joiner("a", COLD, 1)])


def test_a_key_that_leaves_and_comes_back_in_one_change_has_its_new_state() -> None:
    made = composition(*KINDS)
    rows = rows_of(made, {"a": 9, "b": 3})
    commit(rows.prepare(keep=["b"], join=[Joiner("a", prepared(made, "a", 5), 6)]))
    assert rows.lengths == {"a": 5, "b": 3}
    assert same({"a": contents(rows)["a"]}, {"a": prepared(made, "a", 5).arrays})


def test_an_extract_is_independent_of_what_its_row_does_next() -> None:
    rows = rows_of(composition(*KINDS), {"a": 9, "b": 3})
    state = rows.extract("a")
    before = [mx.array(array) for array in state.arrays]
    mx.eval(before)
    forward(rows, 4)
    commit(rows.prepare(keep=["b"]))
    forward(rows, 4)
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, state.arrays, strict=True))


def test_two_collections_that_share_a_rows_buffers_do_not_see_each_others_tokens() -> None:
    made = composition(*KINDS)
    first, second, apart = rows_of(made, {"a": 10}), Rows(made, widest=4), Rows(made, widest=4)
    alone = rows_of(made, {"a": 10})
    commit(apart.prepare(join=[Joiner("b", first.extract("a"), 11)]))
    commit(second.prepare(join=[Joiner("b", first.read("a"), 11)]))
    for _ in range(2):
        answers = [forward(rows) for rows in (first, second, first, alone, apart, alone)]
        assert mx.allclose(answers[2], answers[5], atol=1e-5).item()
        assert mx.allclose(answers[1], answers[4], atol=1e-5).item()
    assert same(contents(first), contents(alone))
    assert same(contents(second), contents(apart))


def test_a_window_keeps_no_more_than_its_window() -> None:
    state = rows_of(composition("window"), {"a": 30}).extract("a")
    assert all(array.shape[2] < 8 for array in state.arrays)


def test_a_cleared_collection_holds_nothing() -> None:
    rows = rows_of(composition(*KINDS), {"a": 9, "b": 30})
    rows.clear()
    assert (len(rows), rows.order, rows.nbytes) == (0, [], 0)


def test_a_successor_is_empty_and_takes_rows_of_the_same_model() -> None:
    rows = rows_of(composition(*KINDS), {"a": 9})
    after = rows.successor()
    commit(after.prepare(join=[Joiner("a", rows.extract("a"), 10)]))
    assert mx.allclose(forward(after), forward(rows), atol=1e-5).item()


def test_a_dropped_change_changes_nothing() -> None:
    rows = rows_of(composition(*KINDS), {"a": 9, "b": 3, "c": 20})
    before, arrays = contents(rows), live_arrays()
    change = rows.prepare(keep=["b"], join=[Joiner("d", rows.extract("a"), 40)], room={"b": 33})
    del change
    assert same(before, contents(rows))
    assert live_arrays() == arrays


def test_two_collections_change_together_or_not_at_all() -> None:
    target, companion = rows_of(composition(*KINDS), {"a": 9, "b": 3}), rows_of(composition("full"), {"a": 9, "b": 3})
    before = contents(target), contents(companion)
    first = target.prepare(keep=["b"])
    with pytest.raises(ValueError, match="not in this collection"):
        companion.prepare(keep=["c"])
    assert same(before[0], contents(target))
    assert same(before[1], contents(companion))
    commit(first, companion.prepare(keep=["b"]))
    assert target.order == companion.order == ["b"]


def test_a_row_that_held_nan_leaves_a_clean_slot() -> None:
    made = composition("full", "window", "nested")
    rows = rows_of(made, {"a": 14, "b": 9, "c": 12})
    commit(rows.prepare(keep=["a", "c"], join=[Joiner("b", _poisoned(rows.extract("b")), 10)]))
    rows.scrub("b")
    commit(rows.prepare(keep=["a", "c"]))
    commit(rows.prepare(join=[Joiner("d", prepared(made, "d", 2), 3)]))
    answers = forward(rows, 3)
    alone = rows_of(made, {"d": 2})
    assert mx.allclose(answers[rows.order.index("d")], forward(alone, 3)[0], atol=1e-5).item()


def _poisoned(state: RowState) -> RowState:
    """The same state with NaN in every array."""
    for array in state.arrays:
        array[...] = mx.nan
    mx.eval(state.arrays)
    return state
