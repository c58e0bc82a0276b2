"""Owns the daemon that the tests of one module share, and what it generates for one request at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_daemon import Daemon, Solo, daemon, socket_path


@pytest.fixture(scope="module")
def shared(model_directory: Path) -> Iterator[Daemon]:
    """A daemon with the default model, for tests that leave it as it was."""
    with socket_path() as path, daemon(path, model_directory) as serving:
        yield serving


@pytest.fixture(scope="module")
def solo(shared: Daemon) -> Solo:
    """What requests generate when they have the daemon to themselves."""
    return Solo(shared)
