"""What goes wrong around a real daemon stays where it went wrong: readers, clients, files, signals, the process."""

from __future__ import annotations

import fcntl
import itertools
import random
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_daemon import PATIENCE_S, Daemon, Frames, Solo, ask, daemon, socket_path, switches, tokens
from stories import LONG, STORIES

from mlxbc import wire
from mlxbc.errors import ConnectionLost, ContextTooLong, LoadFailed, ShuttingDown, UnknownModel

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about threads")


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a daemon of the test's own will listen."""
    with socket_path() as path:
        yield path


# --------------------------------------------------------------------------------------------------------- clients


def test_a_reader_that_stops_delays_nobody_and_gets_everything_once_it_reads_again(shared: Daemon, solo: Solo) -> None:
    with shared.frames() as stuck, shared.client() as client:
        # Many alternatives make long frames, which soon fill the buffers between the two processes.
        unheard = [STORIES[0], STORIES[1], STORIES[0], STORIES[1]]
        stuck.say(*(ask(n, story, max_tokens=80, logprobs=True, top_logprobs=20) for n, story in enumerate(unheard)))
        with client.generate(**STORIES[1], resumable=True, max_tokens=4000) as stream:
            flowing = (event for event in stream if isinstance(event, wire.Token))
            healthy: list[int] = []
            waiting = [-2, -1]
            while len(set(waiting[-8:])) > 1 or waiting[-1] == 0:
                healthy += next(flowing).ids
                waiting.append(unread(stuck))
            report = client.status()
            assert report.running == 5, "a reader that stops is not cut off at once"
            for _ in range(10):
                healthy += next(flowing).ids
        assert unread(stuck) == waiting[-1], "nothing more was written to it"
        for n, story in enumerate(unheard):
            assert tokens(stuck.until_terminal(n), n) == solo.ids(story, 80)
    assert healthy == solo.ids(STORIES[1], len(healthy))


def unread(client: Frames) -> int:
    """Bytes that wait in the client's socket."""
    size = bytearray(4)
    fcntl.ioctl(client.socket, termios.FIONREAD, size)
    return int.from_bytes(size, sys.byteorder)


VICTIM = """
import sys
from mlxbc import Client, wire
path, prompt, phase = sys.argv[1:]
with Client(path) as client:
    stream = client.generate(prompt, temperature=0.0, max_tokens=4000, logit_bias={2: -100.0})
    for event in stream:
        if isinstance(event, {"prefill": wire.Progress, "decode": wire.Token}[phase]):
            print("there", flush=True)
"""


@pytest.mark.parametrize(("phase", "prompt"), [("prefill", LONG), ("decode", "The old harbour")])
def test_a_client_that_is_killed_leaves_no_row_and_changes_no_text(
    shared: Daemon, solo: Solo, phase: str, prompt: str
) -> None:
    with shared.client() as client, client.generate(**STORIES[1], resumable=True, max_tokens=4000) as stream:
        flowing = (event for event in stream if isinstance(event, wire.Token))
        healthy = next(flowing).ids
        line = [sys.executable, "-c", VICTIM, str(shared.path), prompt, phase]
        with subprocess.Popen(line, stdout=subprocess.PIPE) as victim:
            assert victim.stdout
            assert victim.stdout.readline() == b"there\n"
            shared.until(lambda report: report.running == 2)
            victim.kill()
        shared.until(lambda report: (report.running, report.queued) == (1, 0))
        for _ in range(8):
            healthy += next(flowing).ids
    shared.until(lambda report: (report.running, report.queued) == (0, 0))
    assert healthy == solo.ids(STORIES[1], len(healthy))


def test_clients_that_hang_up_at_any_point_leave_nothing_behind(shared: Daemon, solo: Solo) -> None:
    chance = random.Random(0)
    before = solo.ids(STORIES[0], 12)
    with shared.client() as client:
        failed = client.status().failed
    for _ in range(40):
        with shared.frames() as frames:
            story = chance.choice(STORIES)
            frames.say(*(ask(n, story, max_tokens=100) for n in range(chance.randint(1, 3))))
            for _ in range(chance.choice([0, 0, 0, 1, 6])):
                frames.read()
    report = shared.until(lambda report: report.running + report.queued == 0 and report.connections == 1)
    assert (report.state, report.failed) == ("ready", failed)
    assert Solo(shared).ids(STORIES[0], 12) == before


# -------------------------------------------------------------------------------------------- requests that can't be


def test_a_request_that_cannot_be_served_is_refused_with_its_reason(shared: Daemon) -> None:
    with shared.client() as client:
        with pytest.raises(UnknownModel, match="no-such-model"):
            client.ask("hello", model="no-such-model")
        with pytest.raises(ContextTooLong, match="shorten") as refused:
            client.generate(LONG * 5, max_tokens=1).wait()
        assert refused.value.data["context"] == 8192
        assert refused.value.data["prompt"] > 10_000
        with pytest.raises(ContextTooLong):
            client.generate("Short, but much is wanted:", max_tokens=8192).wait()
        assert client.generate("Nevertheless", max_tokens=3, temperature=0).wait().usage.generated == 3


def truncated(weights: bytearray) -> None:
    """Half of the file is missing."""
    del weights[len(weights) // 2 :]


def headless(weights: bytearray) -> None:
    """The directory of tensors is not JSON."""
    weights[8:20] = b"x" * 12


def renamed(weights: bytearray) -> None:
    """One tensor has a name that the model doesn't know."""
    weights[:] = weights.replace(b"model.layers.7.mlp.up_proj.weight", b"model.layers.7.mlp.sp_proj.weight", 1)


def lengthless(weights: bytearray) -> None:
    """The directory's length is absurd."""
    weights[:8] = b"\xff" * 8


@pytest.mark.parametrize(
    ("damage", "said"),
    [(truncated, "damaged"), (headless, "damaged"), (lengthless, "damaged"), (renamed, "layers.7.mlp.[us]p_proj")],
)
def test_a_model_with_damaged_weights_fails_to_load_and_the_daemon_goes_on(
    shared: Daemon, model_directory: Path, tmp_path: Path, damage: Callable[[bytearray], None], said: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_directory, broken)
    file = broken / "model.safetensors"
    weights = bytearray(file.read_bytes())
    damage(weights)
    file.write_bytes(weights)
    with shared.client() as client:
        with pytest.raises(LoadFailed, match=said):
            client.load(str(broken))
        with pytest.raises(LoadFailed, match=said):
            client.ask("hello", model=str(broken))
        assert len(client.ps()) == 1
        assert client.generate("Still", max_tokens=3, temperature=0).wait().usage.generated == 3


# --------------------------------------------------------------------------------------------------- start and end


def test_of_two_daemons_that_race_for_a_socket_one_serves_and_the_other_exits_0_saying_so(
    path: Path, model_directory: Path
) -> None:
    racers = [Daemon(path, model_directory) for _ in range(2)]
    try:
        for racer in racers:
            racer.logged(f"on {path}")
        (loser,) = [racer for racer in racers if "already running" in racer.said]
        (winner,) = [racer for racer in racers if racer is not loser]
        assert loser.ended() == 0
        # The winner takes the lock before it can write down who it is.
        running = f"mlxbcd: already running on {path}"
        assert loser.said in (f"{running} (pid {winner.popen.pid})\n", f"{running}\n")
        with winner.client() as client:
            assert client.welcome.pid == winner.popen.pid
            assert client.generate("One", max_tokens=2).wait().usage.generated == 2
            client.shutdown()
        assert winner.ended() == 0
    finally:
        for racer in racers:
            racer.popen.kill()
            racer.popen.communicate()


def test_a_signal_while_the_model_loads_ends_the_daemon_at_once(path: Path, model_directory: Path) -> None:
    with daemon(path, model_directory, wait_for="ready after") as starting:
        began = time.monotonic()
        starting.popen.send_signal(signal.SIGTERM)
        assert starting.ended() == 0
        assert time.monotonic() - began < 10
    assert "loaded" not in starting.said, "the load was given up"
    assert not path.exists()


@pytest.mark.parametrize("drain", [True, False])
def test_a_client_that_waits_for_a_load_hears_how_it_ended_when_the_daemon_stops(
    path: Path, model_directory: Path, drain: bool
) -> None:
    with daemon(path, model_directory, "--no-preload", wait_for="ready after") as idle, idle.frames() as frames:
        frames.say(wire.Load(id=1))
        assert isinstance(frames.read(), wire.Progress)
        frames.say(wire.Shutdown(id=2, drain=drain))
        ends = {frame.id: frame for frame in frames.rest() if isinstance(frame, wire.TERMINAL)}
        assert isinstance(ends[2], wire.Bye)
        if drain:
            assert isinstance(ends[1], wire.Loaded)
        else:
            assert isinstance(ends[1], wire.Error)
            assert ends[1].code == "shutting_down"
        assert idle.ended() == 0


def test_a_signal_lets_running_generations_finish_with_their_whole_text(path: Path, model_directory: Path) -> None:
    with daemon(path, model_directory) as serving, serving.client() as client:
        whole = [client.generate(**story, max_tokens=24).wait().text for story in STORIES[:2]]
        streams = [client.generate(**story, max_tokens=24) for story in STORIES[:2]]
        for stream in streams:
            while not isinstance(next(stream), wire.Token):
                pass
        serving.popen.send_signal(signal.SIGTERM)
        results = [stream.wait() for stream in streams]
        assert serving.ended() == 0
    assert [result.text for result in results] == whole
    assert {result.reason for result in results} == {"length"}


def test_a_shutdown_without_draining_ends_generations_with_shutting_down(path: Path, model_directory: Path) -> None:
    with daemon(path, model_directory) as serving, serving.client() as client, serving.client() as other:
        decoding = client.generate(**STORIES[0], max_tokens=4000)
        while not isinstance(next(decoding), wire.Token):
            pass
        prefilling = client.generate(LONG, max_tokens=4000)
        while not isinstance(next(prefilling), wire.Progress):
            pass
        other.shutdown(drain=False)
        for stream in (decoding, prefilling):
            with pytest.raises(ShuttingDown):
                stream.wait()
        assert serving.ended() == 0


# ---------------------------------------------------------------------------------------------------- kill and resume


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}],
    ids=["greedy", "seeded"],
)
def test_a_stream_that_kill_9_interrupts_resumes_on_the_next_daemon_to_the_same_text(
    path: Path, model_directory: Path, settings: dict[str, Any]
) -> None:
    request = {**STORIES[0], **settings, "max_tokens": 40, "resumable": True}
    with daemon(path, model_directory) as first, first.client() as client:
        stream = client.generate(**request)
        accepted = next(stream)
        assert isinstance(accepted, wire.Accepted)
        had = [event for event in itertools.islice(stream, 12) if isinstance(event, wire.Token)]
        first.popen.kill()
        with pytest.raises(ConnectionLost):
            had += (event for event in stream if isinstance(event, wire.Token))
        assert first.ended() == -signal.SIGKILL
    ids = [token for event in had for token in event.ids]
    assert 0 < len(ids) < 40
    assert path.exists(), "the stale socket is still there"
    with daemon(path, model_directory) as second, second.client() as client:
        resume = {"stream": accepted.stream, "tokens": ids}
        rest = client.generate(**request, seed=accepted.seed, resume=resume).wait()
        whole = client.generate(**request, seed=accepted.seed).wait()
    assert rest.stream == accepted.stream
    assert ids + rest.ids == whole.ids
    assert "".join(event.text for event in had) + rest.text == whole.text
    assert (rest.reason, rest.usage.generated) == (whole.reason, whole.usage.generated) == ("length", 40)


# ------------------------------------------------------------------------------------------------------------ quiet


@LINUX
@pytest.mark.parametrize("seconds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_an_idle_daemon_that_has_worked_does_not_wake_up(shared: Daemon, seconds: int) -> None:
    with shared.client() as client:
        client.generate("Some work", max_tokens=3).wait()
        client.count(LONG * 4)
        before = settled(shared.popen.pid)
        time.sleep(seconds)
        assert switches(shared.popen.pid) == before


def settled(pid: int) -> dict[str, int]:
    """How often each thread had gone to sleep, once none has done so for half a second."""
    before: dict[str, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while (now := switches(pid)) != before:
        assert time.monotonic() < deadline, "it never comes to rest"
        before = now
        time.sleep(0.5)
    return now
