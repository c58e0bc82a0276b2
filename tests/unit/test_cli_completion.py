"""Completing mlxbc's command line: the files are what the parsers say, and shells complete with them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import pytest
from fake_daemon import FakeDaemon, Session

from mlxbc import cli, wire
from mlxbc.cli import completion, shells

_BASH = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
_shtab_mlxbc "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path, beside a command `mlxbc` and in a home of its own."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        command = Path(directory) / "mlxbc"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlxbc "$@"\n')
        command.chmod(0o755)
        yield Path(directory) / "s"


def listing(session: Session) -> None:
    entries = [wire.ModelEntry(name=name, source="hub", path="/m", bytes=1) for name in ("smollm2", "org/name")]
    session.send(wire.ModelList(id=session.receive(wire.Models).id, models=entries))


def run(path: Path, *command: str) -> list[str]:
    environ = command_line.environment(path, HOME=str(path.parent))
    environ["PATH"] = f"{path.parent}:{environ['PATH']}"
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def bash(path: Path, *words: str) -> set[str]:
    return {word.strip() for word in run(path, "bash", "-c", _BASH, "bash", _file("bash"), "mlxbc", *words)}


def fish(path: Path, *words: str) -> set[str]:
    typed = " ".join(["mlxbc", *words])
    lines = run(path, "fish", "-c", f"source {_file('fish')}; complete -C '{typed}'")
    return {line.partition("\t")[0] for line in lines}


def _file(shell: str) -> str:
    return str(completion.DIRECTORY / completion.FILES[shell])


@pytest.mark.parametrize("shell", completion.FILES)
def test_the_files_are_what_the_parsers_say(shell: str) -> None:
    kept = (completion.DIRECTORY / completion.FILES[shell]).read_text(encoding="utf-8")
    assert kept == shells.script(shell), "run: python -m mlxbc.cli.shells"


@pytest.mark.parametrize("shell", completion.FILES)
def test_a_shell_finds_no_mistake_in_its_file(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", _file(shell)], check=True, timeout=30)


def test_they_are_printed(path: Path) -> None:
    for shell, name in completion.FILES.items():
        assert command_line.run(path, "completion", shell).stdout == (completion.DIRECTORY / name).read_bytes()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_the_names_of_what_is_there(path: Path) -> None:
    assert {"ask", "chat", "http"} <= bash(path, "") <= {*cli.COMMANDS, "-h", "--help", "--version"}
    assert bash(path, "st") == {"status", "stop"}
    assert {"--template", "--extract", "-m"} <= bash(path, "ask", "-")
    assert bash(path, "completion", "b") == {"bash"}
    assert bash(path, "ask", "-m", "") <= {""}  # without a daemon
    with FakeDaemon(path, listing):
        assert bash(path, "ask", "-m", "sm") == {"smollm2"}
        assert bash(path, "load", "") >= {"smollm2", "org/name"}
    command_line.run(path, "ask", "--save", "greet", "Hi", env={"HOME": str(path.parent)})
    assert bash(path, "ask", "-t", "g") == {"greet"}
    assert "max_tokens" in bash(path, "ask", "-o", "max")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_does_too(path: Path) -> None:
    assert {"ask", "chat", "http"} <= fish(path, "")
    assert "--template" in fish(path, "ask", "--te")
    with FakeDaemon(path, listing):
        assert fish(path, "ask", "-m", "sm") == {"smollm2"}


def test_whatever_goes_wrong_a_shell_is_told_nothing(path: Path) -> None:
    for kind in ("models", "templates", "conversations"):
        ended = command_line.run(path, "complete", kind, env={"HOME": str(path.parent)})
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
