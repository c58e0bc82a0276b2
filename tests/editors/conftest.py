"""Owns the daemons that editors are tested against: a scripted one, which does as the test says, and a real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

HERE: Final = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "protocol"), str(HERE.parent / "daemon")]

from fake_service import FakeDaemon, fake_daemon
from real_daemon import Daemon, daemon, socket_path


@pytest.fixture
def directory() -> Iterator[Path]:
    """For an editor and its socket: short enough on every system."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def socket(directory: Path) -> Path:
    """Where a scripted daemon listens, if one runs."""
    return directory / "mlxbc.sock"


@pytest.fixture
def scripted(directory: Path) -> Callable[[], AbstractContextManager[FakeDaemon]]:
    """Starts a daemon whose work the test does itself. The editor must not be told when it goes."""
    return partial(fake_daemon, directory)


@pytest.fixture(scope="session")
def real(model_directory: Path) -> Iterator[Daemon]:
    """A daemon with the default model."""
    with socket_path() as path, daemon(path, model_directory) as serving:
        yield serving
