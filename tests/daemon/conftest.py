"""Owns the daemons that the tests of one module share, and what one generates for one request at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_daemon import Daemon, Solo, daemon, socket_path
from tiny_daemon import serving

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from tiny_directory import write_model


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a test's own daemon may listen."""
    with socket_path() as path:
        yield path


@pytest.fixture(scope="module")
def shared(model_directory: Path) -> Iterator[Daemon]:
    """A daemon with the default model, for tests that leave it as it was."""
    with socket_path() as path, daemon(path, model_directory) as serving:
        yield serving


@pytest.fixture(scope="module")
def solo(shared: Daemon) -> Solo:
    """What requests generate when they have the daemon to themselves."""
    return Solo(shared)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model. Not to be written to."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Daemon]:
    """A daemon with it, for tests that leave it as it was."""
    with socket_path() as path, serving(path, tiny_model) as daemon:
        # Its log is read by nobody, and must not fill the pipe.
        threading.Thread(target=daemon.popen.stderr.read, daemon=True).start()
        yield daemon
