"""Devices that fail, clients that flood, disks that are full, files that are odd: through real processes.

Each gets the right error, nothing hangs, nobody else's text changes, and what was held is let go.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from real_daemon import PATIENCE_S, Daemon, Frames, socket_path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "unit"))

from tiny_directory import write_model

from mlxbc import Client, wire
from mlxbc.errors import ConnectionLost, DeviceError, LoadFailed, MlxbcError, RequestFailed
from mlxbc.framing import Codec, frame

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes"),
]

NO_ROOM = ["sh", "-c", 'ulimit -S -f 0; exec "$@"', "sh"]
"""Begins a command that can't write a byte to any file."""
STORY = "the story in a land"
POISON = "x" * 97
"""Every byte is a token, so this prompt has as many; a faulty daemon knows it by that."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def path() -> Iterator[Path]:
    with socket_path() as path:
        yield path


@contextlib.contextmanager
def serving(path: Path, model: Path, *arguments: str, fault: str = "", room: bool = True) -> Iterator[Daemon]:
    """A daemon that answers; with a `fault`, one whose device has it, and without `room`, one on a full disk."""
    program = [str(HERE / "faulty_daemon.py")] if fault else ["-P", "-m", "mlxbcd.serve.main"]
    command = [sys.executable, *program, "--socket", str(path), "--model", str(model), *arguments]
    if not room:
        command = [*NO_ROOM, *command]
    environment = {**os.environ, **({"MLXBC_TEST_FAULT": fault} if fault else {})}
    started = Daemon.__new__(Daemon)
    started.path, started.said = path, ""
    started.popen = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        started.logged("ready after")
        yield started
    finally:
        started.popen.kill()
        started.popen.communicate()


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Daemon]:
    """A daemon for tests that leave it as it was."""
    with socket_path() as path, serving(path, model) as daemon:
        # Its log is read by nobody, and must not fill the pipe.
        threading.Thread(target=daemon.popen.stderr.read, daemon=True).start()
        yield daemon


def answer(daemon: Daemon, prompt: str = STORY, **fields: Any) -> list[int]:
    with daemon.client() as client:
        return client.generate(prompt, **{"temperature": 0, "max_tokens": 12, "resumable": True} | fields).wait().ids


def await_status(daemon: Daemon, condition: Callable[[wire.StatusReport], bool]) -> wire.StatusReport:
    deadline = time.monotonic() + PATIENCE_S
    with daemon.client() as client:
        while not condition(report := client.status()):
            assert time.monotonic() < deadline, report
            time.sleep(0.02)
    return report


def at_rest(daemon: Daemon) -> wire.StatusReport:
    """Once nothing is open but the connection that asks."""
    return await_status(
        daemon,
        lambda report: (
            report.running + report.queued == 0
            and report.connections == 1
            and sum(model.kv_bytes for model in report.models) == 0
        ),
    )


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.popen.pid}/fd"))


def resident(daemon: Daemon) -> int:
    pages = int(Path(f"/proc/{daemon.popen.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ----------------------------------------------------------------------------------------------------------- device


def test_a_step_that_raises_fails_its_own_request_and_the_daemon_goes_on(path: Path, model: Path) -> None:
    with serving(path, model, fault=f"raises {len(POISON)}") as daemon:
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


def test_a_fault_of_the_device_ends_everything_with_an_error_and_the_process_with_70(path: Path, model: Path) -> None:
    with serving(path, model, fault=f"dies {len(POISON)}") as daemon, daemon.client() as client:
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
    path: Path, model: Path
) -> None:
    with serving(path, model, fault=f"hangs {len(POISON)}") as daemon, daemon.client() as client:
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
    path: Path, model: Path, moment: Callable[[Daemon, Frames], None], fault: str
) -> None:
    with serving(path, model, "--no-preload", fault=fault) as first:
        with first.frames() as frames:
            moment(first, frames)
            first.popen.kill()
            assert not any(isinstance(frame, wire.Done) for frame in frames.rest())
        assert first.ended() == -signal.SIGKILL
    assert path.exists()
    with serving(path, model) as second:
        said = answer(second)
        assert said == answer(second)
        assert len(said) == 12


# ------------------------------------------------------------------------------------------------------------- disk


def test_a_full_disk_costs_the_log_and_nothing_else(path: Path, model: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--socket", str(path), "--model", str(model)]
    with subprocess.Popen([*command, "--log-file", "/dev/full"], stderr=subprocess.DEVNULL) as popen:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    with Client(path, timeout=PATIENCE_S) as client:
                        assert client.generate(STORY, max_tokens=3).wait().usage.generated == 3
                        client.shutdown()
                        break
                except MlxbcError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert popen.wait(PATIENCE_S) == 0
        finally:
            popen.kill()


def test_where_nothing_can_be_written_all_is_served_and_kept_in_memory(path: Path, model: Path, tmp_path: Path) -> None:
    cache = ["--set", "cache.mode=disk", "--set", f"cache.directory={tmp_path / 'cache'}", "--cache-disk", "1GB"]
    with serving(path, model, *cache, room=False) as daemon, daemon.client() as client:
        alone = answer(daemon)
        prompt = STORY * 18  # one block of tokens that can be cached, and some more
        first, second = (client.generate(prompt, temperature=0, max_tokens=5).wait() for _ in range(2))
        assert (first.text, first.usage.cached) == (second.text, 0)
        assert second.usage.cached >= 256
        client.unload(str(model))  # what was learnt about it can't be kept
        assert answer(daemon) == alone
        await_status(daemon, lambda report: report.running + report.queued == 0 and report.connections == 2)
        report = client.cache()
        assert (report.leases, report.disk_entries) == (0, 0)
        assert report.ram_entries > 0
        assert report.trouble, "and that is told"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["config", "init"], "config.toml"),
        (["ask", "--save", "kept", "hi"], "kept.toml"),
        (["http", "--show-token"], "http-token"),
    ],
)
def test_a_command_that_can_not_write_says_so_and_leaves_no_half_a_file(
    tmp_path: Path, arguments: list[str], written: str
) -> None:
    directories = {f"XDG_{kind}_HOME": str(tmp_path) for kind in ("CONFIG", "DATA", "STATE")}
    full = subprocess.run(
        [*NO_ROOM, sys.executable, "-m", "mlxbc", *arguments],
        env={**os.environ, **directories, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert full.returncode == os.EX_CONFIG, full
    assert full.stderr.startswith("mlxbc: cannot ")
    assert full.stderr.count("\n") == 1
    assert list(tmp_path.rglob(written)) == [], "the next try must not find it"


# ------------------------------------------------------------------------------------------------------------ files


def fifo_for_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    os.mkfifo(directory / "tokenizer.json")


def fifo_for_a_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def half_the_weights(directory: Path) -> None:
    weights = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def no_weights_but_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def a_config_with_code(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "../../os", "auto_map": {"AutoModel": "x.Y"}}')
    (directory / "x.py").write_text("raise SystemExit")


def a_link_into_nowhere(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("/nowhere/at/all")


def a_config_that_nobody_can_read(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")


def weights_that_the_disk_does_not_give_back(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("/proc/self/mem")


def a_directory_for_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").mkdir()


def files_of_somebody_else(directory: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is closed to root")
    (directory / "model.safetensors").chmod(0)


@pytest.mark.parametrize(
    "spoil",
    [
        a_config_that_nobody_can_read,
        weights_that_the_disk_does_not_give_back,
        a_directory_for_a_tokenizer,
        files_of_somebody_else,
        fifo_for_a_tokenizer,
        fifo_for_a_config,
        half_the_weights,
        no_weights_but_a_pickle,
        a_config_with_code,
        a_link_into_nowhere,
    ],
)
def test_an_odd_model_is_refused_and_costs_nobody_else_anything(
    shared: Daemon, model: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    odd = Path(shutil.copytree(model, tmp_path / "odd"))
    spoil(odd)
    alone = answer(shared)
    with shared.client() as client, pytest.raises(RequestFailed) as refused:
        client.load(str(odd))
    assert refused.value.code in ("load_failed", "unknown_model")
    assert answer(shared) == alone
    assert [one.model for one in at_rest(shared).models] == [str(model)]


def test_weights_that_make_no_sense_fail_who_asks_for_them_and_nobody_else(
    shared: Daemon, model: Path, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(model, tmp_path / "odd"))
    weights = mx.load(str(odd / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(
        str(odd / "model.safetensors"), {name: mx.full(each.shape, math.nan) for name, each in weights.items()}
    )
    alone = answer(shared)
    with shared.client() as client, client.generate(STORY, temperature=0, max_tokens=300, resumable=True) as beside:
        ids = [token for event in itertools.islice(beside, 5) if isinstance(event, wire.Token) for token in event.ids]
        with pytest.raises(DeviceError, match="NaN or infinity"):
            answer(shared, model=str(odd))
        while len(ids) < len(alone):
            event = next(beside)
            ids += event.ids if isinstance(event, wire.Token) else []
        assert ids[: len(alone)] == alone
    with shared.client() as client:
        client.unload(str(odd))
    at_rest(shared)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/../../b", "models--x", "~root", "x\x00y", "/", "/etc", "." * 9]
)
def test_a_name_that_climbs_finds_nothing(shared: Daemon, name: str) -> None:
    with shared.client() as client, pytest.raises(RequestFailed) as refused:
        client.load(name)
    assert refused.value.code in ("unknown_model", "load_failed")
    assert not isinstance(refused.value, LoadFailed) or name == "/"


def test_errors_never_repeat_long_input(shared: Daemon) -> None:
    long = "secret" * 2000
    with shared.frames() as frames:
        for n, request in enumerate(
            (
                {"type": "generate", "id": 0, "prompt": long},
                {"type": "generate", "id": 1, "prompt": "x", "model": long[:1000]},
                {"type": "generate", "id": 2, "prompt": "x", long: 1},
                {"type": "generate", "id": 3, "prompt": "x", "template_options": {long: long}},
                {"type": long, "id": 4},
                {"type": "generate", "id": 5, "prompt": "x", "temperature": long},
            )
        ):
            frames.body(wire_bytes(request))
            told = [frame for frame in frames.until_terminal(n) if isinstance(frame, wire.Error)]
            assert all(len(error.message) < 600 for error in told), told
            assert not any("secret" * 60 in error.message for error in told)


def wire_bytes(value: Any) -> bytes:
    import msgspec

    return msgspec.msgpack.encode(value)


# ------------------------------------------------------------------------------------------------------------ floods


def test_five_hundred_connections_at_once_are_served_or_told_and_all_let_go(shared: Daemon) -> None:
    alone = answer(shared)
    at_rest(shared)
    before = descriptors(shared)
    clients: list[Frames] = []
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            client = Frames(shared.path, Codec.MSGPACK)
            stack.callback(client.close)
            client.socket.settimeout(PATIENCE_S)
            client.say(wire.Hello(proto=wire.PROTOCOL, client="flood"), wire.Ping(id=1))
            clients.append(client)
        first = [client.read() for client in clients]
        assert all(isinstance(reply, wire.Welcome) for reply in first), "there is room for that many"
        assert answer(shared) == alone
    at_rest(shared)
    # The connection that asked, and a file being written, may be a moment behind.
    deadline = time.monotonic() + PATIENCE_S
    while (left := descriptors(shared)) > before:
        assert time.monotonic() < deadline, f"{left} descriptors, {before} before"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("count", "slack"),
    [
        (600, 8_000_000),  # so few don't fill the heap's pieces evenly
        pytest.param(10_000, 2_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_thousands_of_requests_leave_nothing_behind(shared: Daemon, count: int, slack: int) -> None:
    alone = answer(shared)
    at_rest(shared)

    def flood(share: int) -> None:
        with shared.client() as client:
            for _ in range(share // 50):
                streams = [client.generate("x", temperature=0, max_tokens=2) for _ in range(50)]
                for stream in streams:
                    stream.wait()

    def flood_from_all_sides(count: int) -> None:
        threads = [threading.Thread(target=flood, args=(count // 4,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert answer(shared, priority="interactive") == alone

    flood_from_all_sides(max(count // 4, 400))  # caches, pools and the heap have their size after that
    before = resident(shared)
    flood_from_all_sides(count)
    assert answer(shared) == alone
    at_rest(shared)
    assert resident(shared) < before * 1.03 + slack


def test_who_writes_byte_by_byte_who_stops_half_way_and_who_never_reads_delay_nobody(shared: Daemon) -> None:
    alone = answer(shared)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            half = stack.enter_context(socket.socket(socket.AF_UNIX))
            half.connect(str(shared.path))
            half.sendall(frame(wire.Hello(proto=wire.PROTOCOL), Codec.MSGPACK)[:-3])
        deaf = stack.enter_context(shared.frames())
        deaf.say(*(wire.Generate(id=n, prompt=STORY, max_tokens=200, logprobs=True) for n in range(20)))
        slow = stack.enter_context(shared.frames())
        asked = wire.Generate(id=1, prompt=STORY, temperature=0.0, max_tokens=12, resumable=True)
        for byte in frame(asked, Codec.MSGPACK):
            slow.raw(bytes([byte]))
        assert answer(shared) == alone
        told = slow.until_terminal(1)
        assert [token for one in told if isinstance(one, wire.Token) for token in one.ids] == alone
    at_rest(shared)


def test_clients_that_vanish_while_they_are_restored_from_the_cache_leave_no_lease(path: Path, model: Path) -> None:
    prompt, chance = STORY * 18, random.Random(0)
    with serving(path, model, "--set", "cache.mode=ram") as daemon:
        alone = answer(daemon, prompt)
        for _ in range(40):
            with daemon.frames() as frames:
                frames.say(*(wire.Generate(id=n, prompt=prompt, max_tokens=30) for n in range(3)))
                for _ in range(chance.choice([0, 0, 1, 4, 12])):
                    frames.read()
        assert answer(daemon, prompt) == alone
        at_rest(daemon)
        with daemon.client() as client:
            report = client.cache()
        assert report.hits > 0
        assert report.leases == 0


def test_a_flood_of_garbage_ends_its_own_connections_only(shared: Daemon) -> None:
    alone = answer(shared)
    for data in (
        b"\x00\x00\x00\x05garbage",
        b"\xff" * 100,
        b"{" * 100_000,
        b"\x00\x00\x40\x00" + b"\x91" * 0x4000,
        b"GET / ",
    ):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE_S)
                client.connect(str(shared.path))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
    assert answer(shared) == alone
    at_rest(shared)
