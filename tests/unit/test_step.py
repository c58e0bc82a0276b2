"""The geometry of one forward: what it refuses, what it reads, and which keys a query sees."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlxbcd.state.geometry import Class
from mlxbcd.state.step import Segment, Step

SMALL, LARGE = Class(16), Class(32)


def test_a_forward_that_would_write_past_a_rows_class_is_refused() -> None:
    with pytest.raises(ValueError, match="can't take 2 more positions"):
        Step([3, 15], 2, [Segment(0, 2, SMALL)])


def test_a_forward_before_a_rows_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match="can't take"):
        Step([-1], 1, [Segment(0, 1, SMALL)])


def test_each_class_has_a_capacity_of_its_own() -> None:
    Step([14, 30], 2, [Segment(0, 1, SMALL), Segment(1, 2, LARGE)])
    with pytest.raises(ValueError, match="can't take"):
        Step([14, 31], 2, [Segment(0, 1, SMALL), Segment(1, 2, LARGE)])


def test_rows_of_one_length_share_one_offset() -> None:
    assert Step([5, 5], 1, [Segment(0, 2, SMALL)]).offset == 5


def test_rows_of_several_lengths_have_an_offset_each() -> None:
    offset = Step([5, 7, 0], 1, [Segment(0, 3, SMALL)]).offset
    assert isinstance(offset, mx.array)
    assert (offset.dtype, offset.tolist()) == (mx.int32, [5, 7, 0])


def test_attention_reads_up_to_the_longest_row_of_a_class_and_never_past_its_ring() -> None:
    segments = [Segment(0, 2, SMALL), Segment(2, 3, LARGE)]
    step = Step([3, 6, 20], 4, segments)
    assert [step.reach(segment, segment.group.capacity) for segment in segments] == [10, 24]
    assert step.reach(segments[0], 8) == 8


def test_spare_slots_are_written_from_their_first_position() -> None:
    segment = Segment(0, 2, SMALL)
    index = Step([3, 6], 2, [segment]).indices(segment, 4, 16)
    assert index[:, 0, :, 0].tolist() == [[3, 4], [6, 7], [0, 1], [0, 1]]


def test_positions_go_round_a_ring() -> None:
    segment = Segment(0, 2, SMALL)
    index = Step([3, 6], 4, [segment]).indices(segment, 2, 8)
    assert index[:, 0, :, 0].tolist() == [[3, 4, 5, 6], [6, 7, 0, 1]]


def test_rows_of_one_length_need_no_mask_to_decode_and_a_causal_one_for_several_tokens() -> None:
    segment = Segment(0, 2, SMALL)
    assert Step([5, 5], 1, [segment]).mask(segment, 16, None, as_array=False) is None
    assert Step([5, 5], 3, [segment]).mask(segment, 16, None, as_array=False) == "causal"
    assert isinstance(Step([5, 5], 3, [segment]).mask(segment, 16, None, as_array=True), mx.array)


def test_masks_and_indices_are_built_once_for_all_layers() -> None:
    segment = Segment(0, 2, SMALL)
    step = Step([5, 7], 1, [segment])
    assert step.mask(segment, 16, None, as_array=False) is step.mask(segment, 16, None, as_array=False)
    assert step.mask(segment, 16, 4, as_array=False) is not step.mask(segment, 16, None, as_array=False)
    assert step.indices(segment, 2, 16) is step.indices(segment, 2, 16)
