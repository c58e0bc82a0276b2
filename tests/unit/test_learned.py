"""What was measured outlives the daemon, and nothing that makes no sense is believed."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.engine.cohorts import Cohorts
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.residency.learned import AtLoad, Learned, at_load, place, recall, remember
from mlxbcd.spec.costs import VerifyCosts

SECONDS = st.floats(1e-6, 10.0)


@given(
    st.dictionaries(st.integers(1, 32), SECONDS, max_size=4),
    st.lists(st.tuples(st.integers(1, 512), st.integers(0, 4000), SECONDS), min_size=1, max_size=6),
)
def test_costs_come_back_as_they_were(steps: dict[int, float], pieces: list[tuple[int, int, float]]) -> None:
    costs = Costs()
    for rows, seconds in steps.items():
        costs.saw_step(rows, seconds)
    for piece in pieces:
        costs.saw_piece(*piece)
    assert Costs.restored(json.loads(json.dumps(costs.saved()))) == costs


def test_a_file_for_each_model_and_circumstance(tmp_path: Path) -> None:
    places = {place(tmp_path / model, device) for model in "ab" for device in ("cpu", "gpu")}
    assert len(places) == 4
    assert place(tmp_path / "a", "cpu") in places


def test_what_was_learnt_is_kept_in_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "x.json"
    assert recall(path) == Learned()
    remember(path, Learned())
    assert not path.exists(), "nothing was measured"
    costs = Costs()
    costs.saw_piece(32, 0, 0.5)
    packing = PackingRanges()
    packing.saw(8, 40, 0.2, 0.25, packed=True)
    cohorts = Cohorts()
    cohorts.saw([(8, 0), (4, 20)], 0.3, costs)
    verify = VerifyCosts({1: 0.1, 8: 0.2})
    verify.saw_plain(4, 0.15)
    verify.saw_round(4, 8, 0.7)
    remember(path, Learned(costs, packing, cohorts, verify))
    again = recall(path, VerifyCosts({1: 0.1, 8: 0.2}))
    assert (again.costs, again.packing) == (costs, packing)
    assert again.cohorts.saved() == cohorts.saved() != {}
    assert (again.verify.plain(4), again.verify.round(4, 8)) == (0.15, pytest.approx(verify.round(4, 8)))
    assert path.parent.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]


def saved(**other: Any) -> str:
    costs = Costs()
    costs.saw_step(2, 0.1)
    costs.saw_piece(32, 0, 0.5)
    return json.dumps(costs.saved() | other)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        saved(widest=-1),
        saved(widest=10**6),
        saved(steps={"2": -1.0}),
        saved(steps={"0": 1.0}),
        saved(steps={"x": 1.0}),
        saved(steps=[1]),
        saved(token={}),
        saved(token={"weight": "nan", "x": 0, "y": 0, "spread": 0, "covariance": 0}),
        saved(token=None),
        saved(packing={"8/40": {}}),
        saved(packing=[1]),
        saved(verify=[1]),
        saved(verify={"plain": 3}),
        saved(verify={"plain": [[1, -0.1]]}),
        saved(verify={"rounds": [[0, 4, 0.1]]}),
        saved(verify={"rounds": [[1, 4]]}),
        saved(verify={"rounds": [[1, 4, None]]}),
        saved(cohorts=[1]),
        saved(cohorts={"8": 0}),
        saved(cohorts={"8": "nan"}),
        saved(cohorts={"-8": 1.0}),
    ],
)
def test_what_can_not_be_true_is_not_believed(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert recall(path) == Learned()
    assert len(caplog.records) == 1


def test_what_is_tried_at_a_load_is_tried_once_a_week(tmp_path: Path) -> None:
    path, now = tmp_path / "x.json", time.time()
    assert at_load(path) is None
    costs = Costs()
    costs.saw_piece(32, 0, 0.5)
    for age_s, lasts in ((0.0, True), (6 * 86400.0, True), (8 * 86400.0, False), (-3600.0, False)):
        measured = AtLoad(now - age_s, Ahead.RUN, {1: 0.1, 8: 0.2})
        remember(path, Learned(costs, load=measured))
        assert at_load(path) == (measured if lasts else None)
        assert recall(path).costs == costs


@pytest.mark.parametrize(
    "wrong",
    [[1], {}, {"curve": {"0": 1.0}}, {"curve": {"1": -1.0}}, {"curve": 3}, {"ahead": "far"}, {"at": None}, {"at": "x"}],
)
def test_what_no_load_can_have_measured_is_measured_anew(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "x.json"
    sound = {"at": time.time(), "ahead": "build", "curve": {"1": 0.1}}
    path.write_text(saved(load=sound))
    assert at_load(path) == AtLoad(sound["at"], Ahead.BUILD, {1: 0.1})
    path.write_text(saved(load=sound | wrong if wrong and isinstance(wrong, dict) else wrong))
    assert at_load(path) is None


@given(
    st.dictionaries(st.integers(1, 8), SECONDS, max_size=3),
    st.dictionaries(st.tuples(st.integers(1, 8), st.integers(2, 32)), SECONDS, max_size=5),
    st.floats(0.5, 2.0),
)
def test_what_rounds_took_comes_back_as_seconds_whatever_the_curve_is_then(
    plain: dict[int, float], rounds: dict[tuple[int, int], float], faster: float
) -> None:
    before = VerifyCosts({1: 0.05, 8: 0.1, 32: 0.4})
    for rows, seconds in plain.items():
        before.saw_plain(rows, seconds)
    for shape, seconds in rounds.items():
        before.saw_round(*shape, seconds)
    after = VerifyCosts({1: 0.05 * faster, 8: 0.1 * faster, 32: 0.4 * faster})
    after.recall(json.loads(json.dumps(before.saved())))
    assert all(after.plain(rows) == before.plain(rows) for rows in plain)
    for shape in rounds:
        assert after.round(*shape) == pytest.approx(before.round(*shape))


def test_what_is_seen_wins_over_what_is_recalled() -> None:
    old, new = VerifyCosts({1: 0.1, 8: 0.2}), VerifyCosts({1: 0.1, 8: 0.2})
    for costs, seconds in ((old, 0.9), (new, 0.3)):
        costs.saw_plain(2, seconds)
        costs.saw_round(2, 4, seconds)
    expected = new.plain(2), new.round(2, 4)
    new.recall(old.saved())
    assert (new.plain(2), new.round(2, 4)) == expected


def test_a_place_that_cannot_be_written_loses_only_the_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "costs").write_text("a file")
    costs = Costs()
    costs.saw_piece(32, 0, 0.5)
    remember(tmp_path / "costs" / "x.json", Learned(costs))
    assert "can't be kept" in caplog.text
