"""Devices that fail and processes that are killed: the right error, nothing hangs, nobody else's text changes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_daemon import Daemon, Frames
from tiny_daemon import POISON, STORY, answer, at_rest, await_status, serving

from mlxbc import wire
from mlxbc.errors import ConnectionLost, DeviceError, RequestFailed

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes"),
]


# ----------------------------------------------------------------------------------------------------------- device


def test_a_step_that_raises_fails_its_own_request_and_the_daemon_goes_on(path: Path, tiny_model: Path) -> None:
    with serving(path, tiny_model, fault=f"raises {len(POISON)}") as daemon:
        alone = answer(daemon)
        with daemon.client() as client:
            running = client.generate(STORY, temperature=0, max_tokens=200, resumable=True)
            ids: list[int] = []
            while len(ids) < 3:
                event = next(running)
                ids += event.ids if isinstance(event, wire.Token) else []
            with pytest.raises(DeviceError):
                answer(daemon, POISON)
            while len(ids) < 12:
                event = next(running)
                ids += event.ids if isinstance(event, wire.Token) else []
            running.cancel()
        assert ids[:12] == alone
        assert answer(daemon) == alone
        assert at_rest(daemon).state == "ready"


def test_a_fault_of_the_device_ends_everything_with_an_error_and_the_process_with_70(
    path: Path, tiny_model: Path
) -> None:
    with serving(path, tiny_model, fault=f"dies {len(POISON)}") as daemon, daemon.client() as client:
        running = client.generate(STORY, temperature=0, max_tokens=300)
        while not isinstance(next(running), wire.Token):
            pass
        with daemon.client() as other:
            poisoned = other.generate(POISON, max_tokens=3)
            for stream in (running, poisoned):
                with pytest.raises((DeviceError, ConnectionLost)) as failed:
                    stream.wait()
                assert not isinstance(failed.value, RequestFailed) or failed.value.retryable
        assert daemon.ended() == os.EX_SOFTWARE


def test_a_device_that_hangs_is_told_by_status_at_once_and_does_not_keep_the_daemon_from_ending(
    path: Path, tiny_model: Path
) -> None:
    with serving(path, tiny_model, fault=f"hangs {len(POISON)}") as daemon, daemon.client() as client:
        answer(daemon)
        client.generate(POISON, max_tokens=3)
        report = await_status(daemon, lambda report: report.state == "degraded")
        assert any("busy with one step" in note for note in report.notes)
        began = time.monotonic()
        client.status()
        assert time.monotonic() - began < 0.5
        daemon.popen.send_signal(signal.SIGTERM)
        daemon.logged("signalled to stop")
        daemon.popen.send_signal(signal.SIGTERM)
        assert daemon.ended() == os.EX_OK


# ------------------------------------------------------------------------------------------------------------- kill


def in_load(daemon: Daemon, frames: Frames) -> None:
    frames.say(wire.Load(id=1))
    await_status(daemon, lambda report: len(report.loading) == 1)


def in_prefill(daemon: Daemon, frames: Frames) -> None:
    frames.say(wire.Generate(id=1, prompt=POISON, max_tokens=3))
    assert isinstance(frames.read(), wire.Accepted)


def in_decode(daemon: Daemon, frames: Frames) -> None:
    frames.say(wire.Generate(id=1, prompt=POISON, max_tokens=200))
    while not isinstance(frames.read(), wire.Token):
        pass


@pytest.mark.parametrize(
    ("moment", "fault"), [(in_load, "loads 0"), (in_prefill, f"slow {len(POISON)}"), (in_decode, f"slow {len(POISON)}")]
)
def test_after_kill_9_the_next_daemon_starts_on_the_same_path_and_says_the_same(
    path: Path, tiny_model: Path, moment: Callable[[Daemon, Frames], None], fault: str
) -> None:
    with serving(path, tiny_model, "--no-preload", fault=fault) as first:
        with first.frames() as frames:
            moment(first, frames)
            first.popen.kill()
            assert not any(isinstance(frame, wire.Done) for frame in frames.rest())
        assert first.ended() == -signal.SIGKILL
    assert path.exists()
    with serving(path, tiny_model) as second:
        said = answer(second)
        assert said == answer(second)
        assert len(said) == 12
