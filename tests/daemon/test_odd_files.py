"""Disks that are full, models that are odd, names that climb: refused with the reason, and nobody else is disturbed."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from real_daemon import PATIENCE_S, Daemon
from tiny_daemon import NO_ROOM, STORY, answer, at_rest, await_status, serving

from mlxbc import Client, wire
from mlxbc.errors import DeviceError, LoadFailed, MlxbcError, RequestFailed

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes"),
]


# ------------------------------------------------------------------------------------------------------------- disk


def test_a_full_disk_costs_the_log_and_nothing_else(path: Path, tiny_model: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--socket", str(path), "--model", str(tiny_model)]
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


def test_where_nothing_can_be_written_all_is_served_and_kept_in_memory(
    path: Path, tiny_model: Path, tmp_path: Path
) -> None:
    cache = ["--set", "cache.mode=disk", "--set", f"cache.directory={tmp_path / 'cache'}", "--cache-disk", "1GB"]
    with serving(path, tiny_model, *cache, room=False) as daemon, daemon.client() as client:
        alone = answer(daemon)
        prompt = STORY * 18  # one block of tokens that can be cached, and some more
        first, second = (client.generate(prompt, temperature=0, max_tokens=5).wait() for _ in range(2))
        assert (first.text, first.usage.cached) == (second.text, 0)
        assert second.usage.cached >= 256
        client.unload(str(tiny_model))  # what was learnt about it can't be kept
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
    tiny: Daemon, tiny_model: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    odd = Path(shutil.copytree(tiny_model, tmp_path / "odd"))
    spoil(odd)
    alone = answer(tiny)
    with tiny.client() as client, pytest.raises(RequestFailed) as refused:
        client.load(str(odd))
    assert refused.value.code in ("load_failed", "unknown_model")
    assert answer(tiny) == alone
    assert [one.model for one in at_rest(tiny).models] == [str(tiny_model)]


def test_weights_that_make_no_sense_fail_who_asks_for_them_and_nobody_else(
    tiny: Daemon, tiny_model: Path, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(tiny_model, tmp_path / "odd"))
    weights = mx.load(str(odd / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(
        str(odd / "model.safetensors"), {name: mx.full(each.shape, math.nan) for name, each in weights.items()}
    )
    alone = answer(tiny)
    with tiny.client() as client, client.generate(STORY, temperature=0, max_tokens=300, resumable=True) as beside:
        ids = [token for event in itertools.islice(beside, 5) if isinstance(event, wire.Token) for token in event.ids]
        with pytest.raises(DeviceError, match="NaN or infinity"):
            answer(tiny, model=str(odd))
        while len(ids) < len(alone):
            event = next(beside)
            ids += event.ids if isinstance(event, wire.Token) else []
        assert ids[: len(alone)] == alone
    with tiny.client() as client:
        client.unload(str(odd))
    at_rest(tiny)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/../../b", "models--x", "~root", "x\x00y", "/", "/etc", "." * 9]
)
def test_a_name_that_climbs_finds_nothing(tiny: Daemon, name: str) -> None:
    with tiny.client() as client, pytest.raises(RequestFailed) as refused:
        client.load(name)
    assert refused.value.code in ("unknown_model", "load_failed")
    assert not isinstance(refused.value, LoadFailed) or name == "/"


def test_errors_never_repeat_long_input(tiny: Daemon) -> None:
    long = "secret" * 2000
    with tiny.frames() as frames:
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
