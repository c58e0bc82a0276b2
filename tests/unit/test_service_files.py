"""Installed files are replaced at once or not at all, templates are found, and commands never hang or raise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlxbcd.service import commands
from mlxbcd.service.commands import NOT_FOUND, TIMED_OUT, Outcome, ServiceError, Shell, succeed
from mlxbcd.service.files import is_current, private_directory, replace, template

TEMPLATES = ["mlxbc.service", "mlxbc.socket", "org.mlxbc.daemon.plist"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_file_is_replaced_readable_to_all_and_writable_to_its_owner(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "made" / "unit"
    before = os.umask(umask)
    try:
        for content in (b"one", b"two"):
            assert not is_current(path, content)
            replace(path, content)
            assert is_current(path, content)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in path.parent.iterdir()] == ["unit"]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "unit"
    path.mkdir()
    with pytest.raises(ServiceError, match=f"cannot write {path}: "):
        replace(path, b"one")
    assert [file.name for file in tmp_path.iterdir()] == ["unit"], "nothing is left beside it"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "unit").symlink_to("kept")
    replace(tmp_path / "unit", b"new")
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match="cannot make the directory"):
        private_directory(tmp_path / "file" / "below")


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_is_found(name: str) -> None:
    assert template(name)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_built_package_finds_its_own_templates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"shipped")
    monkeypatch.setattr("mlxbcd.service.files._SHIPPED", tmp_path)
    assert template(name) == b"shipped"


# ---------------------------------------------------------------------------------------------------------- commands


def test_a_command_runs_without_input_and_in_plain_english() -> None:
    script = "import os, sys; print(os.environ['LC_ALL'], repr(sys.stdin.read())); sys.exit('no\\n way')"
    outcome = Shell().run(sys.executable, "-c", script)
    assert (outcome.code, outcome.out) == (1, "C ''\n")
    assert not outcome.ok
    assert outcome.reason == "no way", "on one line"


def test_a_command_that_is_missing_or_hangs_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shell().run("mlxbc-no-such-command") == Outcome(NOT_FOUND, err="there is no command mlxbc-no-such-command")
    monkeypatch.setattr(commands, "PATIENCE_S", 0.05)
    hung = Shell().run(sys.executable, "-c", "import threading; threading.Event().wait()")
    assert hung.code == TIMED_OUT
    assert "has not ended within" in hung.reason


def test_a_command_that_is_shown_writes_where_we_do(capfd: pytest.CaptureFixture[str]) -> None:
    assert Shell().show(sys.executable, "-c", "print('a line'); raise SystemExit(3)") == 3
    assert capfd.readouterr().out == "a line\n"
    with pytest.raises(ServiceError, match="no command mlxbc-no-such-command to show the log with"):
        Shell().show("mlxbc-no-such-command")


def test_what_has_to_succeed_fails_with_the_command_its_reason_and_a_hint() -> None:
    with pytest.raises(ServiceError, match=r"false failed: exit code 1; look there"):
        succeed(Shell(), "false", hint="look there")
    assert succeed(Shell(), "true").ok
