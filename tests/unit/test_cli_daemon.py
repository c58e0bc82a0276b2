"""The commands that start and stop the daemon, and that need its package."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import pytest
from fake_daemon import FakeDaemon, Session

from mlxbc import cli, wire
from mlxbc.cli import exits, stop


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command looks for its daemon. Standard input is closed, so that no command waits for it."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        socket = Path(directory) / "s"
        monkeypatch.setenv("MLXBC_SOCKET", str(socket))
        monkeypatch.setattr(sys, "stdin", None)
        yield socket


Output = Callable[[], tuple[str, str]]


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Output:
    """What came out since the last call: standard output, standard error."""
    return lambda: tuple(capfd.readouterr())


# ------------------------------------------------------------ stopping


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays the daemon's, and ends when it is told to."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(("arguments", "drain"), [([], True), (["--now"], False)])
def test_stop_returns_when_the_process_is_gone(
    path: Path, child: subprocess.Popen[bytes], arguments: list[str], drain: bool
) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Shutdown)
        assert request.drain is drain
        session.send(wire.Bye(id=request.id))
        child.kill()

    with FakeDaemon(path, script, pid=child.pid):
        assert cli.main(["stop", *arguments]) == 0
    assert child.wait(0) != 0


def test_stop_gives_up_after_its_timeout(path: Path, child: subprocess.Popen[bytes], output: Output) -> None:
    def script(session: Session) -> None:
        session.send(wire.Bye(id=session.receive(wire.Shutdown).id))
        session.until_gone()

    with FakeDaemon(path, script, pid=child.pid):
        assert cli.main(["stop", "--timeout", "1"]) == exits.TIMEOUT
    assert f"pid {child.pid}" in output()[1]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_no_time_is_a_usage_error(seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["stop", "--timeout", seconds])
    assert ended.value.code == exits.USAGE


def test_stopping_what_does_not_run_is_a_success(path: Path, output: Output) -> None:
    assert cli.main(["stop"]) == 0
    assert output() == ("", "mlxbc: no daemon is running\n")


def test_without_process_descriptors_the_process_is_polled(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.pidfd_open", raising=False)
    with stop._Process(child.pid) as process:
        assert not process.ended_by(time.monotonic() + 0.01)
        child.kill()
        child.wait()
        assert process.ended_by(time.monotonic() + 5)


# ------------------------------------------------------------ the daemon's package


def pretend_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    """Put a module in the place of one that would bring the whole daemon in."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_serve_hands_its_arguments_on_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []

    def main(argv: list[str]) -> int:
        received.append(argv)
        return 3

    pretend_module(monkeypatch, "mlxbcd.serve.main", main=main)
    assert cli.main(["serve", "--detach", "--help", "--made-up=1"]) == 3
    assert received == [["--detach", "--help", "--made-up=1"]]


@pytest.mark.parametrize("arguments", [["serve", "--detach"], ["pull", "smollm2"]])
def test_without_the_daemons_packages_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, output: Output, arguments: list[str]
) -> None:
    module = importlib.import_module("mlxbc.cli.serve")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "mlx" else object())
    assert cli.main(arguments) == exits.UNAVAILABLE
    _, complained = output()
    assert "pip install '.[daemon]'" in complained
    assert "(no mlx)" in complained


def test_pull_prints_where_the_model_is(monkeypatch: pytest.MonkeyPatch, output: Output) -> None:
    def pull(name: str, *, report: Callable[[str], None]) -> Path:
        report(f"fetching {name}")
        return Path("/data/models/tiny")

    pretend_module(monkeypatch, "mlxbcd.residency.pull", pull=pull)
    assert cli.main(["pull", "tiny"]) == 0
    assert output() == ("/data/models/tiny\n", "fetching tiny\n")
    assert cli.main(["pull", "-q", "tiny"]) == 0
    assert output() == ("/data/models/tiny\n", "")


def test_a_pull_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, output: Output) -> None:
    from mlxbcd.errors import ServeError

    def pull(name: str, *, report: Callable[[str], None]) -> Path:
        raise ServeError("unknown_model", f"there is no {name}")

    pretend_module(monkeypatch, "mlxbcd.residency.pull", pull=pull)
    assert cli.main(["pull", "nothing"]) == exits.CONFIG
    assert output() == ("", "mlxbc: there is no nothing\n")
