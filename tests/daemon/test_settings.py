"""A real daemon's settings: where they come from, and what a signal makes of a changed file. No model is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S

from mlxbc import Client, wire
from mlxbc.errors import UnknownModel


class Started:
    """A daemon with a file of settings, that logs JSON."""

    def __init__(self, path: Path, file: Path, *arguments: str) -> None:
        command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--socket", str(path), "--config", str(file)]
        self.popen = subprocess.Popen(
            [*command, "--set", "log.format=json", "--no-preload", *arguments], stderr=subprocess.PIPE, text=True
        )

    def logged(self, text: str) -> dict[str, str]:
        """Wait until a message says `text`; its line."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            entry: dict[str, str] = json.loads(line)
            if text in entry["message"]:
                return entry
        raise AssertionError(f"never logged {text!r}")


def test_a_signal_makes_a_running_daemon_read_its_file_again(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[aliases]\nmine = 'nobody/none'\n")
    daemon = Started(path, file)
    try:
        daemon.logged("ready after")
        with Client(path, timeout=PATIENCE_S) as client:
            with pytest.raises(UnknownModel, match="no model 'nobody/none'"):
                client.load("mine")
            file.write_text("preload = true\n[aliases]\nmine = '/nowhere'\n[log]\nlevel = 'warning'\n")
            daemon.popen.send_signal(signal.SIGHUP)
            assert daemon.logged("changed")["message"] == "read the settings again; changed: log.level, aliases"
            with pytest.raises(UnknownModel, match="nothing at /nowhere"):
                client.load("mine")
            told = {one.key: one for one in client.config().settings}
            assert told["log.level"] == wire.Setting(key="log.level", value='"warning"', source=str(file), live=True)
            assert told["preload"].source == "--no-preload", "the option of the start wins"
            file.write_text("[log]\nlevel = 'loud'\n")
            daemon.popen.send_signal(signal.SIGHUP)
            assert "the settings stay as they were" in daemon.logged("stay")["message"]
            (note,) = client.status().notes
            assert 'log.level is "debug" or' in note
            client.shutdown()
        assert daemon.popen.wait(PATIENCE_S) == 0
    finally:
        daemon.popen.kill()
        daemon.popen.communicate()


def test_the_doctor_examines_a_running_daemon_and_its_device(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("")
    daemon = Started(path, file)
    try:
        daemon.logged("ready after")
        environment = {**os.environ, "MLXBC_SOCKET": str(path), "MLXBC_CONFIG": str(file)}
        told = subprocess.run(
            [sys.executable, "-m", "mlxbc", "doctor", "--json"], env=environment, capture_output=True, check=False
        )
        found = json.loads(told.stdout)
        faults = {one["about"] for one in found if one["level"] == "fault"}
        assert told.returncode == (1 if faults else 0), told.stderr
        # There is no model in this home, and others may use this machine.
        assert "models" in faults
        assert faults <= {"models", "others", "memory"}
        levels = {one["about"]: one["level"] for one in found}
        assert (levels["daemon"], levels["device"], levels["version"]) == ("ok", "ok", "ok")
    finally:
        daemon.popen.terminate()
        daemon.popen.communicate(timeout=PATIENCE_S)


def test_a_wrong_file_ends_the_start_with_the_reason(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("modell = 'x'\n")
    daemon = Started(path, file)
    _, said = daemon.popen.communicate(timeout=PATIENCE_S)
    assert daemon.popen.returncode == os.EX_CONFIG
    assert said == f"mlxbcd: {file}: unknown key 'modell'; did you mean model?\n"
