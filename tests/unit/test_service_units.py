"""systemd's units as they are rendered, and what systemd itself says about them."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from fake_managers import a_program

from mlxbc.errors import ConfigError
from mlxbc.paths import socket_path
from mlxbcd.service import units
from mlxbcd.service.program import CARRIED, Program, program
from mlxbcd.service.units import SERVICE, SOCKET, render

ANALYZE = shutil.which("systemd-analyze")

ODD = "a b%c$HOME;é"
"""A name with everything in it that systemd reads otherwise and takes in the name of a program."""
ODDER = f"{ODD}\\d\"e'"
"""And with what it takes elsewhere only."""


def parsed(unit: bytes) -> configparser.ConfigParser:
    """A unit's settings; those of ours are each given once, or this fails."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string(unit.decode())
    return parser


def minimal(tmp_path: Path) -> Program:
    return replace(a_program(tmp_path), command=(sys.executable, "-P", "-m", "mlxbcd.serve.main"), environment={})


def test_the_service_notifies_is_watched_and_comes_back_after_a_failure_only(tmp_path: Path) -> None:
    service = parsed(render(minimal(tmp_path))[SERVICE])["Service"]
    wanted = {
        "Type": "notify",
        "WatchdogSec": "60",
        "Restart": "on-failure",
        "RestartPreventExitStatus": str(os.EX_CONFIG),
        "TimeoutStopSec": "90",
        "UMask": "0077",
    }
    assert wanted.items() <= dict(service).items()
    assert service["ExecStart"] == f"{sys.executable} -P -m mlxbcd.serve.main"


def test_stopping_takes_less_time_than_systemd_allows(tmp_path: Path) -> None:
    from mlxbcd.serve.limits import Limits

    limits = Limits()
    allowed = int(parsed(render(minimal(tmp_path))[SERVICE])["Service"]["TimeoutStopSec"])
    assert limits.drain_s + limits.close_s + limits.linger_s < allowed


def test_the_socket_is_private(tmp_path: Path) -> None:
    wanted = {"SocketMode": "0600", "DirectoryMode": "0700"}
    assert wanted.items() <= dict(parsed(render(minimal(tmp_path))[SOCKET])["Socket"]).items()


def test_the_units_socket_is_the_one_that_clients_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    listens = parsed(render(program(platform="linux"))[SOCKET])["Socket"]["ListenStream"]
    assert listens.replace("%t", str(tmp_path)) == str(socket_path("linux"))
    monkeypatch.setenv("MLXBC_SOCKET", str(tmp_path / "100%" / "s"))
    listens = parsed(render(program(platform="linux"))[SOCKET])["Socket"]["ListenStream"]
    assert listens.replace("%%", "%") == str(socket_path("linux"))


def test_every_placeholder_is_filled(tmp_path: Path) -> None:
    for unit in render(a_program(tmp_path)).values():
        settings = [line for line in unit.decode().splitlines() if not line.startswith("#")]
        assert not [line for line in settings if "@" in line]


def test_the_user_units_directory_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert units.directory() == Path("/home/someone/.config/systemd/user")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/mine")
    assert units.directory() == Path("/etc/mine/systemd/user")


# --------------------------------------------------------------------------------------------- what systemd says to it


def complaints(directory: Path, rendered: dict[str, bytes]) -> str:
    """What systemd finds wrong. Unknown keys and wrong values are only printed, so silence is what counts."""
    if ANALYZE is None:
        pytest.skip("systemd-analyze is not here (Debian: package systemd)")
    directory.mkdir()
    for name, unit in rendered.items():
        (directory / name).write_bytes(unit)
    # Other packages' sockets are checked with it, so the path has to be short.
    with tempfile.TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as runtime:
        ended = subprocess.run(
            [ANALYZE, "--user", "--man=no", "verify", *(str(directory / name) for name in rendered)],
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return ended.stderr + (f"exit code {ended.returncode}" if ended.returncode else "")


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    assert complaints(tmp_path / "units", render(minimal(tmp_path))) == ""


def odd(tmp_path: Path) -> Program:
    return replace(
        a_program(tmp_path),
        command=(str(tmp_path / ODD / "python3"), "-P", "-m", "mlxbcd.serve.main", f"--model={ODDER}", ";"),
        environment={"MLXBC_SOCKET": "/run/x", "MLXBC_DATA": f"/data/{ODDER}", "HF_HOME": "/élan"},
        socket=Path(f"/run/{ODDER}/s"),
    )


def test_systemd_finds_nothing_wrong_with_odd_paths_and_values(tmp_path: Path) -> None:
    interpreter = tmp_path / ODD / "python3"
    interpreter.parent.mkdir()
    interpreter.symlink_to(sys.executable)
    assert complaints(tmp_path / "units", render(odd(tmp_path))) == ""


def single(word: str, character: str) -> str:
    """What systemd makes of a word in which this character is always doubled."""
    parts = word.split(2 * character)
    assert character not in "".join(parts), f"{word} has a {character} that systemd would act on"
    return character.join(parts)


def test_odd_paths_and_values_are_quoted_so_that_nothing_is_lost(tmp_path: Path) -> None:
    """Inside its quotes a shell reads the same; specifiers and variables are systemd's own."""
    lines = render(odd(tmp_path))[SERVICE].decode().splitlines()
    (command,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    interpreter, *arguments = (single(word, "%") for word in shlex.split(command))
    assert (interpreter, *(single(word, "$") for word in arguments)) == odd(tmp_path).command
    assignments = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment=")]
    read = dict(single(shlex.split(line)[0], "%").split("=", 1) for line in assignments)
    assert read == odd(tmp_path).environment


@pytest.mark.parametrize("character", ['"', "'", "\\"])
def test_a_program_that_systemd_could_not_start_is_refused_at_once(tmp_path: Path, character: str) -> None:
    with pytest.raises(ConfigError, match="systemd starts no program with quotes or backslashes in its path"):
        render(replace(minimal(tmp_path), command=(f"/opt/a{character}b/python3",)))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (SERVICE, "WatchdogSec=", "WatchDogSec="),
        (SERVICE, "Restart=on-failure", "Restart=sometimes"),
        (SERVICE, sys.executable, "/nowhere/python3"),
        (SOCKET, "SocketMode=0600", "SocketMode=rw-------"),
    ],
)
def test_systemd_finds_what_is_wrong(tmp_path: Path, name: str, before: str, after: str) -> None:
    rendered = render(minimal(tmp_path))
    assert before in rendered[name].decode()
    rendered[name] = rendered[name].replace(before.encode(), after.encode())
    assert complaints(tmp_path / "units", rendered) != ""


# ----------------------------------------------------------------------------------------------------- the program


def test_the_service_runs_this_interpreter_with_the_options_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in CARRIED:
        monkeypatch.delenv(name, raising=False)
    plain = program(platform="linux")
    assert plain.command == (sys.executable, "-P", "-m", "mlxbcd.serve.main")
    assert plain.environment == {}
    asked = program(platform="linux", model="-odd", preload=False, on_demand=True)
    assert asked.command[4:] == ("--model=-odd", "--no-preload")
    assert asked.on_demand

    from mlxbcd.serve.options import parse

    options = parse(asked.command[4:]).options
    assert (options.model, options.preload) == ("-odd", False)


def test_what_the_daemon_reads_comes_along_and_paths_are_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CARRIED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MLXBC_SOCKET", "run/s")
    monkeypatch.setenv("HF_HOME", "~/hub")
    monkeypatch.setenv("MLXBC_BLAS_THREADS", "4")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert program(platform="linux").environment == {
        "MLXBC_SOCKET": f"{tmp_path}/run/s",
        "MLXBC_BLAS_THREADS": "4",
        "HF_HOME": "/home/someone/hub",
    }


@pytest.mark.parametrize("odd", ["a\nExecStartPre=/bin/x", "a\0b", "a\x1b[2J"])
def test_nothing_can_add_a_line_to_a_unit(odd: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written into a service's unit"):
        program(platform="linux", model=odd)
