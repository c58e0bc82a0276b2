"""What drafts take: known of the number of rows that comes closest, and smoothed."""

from __future__ import annotations

import pytest

from mlxbcd.spec.pace import Pace


def test_before_the_first_draft_nobody_knows() -> None:
    assert Pace().expected(1, 4) == 0.0


def test_a_draft_is_expected_to_take_what_one_of_about_so_many_rows_took() -> None:
    pace = Pace()
    pace.saw(1, 4, 0.4)
    pace.saw(8, 2, 0.6)
    assert pace.expected(1, 3) == pytest.approx(0.3)
    assert pace.expected(3, 1) == pytest.approx(0.1)
    assert pace.expected(6, 1) == pytest.approx(0.3)
    assert pace.expected(100, 2) == pytest.approx(0.6)


def test_one_odd_draft_moves_it_by_a_fifth() -> None:
    pace = Pace()
    pace.saw(1, 1, 1.0)
    pace.saw(1, 2, 4.0)
    assert pace.expected(1, 1) == pytest.approx(1.2)


def test_a_process_that_was_stopped_for_an_hour_did_not_draft_for_an_hour() -> None:
    pace = Pace()
    pace.saw(1, 1, 1.0)
    pace.saw(1, 2, 3600.0)
    assert pace.expected(1, 1) == pytest.approx(1.4)


def test_a_first_draft_that_waited_for_the_weights_is_forgotten_with_the_next() -> None:
    pace = Pace()
    pace.saw(1, 1, 100.0)
    pace.saw(1, 1, 0.1)
    assert pace.expected(1, 1) == pytest.approx(0.26)
