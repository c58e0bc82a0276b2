"""The soak, short, on tiny models: no text is lost or doubled, and what the load took is given back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "unit")]

from tiny_directory import write_model

from bench.soak import GROWTH, POOL_THREADS, SLACK_BYTES, Outcome, Sample, Soak, daemon

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes"),
    pytest.mark.timeout(900),
]


SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))


def test_mixed_load_leaves_nothing_behind_and_every_text_is_what_it_is_alone(tmp_path: Path) -> None:
    models = [str(write_model(tmp_path / name, seed=n)) for n, name in enumerate(("stays", "turns"))]
    with daemon(models) as (path, pid):
        outcome = Soak(path, pid, models).run(SECONDS)
    # A daemon of 100 MB is mostly heap, which long texts leave in other pieces each time.
    assert outcome.complaints(slack=24_000_000) == []
    assert outcome.wrong == []
    kinds = {"answered", "background", "cancelled", "vanished", "counted"}
    assert outcome.done.keys() == kinds
    assert min(outcome.done.values()) >= 5, outcome.done


def test_what_has_grown_is_told() -> None:
    before = Sample(rss=10**9, descriptors=20, threads=9, active=100, kv=0)
    grown = int(before.rss * (1 + GROWTH)) + SLACK_BYTES + 1
    worse = Sample(rss=grown, descriptors=21, threads=10 + POOL_THREADS, active=101, kv=1)
    assert len(Outcome(samples=[before, worse]).complaints()) == 5
    assert Outcome(samples=[before, before]).complaints() == []
    assert Outcome(wrong=["x"], samples=[before, before]).complaints() == ["x"]
