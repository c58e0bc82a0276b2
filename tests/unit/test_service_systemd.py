"""The service under systemd: what systemctl is told, and that doing it twice changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_managers import FakeSystemd, a_program

from mlxbcd.service.commands import NOT_FOUND, NoManager, Outcome, ServiceError
from mlxbcd.service.systemd import Systemd

NOT_INSTALLED = "not installed; install it with: mlxbc service install"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return FakeSystemd(directory=tmp_path / "config" / "systemd" / "user")


def installed(fake: FakeSystemd, tmp_path: Path, *, on_demand: bool = False) -> Systemd:
    systemd = Systemd(fake)
    systemd.install(a_program(tmp_path, on_demand=on_demand))
    fake.said.clear()
    return systemd


# --------------------------------------------------------------------------------------------------------- install


def test_installing_writes_the_units_enables_both_and_starts(fake: FakeSystemd, tmp_path: Path) -> None:
    Systemd(fake).install(a_program(tmp_path))
    assert fake.said == [
        "daemon-reload",
        "enable mlxbc.socket",
        "enable mlxbc.service",
        "reset-failed mlxbc.socket mlxbc.service",
        "start mlxbc.socket mlxbc.service",
    ]
    assert {path.name for path in fake.directory.iterdir()} == {"mlxbc.socket", "mlxbc.service"}


def test_a_service_that_starts_on_demand_listens_and_no_more(fake: FakeSystemd, tmp_path: Path) -> None:
    Systemd(fake).install(a_program(tmp_path, on_demand=True))
    assert (fake.enabled, fake.active) == ({"mlxbc.socket"}, {"mlxbc.socket"})


@pytest.mark.parametrize("on_demand", [False, True])
def test_installing_the_same_again_leaves_a_running_daemon_alone(
    fake: FakeSystemd, tmp_path: Path, on_demand: bool
) -> None:
    systemd = installed(fake, tmp_path, on_demand=on_demand)
    before = {path: path.stat().st_mtime_ns for path in fake.directory.iterdir()}
    systemd.install(a_program(tmp_path, on_demand=on_demand))
    assert {path: path.stat().st_mtime_ns for path in fake.directory.iterdir()} == before
    assert not [line for line in fake.said if line.startswith(("stop", "restart", "daemon-reload"))]


def test_another_option_stops_the_daemon_before_the_unit_changes(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    systemd.install(a_program(tmp_path, model="other"))
    assert fake.said == [
        "stop mlxbc.socket mlxbc.service",
        "daemon-reload",
        "enable mlxbc.socket",
        "enable mlxbc.service",
        "reset-failed mlxbc.socket mlxbc.service",
        "start mlxbc.socket mlxbc.service",
    ]
    assert b"--model=other" in fake.read["mlxbc.service"]


def test_changing_the_mode_needs_no_stop(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    systemd.install(a_program(tmp_path, on_demand=True))
    assert fake.enabled == {"mlxbc.socket"}
    assert "mlxbc.service" in fake.active, "the daemon that runs goes on"
    systemd.install(a_program(tmp_path))
    assert fake.enabled == {"mlxbc.socket", "mlxbc.service"}


def test_uninstalling_leaves_nothing(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    assert systemd.uninstall()
    assert fake.said == [
        "disable --now mlxbc.socket mlxbc.service",
        "daemon-reload",
        "reset-failed mlxbc.socket mlxbc.service",
    ]
    assert (fake.active, fake.enabled, fake.read) == (set(), set(), {})
    assert not systemd.uninstall(), "the second time there is nothing to do"


def test_units_that_cannot_be_written_are_said(fake: FakeSystemd, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("in the way")
    with pytest.raises(ServiceError, match=r"cannot write .*mlxbc\.socket: "):
        Systemd(fake).install(a_program(tmp_path))


# ---------------------------------------------------------------------------------------------- start, stop, restart


def test_stopping_stops_listening_too(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    systemd.stop()
    assert fake.active == set()
    assert not systemd.state().up
    systemd.stop()


@pytest.mark.parametrize(
    ("on_demand", "started"), [(False, {"mlxbc.socket", "mlxbc.service"}), (True, {"mlxbc.socket"})]
)
def test_starting_starts_as_it_was_installed(
    fake: FakeSystemd, tmp_path: Path, on_demand: bool, started: set[str]
) -> None:
    systemd = installed(fake, tmp_path, on_demand=on_demand)
    systemd.stop()
    systemd.start()
    assert fake.active == started


def test_restarting_goes_on_listening(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    systemd.restart()
    assert [line for line in fake.said if "reset" not in line] == ["start mlxbc.socket", "restart mlxbc.service"]


def test_restarting_what_waits_for_a_connection_goes_on_waiting(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path, on_demand=True)
    systemd.restart()
    assert fake.active == {"mlxbc.socket"}


def test_starting_again_what_has_failed_too_often_is_allowed_to_a_person(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    fake.active.clear()
    fake.failed = "mlxbc.service"
    systemd.start()
    assert systemd.state().pid == 4711


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_what_is_not_installed_is_said_with_the_way_out(fake: FakeSystemd, verb: str) -> None:
    with pytest.raises(ServiceError, match=NOT_INSTALLED):
        getattr(Systemd(fake), verb)()
    assert fake.said == []


def test_a_start_that_fails_says_why_and_where_to_look(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    fake.broken["start"] = [Outcome(1, err="Job for mlxbc.service failed because a timeout was exceeded.\nSee ...\n")]
    with pytest.raises(ServiceError) as told:
        systemd.start()
    assert str(told.value) == (
        "systemctl --user start mlxbc.socket mlxbc.service failed: "
        "Job for mlxbc.service failed because a timeout was exceeded. See ...; see: mlxbc service logs"
    )


# ------------------------------------------------------------------------------------------------------ state, logs


def test_the_state_of_each_mode(fake: FakeSystemd, tmp_path: Path) -> None:
    nothing = Systemd(fake).state()
    assert (nothing.installed, nothing.up, nothing.pid, nothing.notes) == (False, False, None, ())
    resident = installed(fake, tmp_path).state()
    assert (resident.installed, resident.at_login, resident.listening, resident.pid) == (True, True, True, 4711)
    fake.active.discard("mlxbc.service")
    waiting = installed(fake, tmp_path, on_demand=True).state()
    assert (waiting.installed, waiting.at_login, waiting.listening, waiting.pid) == (True, False, True, None)


def test_a_service_that_failed_for_good_says_how_it_ended(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    fake.active.clear()
    fake.failed = "mlxbc.service"
    state = systemd.state()
    assert state.ended == "exit-code, status 78"
    assert state.notes == ("it failed too often or for good, and is not started again; see: mlxbc service logs",)


def test_units_that_were_edited_are_noticed(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    (fake.directory / "mlxbc.service").write_text("# edited\n")
    (note,) = systemd.state().notes
    assert "have changed" in note
    systemd.install(a_program(tmp_path))
    assert systemd.state().notes == ()


def test_the_log_is_the_journals(fake: FakeSystemd, tmp_path: Path) -> None:
    systemd = installed(fake, tmp_path)
    systemd.logs(20, follow=False)
    systemd.logs(5, follow=True)
    assert fake.shown == [
        ("journalctl", "--user-unit=mlxbc.service", "--lines=20", "--no-pager"),
        ("journalctl", "--user-unit=mlxbc.service", "--lines=5", "--follow"),
    ]


# ------------------------------------------------------------------------------------------------------- no manager


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(NOT_FOUND, err="there is no command systemctl"), "this system has no systemd"),
        (
            Outcome(1, err="Failed to connect to bus: No medium found\n"),
            r"systemd does not run for this user \(Failed to connect to bus: No medium found\)",
        ),
    ],
)
def test_without_systemd_the_way_without_it_is_said(fake: FakeSystemd, outcome: Outcome, said: str) -> None:
    fake.broken["show"] = [outcome]
    with pytest.raises(NoManager, match=f"{said}; .* start the daemon with: mlxbc serve --detach"):
        Systemd(fake)
