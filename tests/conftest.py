"""Owns what all tests share: the fast BLAS, a home of their own, the default model, and how Hypothesis searches.

The tests never meet the user's socket, data or settings: `HOME` is a temporary directory, for processes they start too.
What they do take from the user is read only: the default model that was pulled, and the BLAS that was built.

Nothing is compiled at run time on Linux, where that goes through a compiler process for each new shape. A test about
compiling switches it on for itself with ``mx.enable_compile()``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from mlxbc import paths
from mlxbcd.errors import ServeError
from mlxbcd.model import blas
from mlxbcd.residency import names

_CI: Final = os.environ.get("CI", "") not in ("", "0", "false")
_FOREIGN: Final = ("XDG_", "HF_", "HUGGINGFACE_", "MLXBC_SOCKET", "MLXBC_DATA", "MLXBC_CACHE")
"""Environment variables, by how they begin, that lead to what is the user's."""


def _default_model() -> Path | None:
    try:
        return names.resolve(names.DEFAULT).path
    except ServeError:
        return None


# Both before the home is another one. And MLX binds its BLAS when a test first imports it.
blas.enable()
_MODEL: Final = _default_model()
_BLAS_CACHE: Final = paths.cache_dir() / "blas"


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        # The processes that run the tests start from this one's environment.
        return
    # A shell starts what runs in the background deaf to Ctrl-C, and nohup to hangups: so would be all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # In /tmp, because the path of a socket must be short.
    home = Path(tempfile.mkdtemp(prefix="mlxbc-home-", dir="/tmp"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    environment = pytest.MonkeyPatch()
    config.add_cleanup(environment.undo)
    for name in list(os.environ):
        if name.startswith(_FOREIGN):
            environment.delenv(name)
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    environment.setenv("HOME", str(home))
    environment.setenv("XDG_RUNTIME_DIR", str(runtime))
    # Unless a test says otherwise, its prompts are processed, and not found because another test has been there.
    environment.setenv("MLXBC_CACHE_MODE", "none")
    environment.setenv("MLXBC_CACHE_DISK", "0")
    if sys.platform == "linux":
        environment.setenv("MLX_DISABLE_COMPILE", "1")
    if _BLAS_CACHE.is_dir():
        # Else every session's first daemon would build it again.
        shutil.copytree(_BLAS_CACHE, paths.cache_dir() / "blas")
    _configure_hypothesis()


def _configure_hypothesis() -> None:
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("local", slow)
    settings.register_profile("ci", slow, derandomize=True, database=None, print_blob=True)
    settings.load_profile("ci" if _CI else "local")


def _share(nodeid: str) -> str:
    """What has to run in one process, in order. What is timed, or starts daemons, needs the machine: one share."""
    path = nodeid.partition("::")[0]
    alone = path.startswith(("tests/daemon/", "tests/editors/")) and not path.endswith("/test_soak.py")
    return "alone" if alone else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The soak takes its time however busy the machine is, so it begins at once; what needs the machine comes last.
    first = "tests/daemon/test_soak.py"
    items.sort(key=lambda item: (_share(item.nodeid) == "alone", not item.nodeid.startswith(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, share by share, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _share(nodeid)

    config.option.loadscopereorder = False
    return ByShare(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _MODEL is None and item.get_closest_marker("model") is not None:
        _without_model()


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The embedded default model, as `mlxbc pull` has imported it. Not to be written to."""
    if _MODEL is None:
        _without_model()
    return _MODEL


def _without_model() -> NoReturn:
    """Nobody misses a skipped test, so where it counts it fails."""
    message = "the default model is not here; run: make model"
    if _CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
