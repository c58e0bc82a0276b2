"""Killed at any point of a write, the cache loses at most what was being written, and serves only whole pieces."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import cache_pieces
import pytest
from cache_pieces import cache_at, whole

POINTS = ["begin", "created", "header", "slice", "synced", "renamed", "done"]


def killed_at(directory: Path, point: str, first: int) -> set[str]:
    """Let a process fill the directory until it kills itself there; the pieces it had said were on the disk."""
    environment = {**os.environ, "MLXBC_TEST_KILL_AT": point}
    command = [sys.executable, cache_pieces.__file__, str(directory), str(first)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return set(ended.stdout.split())


def check(directory: Path, said: set[str]) -> None:
    """What is found after a restart is whole, and is all that was said to be there, or one piece more."""
    with cache_at(directory) as cache:
        assert cache.tier is not None
        found = {node.id: node for node in cache.index.nodes.values()}
        assert said <= found.keys()
        assert len(found) <= len(said) + 1
        assert all(whole(name, cache.tier.load(node)) for name, node in found.items())
        assert {path.suffix for path in directory.iterdir()} <= {".kv", ".TAG", ""}, "leftovers are gone"


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_point_of_a_write(point: str, tmp_path: Path) -> None:
    check(tmp_path, killed_at(tmp_path, f"{point}:4", 0))


def random_kills(directory: Path, kills: int) -> None:
    """Kill at one random point after the other, over what the processes before have left."""
    rng = random.Random(kills)
    said: set[str] = set()
    for kill in range(kills):
        said |= killed_at(directory, f"{rng.choice(POINTS)}:{rng.randrange(1, 8)}", 10 * kill)
        with cache_at(directory) as cache:
            assert said <= cache.index.nodes.keys()
            said = {*cache.index.nodes}
    check(directory, said)


def test_a_few_random_kills_one_after_the_other(tmp_path: Path) -> None:
    random_kills(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_random_kills_one_after_the_other(tmp_path: Path) -> None:
    random_kills(tmp_path, 100)
