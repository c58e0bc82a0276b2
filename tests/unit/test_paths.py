"""Where things live, on both systems and in the corners of each."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mlxbc import paths
from mlxbc.errors import ConfigError

PLATFORMS = ("linux", "darwin")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user with a home directory, not far from the root, and nothing else set."""
    for name in list(os.environ):
        if name.startswith(("XDG_", "MLXBC_")):
            monkeypatch.delenv(name)
    with TemporaryDirectory(prefix="home-", dir="/tmp") as directory:
        monkeypatch.setenv("HOME", directory)
        yield Path(directory)


def test_on_linux_the_socket_is_in_the_runtime_directory(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert paths.socket_path("linux") == runtime / "mlxbc" / "mlxbc.sock"


def test_on_macos_the_socket_is_where_nothing_gets_purged(home: Path) -> None:
    assert paths.socket_path("darwin") == home / "Library/Application Support/mlxbc/mlxbc.sock"


def test_a_macos_user_of_thirty_letters_still_fits() -> None:
    path = f"/Users/{'x' * 30}/Library/Application Support/mlxbc/mlxbc.sock"
    assert paths.checked_socket_path(Path(path), "darwin") == Path(path)


def test_without_a_runtime_directory_both_sides_fall_back_alike_and_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = paths.socket_path("linux"), paths.socket_path("linux")
    assert first == second
    assert first.name == "mlxbc.sock"
    assert str(os.geteuid()) in first.parent.parent.name


def test_a_runtime_directory_that_others_can_write_is_not_trusted(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    shared = home / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    assert shared not in paths.socket_path("linux").parents


def test_a_fallback_that_somebody_else_owns_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    from platformdirs import unix

    def refuse(_self: unix.Unix) -> str:
        raise PermissionError("runtime directory /tmp/runtime-1 is owned by uid 2")

    monkeypatch.setattr(unix.Unix, "_default_runtime_dir", refuse)
    with pytest.raises(ConfigError, match=r"owned by uid 2.*MLXBC_SOCKET"):
        paths.socket_path("linux")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_environment_overrides_the_socket_and_the_data(
    monkeypatch: pytest.MonkeyPatch, home: Path, platform: str
) -> None:
    monkeypatch.setenv("MLXBC_SOCKET", "~/my.sock")
    monkeypatch.setenv("MLXBC_DATA", "/srv/models")
    assert paths.socket_path(platform) == home / "my.sock"
    assert paths.data_dir(platform) == Path("/srv/models")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_empty_override_is_no_override(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    usual = paths.socket_path(platform), paths.data_dir(platform)
    monkeypatch.setenv("MLXBC_SOCKET", "")
    monkeypatch.setenv("MLXBC_DATA", "")
    assert (paths.socket_path(platform), paths.data_dir(platform)) == usual


def test_a_relative_override_means_the_same_after_the_daemon_has_changed_its_directory(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("MLXBC_SOCKET", "run/../my.sock")
    assert paths.socket_path() == home / "my.sock"


def test_each_system_keeps_its_own_customs(home: Path) -> None:
    assert paths.data_dir("linux") == home / ".local/share/mlxbc"
    assert paths.cache_dir("linux") == home / ".cache/mlxbc"
    assert paths.config_dir("linux") == home / ".config/mlxbc"
    assert paths.log_dir("linux") == home / ".local/state/mlxbc/log"
    assert paths.data_dir("darwin") == home / "Library/Application Support/mlxbc"
    assert paths.cache_dir("darwin") == home / "Library/Caches/mlxbc"
    assert paths.config_dir("darwin") == home / "Library/Application Support/mlxbc"
    assert paths.log_dir("darwin") == home / "Library/Logs/mlxbc"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_asking_for_a_path_creates_nothing(home: Path, platform: str) -> None:
    for where in (paths.data_dir, paths.cache_dir, paths.config_dir, paths.log_dir):
        where(platform)
    paths.socket_path("darwin")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("platform", "limit"), [("linux", 107), ("darwin", 103)])
def test_the_longest_path_is_accepted_and_one_byte_more_is_refused(
    monkeypatch: pytest.MonkeyPatch, platform: str, limit: int
) -> None:
    longest = "/" + "é" * ((limit - 1) // 2)
    assert len(os.fsencode(longest)) == limit
    monkeypatch.setenv("MLXBC_SOCKET", longest)
    assert paths.socket_path(platform) == Path(longest)
    monkeypatch.setenv("MLXBC_SOCKET", longest + "x")
    with pytest.raises(ConfigError, match=f"{limit + 1} bytes.*allows {limit}.*MLXBC_SOCKET"):
        paths.socket_path(platform)


def test_the_limit_of_this_system_is_the_kernels() -> None:
    limit = paths.socket_limit()
    with socket.socket(socket.AF_UNIX) as sock:
        with pytest.raises(FileNotFoundError):
            sock.connect("/" + "x" * (limit - 1))
        with pytest.raises(OSError, match="too long"):
            sock.connect("/" + "x" * (limit + 1))
