"""`mlxbc config`: the daemon's settings if one runs, the file, and reading it again."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from fake_daemon import FakeDaemon, Session

from mlxbc import cli, wire
from mlxbc.cli import exits
from mlxbcd.config.document import template


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the command looks for its daemon; its file of settings is beside it."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        socket = Path(directory) / "s"
        monkeypatch.setenv("MLXBC_SOCKET", str(socket))
        monkeypatch.setenv("XDG_CONFIG_HOME", directory)
        monkeypatch.setattr(sys, "stdin", None)
        yield socket


def test_without_a_daemon_it_shows_what_one_would_take(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["config", "init"]) == exits.OK
    file = path.parent / "mlxbc" / "config.toml"
    assert capsys.readouterr().out == f"{file}\n"
    assert file.read_text() == template()
    file.write_text("[log]\nlevel = 'error'\n")
    monkeypatch.setenv("MLXBC_MODEL", "tiny")
    assert cli.main(["config"]) == exits.OK
    out, err = capsys.readouterr()
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert lines["log.level"] == ["log.level", '"error"', str(file), "yes"]
    assert lines["model"] == ["model", '"tiny"', "MLXBC_MODEL", "yes"]
    assert lines["preload"] == ["preload", "true", "default", "no"]
    assert "no daemon runs" in err


def test_init_never_overwrites_a_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "init"]) == exits.OK
    assert cli.main(["config", "init"]) == exits.CONFIG
    assert "is there already" in capsys.readouterr().err


def test_check_tells_what_is_wrong(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check"]) == exits.OK
    file = path.parent / "mlxbc" / "config.toml"
    file.parent.mkdir()
    file.write_text("modell = 'x'")
    assert cli.main(["config", "check"]) == exits.CONFIG
    assert f"{file}: unknown key 'modell'; did you mean model?" in capsys.readouterr().err


def test_a_running_daemon_tells_its_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = wire.Settings(
        id=0,
        file="/f",
        settings=[wire.Setting(key="log.level", value='"debug"', source="--log-level", live=True)],
        waiting=["preload"],
    )

    def script(session: Session) -> None:
        request = session.receive(wire.Config)
        session.send(msgspec.structs.replace(found, id=request.id))
        session.until_gone()

    with FakeDaemon(path, script, pid=77):
        assert cli.main(["config", "--json"]) == exits.OK
        shown = msgspec.json.decode(capsys.readouterr().out)
        assert shown["settings"] == [{"key": "log.level", "value": '"debug"', "source": "--log-level", "live": True}]
        assert cli.main(["config"]) == exits.OK
    out, err = capsys.readouterr()
    assert '"debug"' in out
    assert "daemon 77" in err
    assert "waiting for a restart: preload" in err


def test_reload_signals_the_daemon_and_waits_until_it_has_read_its_file(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append((pid, number)))

    def script(session: Session) -> None:
        for loads in (0, 0, 1):
            request = session.receive(wire.Config)
            session.send(wire.Settings(id=request.id, file="/f", settings=[], loads=loads, waiting=["preload"]))
        session.until_gone()

    with FakeDaemon(path, script, pid=77):
        assert cli.main(["config", "reload"]) == exits.OK
    assert signals == [(77, signal.SIGHUP)]
    assert "these need a restart of the daemon: preload" in capsys.readouterr().err


def test_reload_refuses_a_wrong_file_before_the_daemon_sees_it(path: Path) -> None:
    file = path.parent / "mlxbc" / "config.toml"
    file.parent.mkdir()
    file.write_text("nonsense")
    assert cli.main(["config", "reload"]) == exits.CONFIG
