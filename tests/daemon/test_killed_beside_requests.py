"""Real daemons that are killed, or whose disk is full, while they serve: what is served stays right.

Requests are normal ones, so states are written beside running rows, a little at a time. Each prompt is asked twice,
with the cache and without, and both must say the same as far as they get.
"""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, Daemon, Frames, ask, daemon, tokens

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from tiny_directory import write_model

from mlxbc import wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits what a process may write as Linux does")

LENGTH = 300
"""Tokens of a prompt: every byte is one. More than a block, so that there are two pieces of each."""
ANSWER = 12
TOGETHER = 3
"""Pairs of requests that run at once."""
POINTS = ["begin", "created", "header", "slice", "synced", "renamed", "done"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def keeping(directory: Path) -> list[str]:
    """Arguments of a daemon that keeps its states there."""
    return ["--set", "cache.mode=disk", "--set", f"cache.directory={directory}", "--cache-disk", "500MB"]


def prompt(seed: int) -> str:
    """A text that no other one begins like, without what the tokenizer has a token for."""
    chance = random.Random(seed)
    return "".join(chance.choice("bcdfgjklmpqvwxyz") for _ in range(LENGTH))


class Load:
    """Pairs of requests to one daemon, a few at once, until it dies or all are answered."""

    def __init__(self, frames: Frames, seeds: list[int]) -> None:
        self._frames = frames
        self._waiting = seeds[::-1]
        self._asked = 0
        self._running: set[int] = set()
        self.journal: list[wire.Reply] = []

    def run(self, kill: Daemon | None = None, after: int = 0) -> None:
        """Run them, and kill a daemon after so many frames; see that nobody was told anything wrong."""
        self._more()
        while self._running and (frame := self._frames.read()) is not None:
            self.journal.append(frame)
            if kill is not None and len(self.journal) == after:
                kill.popen.send_signal(signal.SIGKILL)
            if isinstance(frame, wire.TERMINAL):
                assert isinstance(frame, wire.Done), frame
                self._running.discard(frame.id)
                self._more()
        for request in range(0, self._asked, 2):
            one, other = tokens(self.journal, request), tokens(self.journal, request + 1)
            assert all(a == b for a, b in zip(one, other, strict=False)), f"request {request} differs from a cold run"

    def reused(self) -> list[int]:
        """Tokens that each finished request with the cache has reused, in the order of the seeds."""
        done = {frame.id: frame.usage.cached for frame in self.journal if isinstance(frame, wire.Done)}
        return [done[request] for request in range(0, self._asked, 2)]

    def _more(self) -> None:
        """Ask for the next pair as soon as there is room for it."""
        while self._waiting and len(self._running) <= 2 * (TOGETHER - 1):
            fields = {"prompt": prompt(self._waiting.pop()), "temperature": 0, "max_tokens": ANSWER}
            pair = (self._asked, self._asked + 1)
            self._frames.say(*(ask(n, fields, cache=cache) for n, cache in zip(pair, ("disk", "none"), strict=True)))
            self._running.update(pair)
            self._asked += 2


def settled(process: Daemon) -> wire.CacheReport:
    """What the cache holds once everything is written, and the model is known."""
    with process.client() as client:
        process.until(lambda report: report.running + report.queued == 0)
        while (report := client.cache()).pending:
            process.until(lambda report: report.running == 0)
        return report


def known(process: Daemon) -> None:
    """Wait until the daemon has found out which model it is, and so keeps states of it."""
    with process.client() as client:
        while client.explain("b").cached is None:
            pass


def kills(path: Path, model: Path, directory: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill one daemon after the other over one cache: at some point of a write, and each third one at any time."""
    chance = random.Random(count)
    for kill in range(count):
        sooner = kill % 3 == 2
        monkeypatch.setenv("MLXBC_TEST_KILL_AT", f"{chance.choice(POINTS)}:{chance.randrange(1, 9)}")
        with daemon(path, model, *keeping(directory)) as process:
            known(process)
            with process.frames() as frames:
                # What the one before may have left, and new ones.
                load = Load(frames, [*range(6 * kill - 2, 6 * kill), *range(6 * kill, 6 * kill + 6)])
                load.run(process, chance.randrange(1, 150) if sooner else 10**9)
            if not sooner:
                # The last pieces may be written when the last answer is out.
                process.popen.wait(PATIENCE_S)
            process.popen.kill()
            assert process.popen.wait(PATIENCE_S) == -signal.SIGKILL
    monkeypatch.delenv("MLXBC_TEST_KILL_AT")
    seeds = list(range(6 * count - 6, 6 * count))
    with daemon(path, model, *keeping(directory)) as process:
        known(process)
        with process.frames() as frames:
            Load(frames, seeds).run()
        report = settled(process)
        assert (report.trouble, report.leases) == ("", 0)
        with process.client() as client:
            client.shutdown()
        assert process.ended() == 0
    assert "checksum" not in process.said, "whatever has a name is whole"
    assert {file.suffix for file in (directory / "states").iterdir()} <= {".kv", ".TAG", ""}, "leftovers are gone"
    with daemon(path, model, *keeping(directory)) as process:
        known(process)
        with process.frames() as frames:
            load = Load(frames, seeds)
            load.run()
        assert load.reused() == [LENGTH - 1] * len(seeds)


@pytest.mark.timeout(300)
def test_killed_a_few_times_under_load_it_serves_nothing_wrong(
    path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills(path, model, tmp_path, 3, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_a_hundred_times_under_load_it_serves_nothing_wrong(
    path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills(path, model, tmp_path, 100, monkeypatch)


def test_a_disk_that_is_full_costs_nobody_an_answer(path: Path, model: Path, tmp_path: Path) -> None:
    import resource

    with daemon(path, model, *keeping(tmp_path)) as process:
        known(process)
        # No file may grow beyond its header's page: writing a state ends with an error, as on a disk that is full.
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (4096, 4096))
        for cached in (0, LENGTH - 1):
            with process.frames() as frames:
                load = Load(frames, [1, 2, 3])
                load.run()
            assert load.reused() == [cached] * 3, "RAM serves on"
            report = settled(process)
            assert report.disk_entries == 0
            assert "too large" in report.trouble
        assert list((tmp_path / "states").glob("*.part")) == []
        with process.client() as client:
            client.shutdown()
        assert process.ended() == 0
    assert process.said.count("can't be written") == 1
