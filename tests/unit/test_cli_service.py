"""`mlxbc service`: what each verb does, shows and refuses."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon, Session
from fake_managers import FakeLaunchd, FakeSystemd

from mlxbc import cli, wire
from mlxbc.cli import exits
from mlxbcd.serve.listen import listen
from mlxbcd.service import manager
from mlxbcd.service.commands import NoManager, Outcome
from mlxbcd.service.launchd import Launchd

Output = Callable[[], tuple[str, str]]


@pytest.fixture
def output(capfd: pytest.CaptureFixture[str]) -> Output:
    """What came out since the last call: standard output, standard error."""
    return lambda: tuple(capfd.readouterr())


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the daemon listens."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        socket = Path(directory) / "s"
        monkeypatch.setenv("MLXBC_SOCKET", str(socket))
        yield socket


@pytest.fixture
def systemd(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    fake = FakeSystemd(directory=tmp_path / "config" / "systemd" / "user")
    this_system = manager.this_system
    monkeypatch.setattr(manager, "this_system", lambda quiesce: this_system(quiesce, commands=fake, platform="linux"))
    return fake


@pytest.fixture
def launchd(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLaunchd:
    """Its daemon ends when the command has asked it to."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fake = FakeLaunchd()

    def end(quiesce: Callable[[], None]) -> None:
        quiesce()
        fake.quiesce()

    monkeypatch.setattr(manager, "this_system", lambda quiesce: Launchd(fake, 501, lambda: end(quiesce)))
    return fake


# ----------------------------------------------------------------------------------------------------------- verbs


def test_from_install_to_uninstall(systemd: FakeSystemd, output: Output) -> None:
    assert cli.main(["service", "status"]) == exits.UNAVAILABLE
    assert "not installed; install it with: mlxbc service install" in output()[0]

    assert cli.main(["service", "install", "--model", "smollm2", "--no-preload"]) == 0
    assert output() == ("installed: the daemon runs, and starts at every login\n", "")
    unit = systemd.read["mlxbc.service"].decode()
    assert "ExecStart=" + sys.executable in unit
    assert "mlxbcd.serve.main --model=smollm2 --no-preload\n" in unit

    assert cli.main(["service", "status"]) == 0
    assert output()[0].splitlines() == [
        "service   systemd, starts at login",
        f"unit      {systemd.directory}/mlxbc.service",
        "state     running, pid 4711",
    ]
    assert cli.main(["service", "restart"]) == 0
    assert cli.main(["service", "stop"]) == 0
    assert cli.main(["service", "status"]) == exits.UNAVAILABLE
    assert "state     stopped\n" in output()[0]
    assert cli.main(["service", "start"]) == 0
    assert cli.main(["service", "status"]) == 0
    output()

    assert cli.main(["service", "uninstall"]) == 0
    assert output() == ("uninstalled\n", "")
    assert cli.main(["service", "uninstall"]) == 0
    assert output() == ("", "mlxbc: the service was not installed\n")


def test_a_service_on_demand_is_well_without_a_daemon(systemd: FakeSystemd, output: Output) -> None:
    assert cli.main(["service", "install", "--on-demand"]) == 0
    assert output() == ("installed: the daemon starts at the first connection\n", "")
    assert cli.main(["service", "status"]) == 0
    shown = output()[0]
    assert "starts at the first connection\n" in shown
    assert "state     no daemon; the next connection starts one\n" in shown


def test_a_model_that_is_a_path_is_made_absolute(
    systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["service", "install", "-m", "./model"]) == 0
    assert f"--model={tmp_path}/model\n" in systemd.read["mlxbc.service"].decode()


def test_status_tells_how_it_ended_and_what_to_do(systemd: FakeSystemd, output: Output) -> None:
    cli.main(["service", "install"])
    output()
    systemd.active.clear()
    systemd.failed = "mlxbc.service"
    assert cli.main(["service", "status"]) == exits.UNAVAILABLE
    shown = output()[0].splitlines()
    assert "ended     exit-code, status 78" in shown
    assert any(line.startswith("note      it failed too often") for line in shown)


def test_logs_show_as_much_as_was_asked_for(systemd: FakeSystemd) -> None:
    assert cli.main(["service", "logs"]) == 0
    assert cli.main(["service", "logs", "-n", "7", "-f"]) == 0
    assert [(command[2], command[3]) for command in systemd.shown] == [
        ("--lines=50", "--no-pager"),
        ("--lines=7", "--follow"),
    ]
    systemd.show = lambda *_command: 1
    assert cli.main(["service", "logs"]) == exits.FAILED


def test_a_manager_that_fails_is_one_line(systemd: FakeSystemd, output: Output) -> None:
    systemd.broken["start"] = [Outcome(1, err="Job for mlxbc.service failed.\n")]
    assert cli.main(["service", "install"]) == exits.FAILED
    shown, complained = output()
    assert shown == ""
    assert complained.startswith("mlxbc: systemctl --user start mlxbc.socket mlxbc.service failed: Job for")
    assert complained.endswith("; see: mlxbc service logs\n")


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["start", "--on-demand"], "--on-demand is an option of: mlxbc service install"),
        (["logs", "--model", "m"], "--model is an option of: mlxbc service install"),
        (["install", "-f"], "--follow is an option of: mlxbc service logs"),
        (["logs", "-n", "0"], "'0' is not a number of lines"),
        (["reinstall"], "invalid choice: 'reinstall'"),
        ([], "VERB"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_a_usage_error(
    systemd: FakeSystemd, arguments: list[str], said: str, output: Output
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["service", *arguments])
    assert ended.value.code == exits.USAGE
    assert said in output()[1]
    assert systemd.said == []


@pytest.mark.parametrize("verb", ["install", "start", "restart"])
def test_a_daemon_that_was_started_by_hand_is_not_cut_off(
    systemd: FakeSystemd, path: Path, verb: str, output: Output
) -> None:
    with listen(path):
        assert cli.main(["service", verb]) == exits.FAILED
    assert f"serves {path}; end it first: mlxbc stop" in output()[1]
    assert systemd.said == []


def test_the_services_own_daemon_is_no_reason_to_refuse(
    systemd: FakeSystemd, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["service", "install"]) == 0
    monkeypatch.setattr(manager, "holder", lambda where: 4711 if where == path else None)
    assert cli.main(["service", "install"]) == 0
    monkeypatch.setattr(manager, "holder", lambda _where: 4712)
    assert cli.main(["service", "install"]) == exits.FAILED


def test_without_the_daemons_packages_it_is_said_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, output: Output
) -> None:
    module = importlib.import_module("mlxbc.cli.serve")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "mlx" else object())
    assert cli.main(["service", "status"]) == exits.UNAVAILABLE
    assert "pip install '.[daemon]'" in output()[1]


def test_a_user_without_a_service_manager_is_told_the_way_without_one(systemd: FakeSystemd, output: Output) -> None:
    systemd.broken["show"] = [Outcome(1, err="Failed to connect to bus: No medium found\n")]
    assert cli.main(["service", "install"]) == exits.CONFIG
    assert output() == (
        "",
        "mlxbc: systemd does not run for this user (Failed to connect to bus: No medium found); "
        "without a service manager start the daemon with: mlxbc serve --detach --wait\n",
    )


@pytest.mark.parametrize(
    ("verb", "instead"),
    [
        ("logs", "/mlxbcd.log"),
        ("status", "mlxbc status"),
        ("stop", "mlxbc stop"),
        ("restart", "mlxbc serve --replace --detach --wait"),
        ("uninstall", "nothing to uninstall"),
    ],
)
def test_without_a_service_manager_each_verb_names_what_does_the_same(
    systemd: FakeSystemd, output: Output, verb: str, instead: str
) -> None:
    systemd.broken["show"] = [Outcome(1, err="Failed to connect to bus: No medium found\n")]
    assert cli.main(["service", verb]) == exits.CONFIG
    assert output()[1].endswith(f"{instead}\n")


def test_a_system_with_neither_manager_is_told_the_same() -> None:
    with pytest.raises(NoManager, match=r"on freebsd14; .* mlxbc serve --detach"):
        manager.this_system(lambda: None, platform="freebsd14")


# --------------------------------------------------------------------------------------------------------- launchd


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that plays the daemon's, and ends when it is told to."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_under_launchd_the_daemon_is_asked_over_its_socket_before_the_agent_goes(
    launchd: FakeLaunchd, path: Path, child: subprocess.Popen[bytes]
) -> None:
    assert cli.main(["service", "install"]) == 0

    def script(session: Session) -> None:
        request = session.receive(wire.Shutdown)
        assert request.drain, "running requests finish first"
        assert "bootout" not in " ".join(launchd.said)
        session.send(wire.Bye(id=request.id))
        child.kill()

    with FakeDaemon(path, script, pid=child.pid):
        assert cli.main(["service", "stop"]) == 0
    assert child.wait(0) != 0
    assert launchd.said[-1].startswith("bootout gui/501/")
    assert launchd.loaded == {}


def test_a_daemon_that_does_not_understand_is_left_to_launchds_signal(launchd: FakeLaunchd, path: Path) -> None:
    assert cli.main(["service", "install"]) == 0

    def script(session: Session) -> None:
        session.receive(wire.Shutdown)  # and no answer

    with FakeDaemon(path, script):
        assert cli.main(["service", "stop"]) == 0
    assert launchd.loaded == {}
