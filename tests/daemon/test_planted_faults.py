"""`mlxbc doctor` as a person runs it, on faults that are there: it finds each, names its fix, and exits with 1."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_daemon import PATIENCE_S, socket_path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "unit"))

from tiny_directory import write_model

from mlxbc import Client

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="its directories are Linux's"),
]

REAL = ["-P", "-m", "mlxbcd.serve.main"]
OLDER = ["-c", "import mlxbcd; mlxbcd.__version__ = '0.0.9'; from mlxbcd.serve.main import main; main()"]
SERVER = "import threading; print('serving', flush=True); threading.Event().wait()"
MACHINES_OWN = {"others", "memory", "service"}
"""What the machine that runs the tests may really have: other servers, little memory, a service of its user's."""


@dataclass
class Ward:
    """A user's home with a model in it, and perhaps a daemon that runs."""

    home: Path
    socket: Path

    @property
    def environment(self) -> dict[str, str]:
        kinds = {f"XDG_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CONFIG", "CACHE", "STATE")}
        own = {"HOME": str(self.home), "MLXBC_DATA": str(self.home / "data"), "MLXBC_SOCKET": str(self.socket)}
        return {**os.environ, **kinds, **own, "HF_HUB_CACHE": str(self.home / "hub")}

    @property
    def model(self) -> Path:
        return self.home / "data" / "models" / "smollm2-135m-instruct"

    @contextlib.contextmanager
    def daemon(self, program: list[str] = REAL, **environment: str) -> Iterator[subprocess.Popen[str]]:
        popen = subprocess.Popen(
            [sys.executable, *program, "--no-preload"],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert popen.stderr
            assert any("ready after" in line for line in popen.stderr)
            yield popen
        finally:
            popen.kill()
            popen.communicate()

    def examine(self) -> tuple[int, list[dict[str, str]]]:
        """The doctor's exit code, and the faults it tells."""
        told = subprocess.run(
            [sys.executable, "-m", "mlxbc", "doctor", "--no-probe", "--json"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S * 2,
            check=False,
        )
        assert told.stderr == b""
        return told.returncode, [one for one in json.loads(told.stdout) if one["level"] == "fault"]


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """One whose daemon runs. Tests leave it as it was."""
    with socket_path() as path:
        ward = Ward(tmp_path_factory.mktemp("home"), path)
        write_model(ward.model)
        with ward.daemon():
            yield ward


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Ward]:
    """One without a daemon."""
    with socket_path() as path:
        ward = Ward(tmp_path, path)
        write_model(ward.model)
        yield ward


def test_nothing_is_wrong_with_a_daemon_that_is_well(well: Ward) -> None:
    code, faults = well.examine()
    assert {fault["about"] for fault in faults} <= MACHINES_OWN, faults
    assert code == bool(faults)


# -- faults, each undone afterwards


@contextlib.contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """A file that holds something else, or that was not there."""
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


@contextlib.contextmanager
def opened(path: Path, mode: int) -> Iterator[None]:
    """Something that others may use."""
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


def settings(text: str) -> Callable[[Ward], AbstractContextManager[Any]]:
    return lambda ward: changed(ward.home / "config" / "mlxbc" / "config.toml", text.encode())


def socket_for_everybody(ward: Ward) -> AbstractContextManager[Any]:
    return opened(ward.socket, 0o666)


def directory_for_everybody(ward: Ward) -> AbstractContextManager[Any]:
    return opened(ward.socket.parent, 0o755)


@contextlib.contextmanager
def log_for_everybody(ward: Ward) -> Iterator[None]:
    log = ward.home / "state" / "mlxbc" / "log" / "mlxbcd.log"
    with changed(log, b"2026-01-01 00:00:00,000 INFO mlxbcd.serve.main: listening on /s (pid 1)\n"), opened(log, 0o644):
        yield


@contextlib.contextmanager
def stopped_process(ward: Ward) -> Iterator[None]:
    """The daemon's process stands still, as one does that hangs."""
    pid = int(ward.socket.with_name(f"{ward.socket.name}.lock").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def lost_model(ward: Ward) -> AbstractContextManager[Any]:
    return moved(ward.model)


@contextlib.contextmanager
def moved(path: Path) -> Iterator[None]:
    path.rename(path.with_name("elsewhere"))
    try:
        yield
    finally:
        path.with_name("elsewhere").rename(path)


def cut_weights(ward: Ward) -> AbstractContextManager[Any]:
    weights = ward.model / "model.safetensors"
    return changed(weights, weights.read_bytes()[:-100])


@contextlib.contextmanager
def another_server(ward: Ward) -> Iterator[None]:
    """A process that is called as mlx-lm's server is."""
    package = ward.home / "elsewhere" / "mlx_lm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server.py").write_text(SERVER)
    line = [sys.executable, "-m", "mlx_lm.server"]
    with subprocess.Popen(line, cwd=package.parent, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == b"serving\n"
        try:
            yield
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("plant", "about", "said", "fix"),
    [
        (settings("[log]\nlevle = 'info'\n"), "settings", "did you mean log.level?", "mlxbc config check"),
        (settings("[memory]\nlimit = '9000GiB'\n"), "memory", "would run dry", "set memory.limit to auto"),
        (socket_for_everybody, "socket", "others may connect", "chmod 600 {socket}"),
        (directory_for_everybody, "socket", "others may enter", "chmod 700 {directory}"),
        (log_for_everybody, "log", "others may read", "chmod 600 {home}"),
        (stopped_process, "daemon", "does not answer: the daemon sent nothing", "kill "),
        (lost_model, "models", "the model smollm2 is not here yet", "mlxbc pull smollm2"),
        (cut_weights, "models", "smollm2 is damaged: model.safetensors", "mlxbc pull smollm2"),
        (another_server, "others", "(mlx_lm.server) keeps models in memory", "kill "),
    ],
)
def test_a_fault_around_a_running_daemon_is_found_and_its_fix_is_named(
    well: Ward, plant: Callable[[Ward], AbstractContextManager[Any]], about: str, said: str, fix: str
) -> None:
    with plant(well):
        code, faults = well.examine()
    assert code == 1
    assert {fault["about"] for fault in faults} - {about} <= MACHINES_OWN, faults
    places = {"socket": well.socket, "directory": well.socket.parent, "home": well.home}
    assert any(said in fault["text"] and fix.format(**places) in fault["fix"] for fault in faults), faults


def test_a_daemon_that_was_not_started_anew_after_an_update_is_found(empty: Ward) -> None:
    with empty.daemon(OLDER):
        code, faults = empty.examine()
    (fault,) = [fault for fault in faults if fault["about"] == "version"]
    assert code == 1
    assert "the running daemon is version 0.0.9" in fault["text"]
    assert "mlxbc serve --replace --detach --wait" in fault["fix"]


def test_a_device_that_hangs_is_found(empty: Ward) -> None:
    faulty = [str(HERE / "faulty_daemon.py")]
    with (
        empty.daemon(faulty, MLXBC_TEST_FAULT="hangs 5") as daemon,
        Client(empty.socket, timeout=PATIENCE_S) as client,
        client.generate("x" * 5, max_tokens=1),
    ):
        about: list[dict[str, str]] = []
        while not about:
            assert daemon.poll() is None
            about = [fault for fault in empty.examine()[1] if fault["about"] == "daemon"]
    (fault,) = about
    assert fault["text"] == "its device has failed or hangs"
    assert "mlxbc stop --now" in fault["fix"]


def test_something_else_at_the_sockets_path_is_found(empty: Ward) -> None:
    empty.socket.touch(mode=0o600)
    code, faults = empty.examine()
    (fault,) = [fault for fault in faults if fault["about"] == "socket"]
    assert code == 1
    assert "is not a socket" in fault["text"]
    assert fault["fix"] == f"mv {empty.socket} {empty.socket}.old"
