"""The service under launchd: what launchctl is told, and what is done about the ways in which it fails."""

from __future__ import annotations

import plistlib
from pathlib import Path

import pytest
from fake_managers import LABEL, FakeLaunchd, a_program

from mlxbcd.service.commands import NOT_FOUND, NoManager, Outcome, ServiceError
from mlxbcd.service.launchd import Launchd

GUI = f"gui/501/{LABEL}"
EIO = Outcome(5, err="Bootstrap failed: 5: Input/output error\nTry re-running the command as root.\n")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLaunchd:
    monkeypatch.setenv("HOME", str(tmp_path))
    return FakeLaunchd()


@pytest.fixture
def plist(tmp_path: Path) -> Path:
    return tmp_path / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def launchd(fake: FakeLaunchd) -> Launchd:
    return Launchd(fake, 501, fake.quiesce)


def installed(fake: FakeLaunchd, tmp_path: Path, *, on_demand: bool = False) -> Launchd:
    manager = launchd(fake)
    manager.install(a_program(tmp_path, on_demand=on_demand))
    fake.said.clear()
    return manager


# --------------------------------------------------------------------------------------------------------- install


def test_installing_writes_the_agent_and_loads_it_into_the_session_on_the_screen(
    fake: FakeLaunchd, tmp_path: Path, plist: Path
) -> None:
    launchd(fake).install(a_program(tmp_path))
    assert fake.said == [f"enable {GUI}", f"bootstrap gui/501 {plist}"]
    assert fake.running == {"gui/501"}
    assert fake.loaded["gui/501"]["LimitLoadToSessionType"] == "Aqua"
    for directory in (tmp_path / "run", tmp_path / "logs"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_over_ssh_the_users_own_domain_is_taken(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    fake.domains = {"user/501"}
    launchd(fake).install(a_program(tmp_path))
    assert fake.said == [f"enable user/501/{LABEL}", f"bootstrap user/501 {plist}"]
    assert fake.loaded["user/501"]["LimitLoadToSessionType"] == "Background"


def test_a_service_that_starts_on_demand_is_loaded_and_does_not_run(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path, on_demand=True)
    state = manager.state()
    assert (state.listening, state.pid, state.at_login, state.up) == (True, None, False, True)


@pytest.mark.parametrize("on_demand", [False, True])
def test_installing_the_same_again_tells_launchd_nothing(
    fake: FakeLaunchd, tmp_path: Path, plist: Path, on_demand: bool
) -> None:
    manager = installed(fake, tmp_path, on_demand=on_demand)
    before = plist.stat().st_mtime_ns
    manager.install(a_program(tmp_path, on_demand=on_demand))
    assert fake.said == []
    assert plist.stat().st_mtime_ns == before
    assert fake.quiesced == 0


def test_installing_the_same_again_starts_a_daemon_that_was_told_to_end(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.running.clear()
    manager.install(a_program(tmp_path))
    assert fake.said == [f"kickstart {GUI}"]


def test_another_option_lets_the_daemon_end_then_loads_the_new_agent(
    fake: FakeLaunchd, tmp_path: Path, plist: Path
) -> None:
    manager = installed(fake, tmp_path)
    manager.install(a_program(tmp_path, model="other"))
    assert fake.quiesced == 1
    assert fake.said == [f"bootout {GUI}", f"enable {GUI}", f"bootstrap gui/501 {plist}"]
    assert "--model=other" in fake.loaded["gui/501"]["ProgramArguments"]


def test_an_agent_that_ssh_loaded_moves_to_the_screen(fake: FakeLaunchd, tmp_path: Path) -> None:
    fake.domains = {"user/501"}
    installed(fake, tmp_path)
    fake.domains = {"user/501", "gui/501"}
    installed(fake, tmp_path)
    assert set(fake.loaded) == {"gui/501"}


def test_uninstalling_leaves_nothing_but_logs(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    manager = installed(fake, tmp_path)
    assert manager.uninstall()
    assert fake.quiesced == 1
    assert fake.loaded == {}
    assert not plist.exists()
    assert not manager.uninstall(), "the second time there is nothing to do"


def test_an_agent_whose_file_is_gone_can_still_be_uninstalled(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    manager = installed(fake, tmp_path)
    plist.unlink()
    assert manager.uninstall()
    assert fake.loaded == {}


def test_a_broken_agent_is_installed_anew(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    manager = installed(fake, tmp_path)
    plist.write_text("<plist><dict><key>")
    assert manager.state().installed
    manager.install(a_program(tmp_path))
    assert plistlib.loads(plist.read_bytes())["Label"] == LABEL


# ------------------------------------------------------------------------------------------------ how launchctl fails


def test_letting_go_is_waited_for_before_loading(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.lingers = 7
    manager.restart()
    assert fake.running == {"gui/501"}
    assert fake.waited == [0.5] * 7


def test_an_input_output_error_right_after_letting_go_is_tried_again(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.reluctant = 3
    manager.restart()
    assert fake.running == {"gui/501"}
    assert fake.waited == [0.5, 1.0, 2.0], "ever longer"


def test_an_input_output_error_that_stays_is_told_after_some_tries(fake: FakeLaunchd, tmp_path: Path) -> None:
    fake.broken["bootstrap"] = [EIO] * 100
    with pytest.raises(ServiceError, match=r"does not load .*plist: Bootstrap failed: 5: Input/output error Try"):
        launchd(fake).install(a_program(tmp_path))
    assert sum(line.startswith("bootstrap") for line in fake.said) == 6


def test_without_a_session_on_the_screen_that_is_told_as_the_likely_reason(fake: FakeLaunchd, tmp_path: Path) -> None:
    fake.domains = {"user/501"}
    fake.broken["bootstrap"] = [EIO] * 100
    with pytest.raises(ServiceError, match="nobody is logged in on the screen"):
        launchd(fake).install(a_program(tmp_path))


def test_an_error_that_waiting_does_not_mend_is_told_at_once(fake: FakeLaunchd, tmp_path: Path) -> None:
    fake.broken["bootstrap"] = [Outcome(125, err="Bootstrap failed: 125: Domain does not support specified action\n")]
    with pytest.raises(ServiceError, match="125: Domain does not support"):
        launchd(fake).install(a_program(tmp_path))
    assert fake.waited == []


def test_a_load_that_only_says_that_it_succeeded_is_found_out(fake: FakeLaunchd, tmp_path: Path) -> None:
    fake.broken["bootstrap"] = [Outcome(0)] * 100
    with pytest.raises(ServiceError, match="says that it did, but the agent is not there"):
        launchd(fake).install(a_program(tmp_path))


def test_an_agent_that_was_loaded_meanwhile_is_loaded(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.reluctant = 1
    agent = fake.loaded["gui/501"]
    manager.stop()
    fake.wait = lambda _seconds: fake.loaded.update({"gui/501": agent})
    manager.start()
    assert "gui/501" in fake.loaded


@pytest.mark.parametrize("modern", [True, False])
def test_an_agent_that_launchctl_has_disabled_is_enabled(fake: FakeLaunchd, tmp_path: Path, modern: bool) -> None:
    fake.disabled, fake.modern = True, modern
    launchd(fake).install(a_program(tmp_path))
    assert fake.running == {"gui/501"}


@pytest.mark.parametrize("modern", [True, False])
def test_an_agent_that_is_off_in_login_items_says_where_to_allow_it(
    fake: FakeLaunchd, tmp_path: Path, modern: bool
) -> None:
    fake.disabled = fake.stubborn = True
    fake.modern = modern
    with pytest.raises(ServiceError, match=r"switched off in System Settings .* Login Items; allow it there"):
        launchd(fake).install(a_program(tmp_path))
    assert not any(line.startswith("bootstrap") for line in fake.said)
    (note,) = launchd(fake).state().notes
    assert "Login Items" in note


def test_a_bootout_that_is_refused_is_told(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.broken["bootout"] = [Outcome(1, err="Boot-out failed: 1: Operation not permitted\n")]
    with pytest.raises(ServiceError, match="does not let go of the service: Boot-out failed: 1"):
        manager.stop()


def test_a_daemon_that_does_not_end_is_told_and_nobody_kills_it(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.deaf, fake.lingers = True, 10_000
    with pytest.raises(ServiceError, match="still ending after 100 s"):
        manager.stop()
    assert sum(fake.waited) == 100, "longer than the agent's ExitTimeOut"
    assert fake.said == [f"bootout {GUI}"]


# ---------------------------------------------------------------------------------------------- start, stop, restart


def test_stopping_unloads_the_agent_after_the_daemon_was_asked_to_end(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    manager.stop()
    assert fake.quiesced == 1
    assert (fake.loaded, manager.state().up) == ({}, False)
    manager.stop()


def test_a_daemon_that_does_not_run_is_not_asked_to_end_which_would_start_it(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path, on_demand=True)
    manager.stop()
    assert fake.quiesced == 0
    assert fake.loaded == {}


@pytest.mark.parametrize("on_demand", [False, True])
def test_starting_starts_as_it_was_installed(fake: FakeLaunchd, tmp_path: Path, on_demand: bool) -> None:
    manager = installed(fake, tmp_path, on_demand=on_demand)
    manager.stop()
    manager.start()
    assert set(fake.loaded) == {"gui/501"}
    assert fake.running == (set() if on_demand else {"gui/501"})


def test_starting_what_is_loaded_and_does_not_run_starts_it(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.running.clear()
    manager.start()
    assert fake.running == {"gui/501"}
    fake.said.clear()
    manager.start()
    assert fake.said == [], "once is enough"


def test_nothing_that_kills_is_ever_said(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = launchd(fake)
    for step in (manager.start, manager.restart, manager.restart, manager.stop, manager.uninstall):
        manager.install(a_program(tmp_path))
        step()
    assert not [line for line in fake.said if "-k" in line.split() or line.startswith("kill")]


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_what_is_not_installed_is_said_with_the_way_out(fake: FakeLaunchd, verb: str) -> None:
    with pytest.raises(ServiceError, match="not installed; install it with: mlxbc service install"):
        getattr(launchd(fake), verb)()
    assert fake.said == []


# ------------------------------------------------------------------------------------------------------ state, logs


def test_the_state_is_read_from_what_launchctl_prints(fake: FakeLaunchd, tmp_path: Path, plist: Path) -> None:
    nothing = launchd(fake).state()
    assert (nothing.manager, nothing.installed, nothing.up) == ("launchd (gui/501)", False, False)
    state = installed(fake, tmp_path).state()
    assert (state.installed, state.at_login, state.listening, state.pid) == (True, True, True, 4711)
    assert (state.unit, state.ended, state.notes) == (plist, None, ())


@pytest.mark.parametrize(
    ("ended", "told"), [("0", None), ("(never exited)", None), ("70: EX_SOFTWARE", "exit code 70: EX_SOFTWARE")]
)
def test_how_the_last_daemon_ended_is_told_unless_it_was_well(
    fake: FakeLaunchd, tmp_path: Path, ended: str, told: str | None
) -> None:
    manager = installed(fake, tmp_path)
    fake.ended = ended
    assert manager.state().ended == told


def test_an_agent_that_was_loaded_with_a_short_window_is_noticed(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    fake.window = 5
    (note,) = manager.state().notes
    assert "kills the daemon after 5 s; run: mlxbc service restart" in note
    manager.restart()
    assert manager.state().notes == ()


def test_the_logs_are_the_daemons_own_and_its_last_words(fake: FakeLaunchd, tmp_path: Path) -> None:
    manager = installed(fake, tmp_path)
    with pytest.raises(ServiceError, match="has not logged anything yet"):
        manager.logs(20, follow=False)
    log, crash = tmp_path / "logs" / "mlxbcd.log", tmp_path / "logs" / "mlxbcd.stderr.log"
    log.touch()
    manager.logs(20, follow=False)
    crash.touch()
    manager.logs(5, follow=True)
    assert fake.shown == [("tail", "-n", "20", str(log)), ("tail", "-n", "5", "-F", str(log), str(crash))]


def test_without_launchctl_the_way_without_it_is_said(fake: FakeLaunchd) -> None:
    fake.broken["print"] = [Outcome(NOT_FOUND, err="there is no command launchctl")]
    with pytest.raises(NoManager, match=r"no launchctl; .* start the daemon with: mlxbc serve --detach"):
        launchd(fake)
