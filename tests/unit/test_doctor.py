"""The doctor finds what is wrong, says what mends it, and says nothing is wrong where nothing is."""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_managers import FakeLaunchd, FakeSystemd
from tiny_directory import write_model

from mlxbc import __version__, wire
from mlxbcd.doctor.examine import CHECKS, examine
from mlxbcd.doctor.findings import Finding, Level, make_usable
from mlxbcd.doctor.machine import program as named
from mlxbcd.doctor.patient import Answer, Patient
from mlxbcd.machine.memory import Footprint, Pressure
from mlxbcd.machine.power import Condition
from mlxbcd.machine.system import Machine
from mlxbcd.serve.listen import Listener, listen
from mlxbcd.service.launchd import Launchd
from mlxbcd.service.program import program
from mlxbcd.service.systemd import Systemd

GIB = 1 << 30


class Box:
    """A machine of a chosen size that is well."""

    level = Pressure.NORMAL

    def __init__(self, gib: float = 16) -> None:
        self.gib = gib

    def total(self) -> int:
        return int(self.gib * GIB)

    def available(self) -> int:
        return self.total() // 2

    def footprint(self, *, exact: bool = False) -> Footprint:
        return Footprint(GIB, "rss")

    def pressure(self) -> Pressure:
        return self.level

    def condition(self) -> Condition:
        return Condition()


def status(**fields: object) -> wire.StatusReport:
    usual: dict[str, object] = {
        "id": 1,
        "pid": os.getpid(),
        "version": __version__,
        "uptime_s": 1.0,
        "state": "ready",
        "device": "cpu",
        "connections": 1,
        "running": 0,
        "queued": 0,
        "served": 0,
        "failed": 0,
        "generated_tokens": 0,
        "memory_active": 0,
        "memory_cache": 0,
        "models": [],
        "footprint": GIB,
        "footprint_measure": "rss",
    }
    return wire.StatusReport(**(usual | fields))


def welcome(**fields: object) -> wire.Welcome:
    usual: dict[str, object] = {
        "proto": wire.PROTOCOL,
        "server": "mlxbcd",
        "version": __version__,
        "pid": os.getpid(),
        "models": [],
        "max_frame": 4096,
    }
    return wire.Welcome(**(usual | fields))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home with a model and a service that is installed and runs; its socket lies in a short directory."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as short:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("MLXBC_SOCKET", f"{short}/run/s")
        monkeypatch.setenv("MLXBC_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        for kind in ("CONFIG", "CACHE", "STATE"):
            monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
        write_model(tmp_path / "data" / "models" / "smollm2-135m-instruct")
        yield tmp_path


@pytest.fixture
def listener(home: Path) -> Iterator[Listener]:
    """The daemon's socket and lock; this process plays the daemon."""
    with listen(Path(os.environ["MLXBC_SOCKET"])) as listener:
        yield listener


@pytest.fixture
def systemd(home: Path) -> FakeSystemd:
    return FakeSystemd(directory=home / "config" / "systemd" / "user")


@pytest.fixture
def patient(home: Path, listener: Listener, systemd: FakeSystemd) -> Patient:
    """Everything is well."""
    Systemd(systemd).install(program(platform="linux"))
    return Patient(
        version=__version__,
        answer=Answer(welcome=welcome(), status=status(), settings=wire.Settings(id=1, file="", settings=[])),
        machine=Machine(Box(), Box()),
        commands=systemd,
        probe_daemon=lambda: 0.002,
        probe_here=lambda: 0.001,
        processes=lambda: [(1, "/sbin/init"), (7, "vim llama-server.cpp"), (8, "tail -f mlxbcd.log")],
        platform="linux",
    )


def faults(patient: Patient) -> list[Finding]:
    found = [finding for finding in examine(patient) if finding.level is Level.FAULT]
    assert all(finding.fix for finding in found), "every fault has a fix"
    return found


def the_fault(patient: Patient) -> Finding:
    found = faults(patient)
    assert len(found) == 1, found
    return found[0]


def test_where_nothing_is_wrong_nothing_is_found(patient: Patient) -> None:
    found = list(examine(patient))
    assert [finding for finding in found if finding.level is not Level.OK] == []
    assert {"version", "settings", "socket", "daemon", "service", "models", "memory", "others", "device", "log"} == {
        finding.about for finding in found
    }


# -- planted faults, each of which is found and no other


def plant_a_key_that_nobody_knows(patient: Patient, home: Path) -> Patient:
    (home / "config" / "mlxbc").mkdir(parents=True)
    (home / "config" / "mlxbc" / "config.toml").write_text("[log]\nlevle = 'info'\n")
    return patient


def plant_a_socket_for_everybody(patient: Patient, home: Path) -> Patient:
    Path(os.environ["MLXBC_SOCKET"]).chmod(0o666)
    return patient


def plant_a_directory_for_everybody(patient: Patient, home: Path) -> Patient:
    Path(os.environ["MLXBC_SOCKET"]).parent.chmod(0o755)
    return patient


def plant_a_daemon_that_says_nothing(patient: Patient, home: Path) -> Patient:
    return replace(patient, answer=Answer(error="the daemon sent nothing for 10 s"), probe_daemon=None)


def plant_an_older_daemon(patient: Patient, home: Path) -> Patient:
    return replace(patient, answer=replace(patient.answer, welcome=welcome(version="0.0.9")))


def plant_a_device_that_hangs(patient: Patient, home: Path) -> Patient:
    return replace(patient, answer=replace(patient.answer, status=status(state="degraded")))


def plant_a_unit_of_an_older_version(patient: Patient, home: Path) -> Patient:
    unit = home / "config" / "systemd" / "user" / "mlxbc.service"
    unit.write_text(unit.read_text().replace("TimeoutStopSec=90\n", "TimeoutStopSec=5\n"))
    patient.commands.run("systemctl", "--user", "daemon-reload")
    return patient


def plant_a_unit_of_another_python(patient: Patient, home: Path) -> Patient:
    unit = home / "config" / "systemd" / "user" / "mlxbc.service"
    unit.write_text(unit.read_text().replace(os.path.abspath(sys.executable), "/opt/gone/bin/python3"))
    patient.commands.run("systemctl", "--user", "daemon-reload")
    return patient


def plant_a_service_that_is_stopped(patient: Patient, home: Path) -> Patient:
    patient.commands.run("systemctl", "--user", "stop", "mlxbc.socket", "mlxbc.service")
    return patient


def plant_no_model(patient: Patient, home: Path) -> Patient:
    (home / "data" / "models" / "smollm2-135m-instruct" / "config.json").unlink()
    return patient


def plant_truncated_weights(patient: Patient, home: Path) -> Patient:
    weights = home / "data" / "models" / "smollm2-135m-instruct" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return patient


def plant_a_draft_model_that_is_not_here(patient: Patient, home: Path) -> Patient:
    file = home / "drafts.toml"
    file.write_text("[drafts]\nsmollm2 = 'org/small'\n")
    return replace(patient, environ={**os.environ, "MLXBC_CONFIG": str(file)})


def plant_a_machine_too_small_for_the_model(patient: Patient, home: Path) -> Patient:
    return replace(patient, machine=Machine(Box(0.0005), Box()))


def plant_a_limit_of_all_the_memory(patient: Patient, home: Path) -> Patient:
    return replace(patient, environ={**os.environ, "MLXBC_MEMORY_LIMIT": "16GiB"})


def plant_a_system_that_is_short_of_memory(patient: Patient, home: Path) -> Patient:
    box = Box()
    box.level = Pressure.CRITICAL
    return replace(patient, machine=Machine(box, Box()))


def plant_another_server(patient: Patient, home: Path) -> Patient:
    return replace(patient, processes=lambda: [(99, "/usr/bin/python3.12 -m mlx_lm server --port 8080")])


def plant_a_throttled_daemon(patient: Patient, home: Path) -> Patient:
    return replace(patient, probe_daemon=lambda: 0.009)


def plant_a_log_for_everybody(patient: Patient, home: Path) -> Patient:
    log = home / "state" / "mlxbc" / "log" / "mlxbcd.log"
    log.parent.mkdir(parents=True)
    log.write_text("2026-01-01 00:00:00,000 INFO mlxbcd: listening on /s (pid 1)\n")
    log.chmod(0o644)
    return patient


@pytest.mark.parametrize(
    ("plant", "about", "said", "fix"),
    [
        (plant_a_key_that_nobody_knows, "settings", "did you mean log.level?", "mlxbc config check"),
        (plant_a_socket_for_everybody, "socket", "others may connect", "chmod 600 "),
        (plant_a_directory_for_everybody, "socket", "others may enter", "chmod 700 "),
        (plant_a_daemon_that_says_nothing, "daemon", "does not answer: the daemon sent nothing", "kill "),
        (plant_an_older_daemon, "version", "the running daemon is version 0.0.9", "restart"),
        (plant_a_device_that_hangs, "daemon", "its device has failed or hangs", "mlxbc stop --now"),
        (plant_a_unit_of_an_older_version, "service", "it lacks TimeoutStopSec=90", "mlxbc service install"),
        (plant_a_unit_of_another_python, "service", "it starts another program", "mlxbc service install"),
        (plant_a_service_that_is_stopped, "service", "nobody listens", "mlxbc service start"),
        (plant_no_model, "models", "the model smollm2 is not here yet", "mlxbc pull smollm2"),
        (plant_truncated_weights, "models", "smollm2 is damaged: model.safetensors", "mlxbc pull smollm2"),
        (
            plant_a_draft_model_that_is_not_here,
            "models",
            "no model 'org/small'",
            "table drafts",
        ),
        (plant_a_machine_too_small_for_the_model, "models", "GB are allowed", "smaller or more strongly"),
        (plant_a_limit_of_all_the_memory, "memory", "the system would run dry", "set memory.limit to auto"),
        (plant_a_system_that_is_short_of_memory, "memory", "out of memory", "close other programs"),
        (plant_another_server, "others", "process 99 (mlx_lm.server)", "kill 99"),
        (plant_a_throttled_daemon, "device", "the daemon is throttled", "mlxbc service install"),
        (plant_a_log_for_everybody, "log", "others may read", "chmod 600 "),
    ],
)
def test_a_planted_fault_is_found_with_what_mends_it_and_no_other_is(
    patient: Patient,
    home: Path,
    plant: Callable[[Patient, Path], Patient],
    about: str,
    said: str,
    fix: str,
) -> None:
    found = the_fault(plant(patient, home))
    assert found.about == about
    assert said in found.text
    assert fix in found.fix


def test_a_path_too_long_for_a_socket_is_found(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXBC_SOCKET", "/tmp/" + "x" * 120)
    assert "this system allows 107" in the_fault(replace(patient, answer=Answer(absent=True))).text


def test_two_daemons_of_one_path_are_told_apart(patient: Patient) -> None:
    found = the_fault(replace(patient, answer=replace(patient.answer, welcome=welcome(pid=4242))))
    assert found.fix == f"kill {os.getpid()}"


def test_a_daemon_that_the_system_killed_is_told_with_what_to_do(
    patient: Patient, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = systemd.run

    def killed(*command: str):
        outcome = ask(*command)
        return replace(outcome, out=outcome.out.replace("Result=success", "Result=oom-kill"))

    monkeypatch.setattr(systemd, "run", killed)
    found = the_fault(patient)
    assert "killed it, most likely for memory" in found.text
    assert "memory.limit" in found.fix


def test_without_a_daemon_and_a_service_nothing_is_wrong(home: Path, systemd: FakeSystemd) -> None:
    patient = Patient(
        version=__version__,
        answer=Answer(absent=True, error="no daemon is running"),
        machine=Machine(Box(), Box()),
        commands=systemd,
        platform="linux",
    )
    found = list(examine(patient))
    assert faults(patient) == []
    assert [finding.about for finding in found if finding.level is Level.NOTE] == ["socket", "daemon", "service"]


def test_a_socket_that_a_dead_daemon_has_left_is_no_fault(patient: Patient, listener: Listener) -> None:
    path = listener.path
    listener.close()
    path.touch()
    path.chmod(0o600)
    found = the_fault(replace(patient, answer=Answer(absent=True)))
    assert "is not a socket" in found.text


def test_errors_of_the_log_since_the_last_start_are_told_and_older_ones_are_not(patient: Patient, home: Path) -> None:
    log = home / "state" / "mlxbc" / "log" / "mlxbcd.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "2026-01-01 00:00:00,000 ERROR mlxbcd.x: an old one\n"
        "2026-01-01 00:00:01,000 INFO mlxbcd.serve.main: listening on /s (pid 1)\n"
        "2026-01-01 00:00:02,000 ERROR mlxbcd.x: a new one\n"
        '{"time": "x", "level": "error", "message": "another one"}\n'
    )
    log.chmod(0o600)
    told = [finding.text for finding in examine(patient) if finding.about == "log"]
    assert told == ["since the last start: a new one", "since the last start: another one"]


def test_nobody_is_told_to_take_over_what_is_not_theirs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = home / ".cache"
    theirs.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    assert make_usable(theirs / "mlxbc", theirs) == f"chown -R $(id -u) {theirs}"
    assert make_usable(Path("/dev"), Path("/dev")) == "chown -R $(id -u) /dev", "they have named it"
    for odd, there in (("/nowhere", "/"), ("/dev/null", "/dev/null"), (str(home), str(home)), ("/", "/")):
        monkeypatch.setenv("HOME", odd)
        wanted = Path(odd) / ".cache" / "mlxbc"
        assert make_usable(wanted, Path(there)) == f"let HOME be a directory of yours, or make {wanted} one"


def test_variables_that_nothing_reads_are_told(patient: Patient) -> None:
    odd = replace(patient, environ={**os.environ, "MLXBC_LOG_LEVL": "debug"})
    (found,) = [finding for finding in examine(odd) if finding.level is Level.NOTE]
    assert (found.text, found.fix) == ("nothing reads the variable MLXBC_LOG_LEVL", "did you mean MLXBC_LOG_LEVEL?")


def test_a_check_that_fails_does_not_keep_others_from_looking(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[tuple[int, str]]:
        raise OSError("no ps")

    found = list(examine(replace(patient, processes=broken)))
    assert [finding.text for finding in found if finding.level is Level.NOTE] == [
        "could not be looked at: OSError: no ps"
    ]
    assert len(CHECKS) == 10
    assert {"device", "log"} <= {finding.about for finding in found}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/opt/venv/bin/python3 -m mlx_lm.server --model x", "mlx_lm.server"),
        ("python -m mlx_lm server", "mlx_lm.server"),
        ("/opt/venv/bin/python3.12 /opt/venv/bin/mlx_lm.server --port 1", "mlx_lm.server"),
        ("/usr/bin/python3 -P -m mlxbcd.serve.main --socket /s", "mlxbcd.serve.main"),
        ("/Applications/LM Studio.app/Contents/MacOS/LM Studio", "LM Studio"),
        ("ollama runner", "ollama"),
        ("vim notes/mlx_lm.server", "vim"),
        ("", ""),
    ],
)
def test_programs_are_told_by_what_they_run(command: str, name: str) -> None:
    assert named(command) == name


# -- under launchd


@pytest.fixture
def agent(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeLaunchd, Patient]:
    monkeypatch.setattr("os.getuid", lambda: 501)
    launchd = FakeLaunchd()
    Launchd(launchd, 501, lambda: None).install(program(platform="darwin"))
    return launchd, replace(patient, commands=launchd, platform="darwin")


def test_an_agent_that_is_as_it_should_be_is_well(agent: tuple[FakeLaunchd, Patient]) -> None:
    assert [finding for finding in faults(agent[1]) if finding.about == "service"] == []


def test_an_agent_with_a_short_window_to_end_is_found(agent: tuple[FakeLaunchd, Patient], home: Path) -> None:
    path = home / "Library" / "LaunchAgents" / "org.mlxbc.daemon.plist"
    read = plistlib.loads(path.read_bytes())
    del read["ExitTimeOut"]
    path.write_bytes(plistlib.dumps(read))
    (found,) = [finding for finding in faults(agent[1]) if finding.about == "service"]
    assert "ExitTimeOut is None instead of 90" in found.text
    assert found.fix == "mlxbc service install"
