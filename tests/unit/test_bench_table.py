"""The pure parts of the benchmarks: ratios, targets, the table, JSON, gaps and prompts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import stories
from bench.registry import BENCHES, Settings
from bench.stats import gaps_during, percentile
from bench.table import Row, Target, compare, render, to_json

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)


@given(POSITIVE, POSITIVE)
def test_a_ratio_above_one_says_that_ours_is_better_whatever_the_unit(ours: float, peer: float) -> None:
    lower = compare("a", ours, peer, "s", "lower").ratio
    higher = compare("a", ours, peer, "tok/s", "higher").ratio
    assert lower is not None
    assert higher is not None
    assert (lower > 1) == (ours < peer)
    assert (higher > 1) == (ours > peer)
    assert lower * higher == pytest.approx(1)


@pytest.mark.parametrize(("ours", "peer"), [(1.0, None), (0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_there_is_no_ratio_without_two_positive_figures(ours: float, peer: float | None) -> None:
    assert compare("a", ours, peer, "s", "lower").ratio is None


def test_a_row_without_a_peer_names_no_peer_version() -> None:
    assert compare("a", 1.0, None, "s", "lower", peer_version="mlx-lm 1").peer_version is None
    assert compare("a", 1.0, 2.0, "s", "lower", peer_version="mlx-lm 1").peer_version == "mlx-lm 1"


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("ratio", ">=", 2.0), True),
        (Target("ratio", ">=", 2.1), False),
        (Target("ours", "<=", 50), True),
        (Target("ours", "<=", 49), False),
    ],
)
def test_a_target_judges_the_figure_or_the_ratio(target: Target, met: bool) -> None:
    assert target.met(compare("a", 50.0, 100.0, "µs", "lower")) is met


def test_a_target_on_a_ratio_says_nothing_without_one() -> None:
    assert Target("ratio", ">=", 1.0).met(compare("a", 50.0, None, "µs", "lower")) is None


def test_json_rows_have_exactly_the_six_keys() -> None:
    rows = [
        compare(
            "decode/B=1",
            20.0,
            10.0,
            "tok/s",
            "higher",
            peer_version="mlx-lm 1",
            target=Target("ratio", ">=", 1),
            note="n",
        ),
        compare("wire/token", 30.0, None, "µs CPU", "lower"),
    ]
    assert json.loads(to_json(rows)) == [
        {"name": "decode/B=1", "ours": 20.0, "peer": 10.0, "ratio": 2.0, "unit": "tok/s", "peer_version": "mlx-lm 1"},
        {"name": "wire/token", "ours": 30.0, "peer": None, "ratio": None, "unit": "µs CPU", "peer_version": None},
    ]


def test_json_holds_no_number_that_json_does_not_have() -> None:
    written = to_json([Row("a", math.nan, math.inf, None, "s", None)])
    assert json.loads(written)[0]["ours"] is None
    assert json.loads(written)[0]["peer"] is None


def test_the_table_lines_up_and_says_which_targets_were_missed() -> None:
    rows = [
        compare("served/gap", 0.1, 48.0, "s", "lower", target=Target("ratio", ">=", 20)),
        compare("wire/token", 61.0, None, "µs CPU", "lower", target=Target("ours", "<=", 50), note="fake device"),
    ]
    lines = render(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        *["served/gap", "0.1", "48", "480.00", "s", "ratio >= 20", "met", ""]
    ]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        *["wire/token", "61", "", "", "µs CPU", "<= 50", "MISSED", "fake device"]
    ]


def test_an_empty_table_is_its_heading() -> None:
    assert len(render([]).splitlines()) == 2


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), st.floats(min_value=0, max_value=1))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < max(share * len(values), 1)


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 0.5))


def test_gaps_that_overlap_the_interval_count_whole() -> None:
    arrivals = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    assert gaps_during(arrivals, begin=3.0, end=4.0) == [8.0]
    assert gaps_during(arrivals, begin=1.5, end=10.5) == [1.0, 8.0, 1.0]
    assert gaps_during(arrivals, begin=12.0, end=20.0) == []
    assert gaps_during([5.0], begin=0.0, end=10.0) == []


def test_prompts_of_two_nonces_share_no_beginning_and_one_nonce_repeats_itself() -> None:
    first, again, other = stories.chat(50, "aa", 1), stories.chat(50, "aa", 1), stories.chat(50, "bb", 1)
    assert first == again
    assert first[0]["content"][:2] != other[0]["content"][:2]
    assert len(stories.words(50, 1).split()) == 50


def test_a_quick_run_picks_the_small_size() -> None:
    assert Settings(Path("model"), quick=True).pick(15, 2) == 2
    assert Settings(Path("model")).pick(15, 2) == 15


def test_every_benchmark_has_a_module_that_says_what_it_owns() -> None:
    directory = Path(stories.__file__).parent
    for name, module in BENCHES.items():
        source = (directory / f"{module.removeprefix('bench.')}.py").read_text(encoding="utf-8")
        assert source.startswith(f'"""Owns `{name}`')
        assert "\ndef run(settings: Settings) -> list[Row]:" in source
