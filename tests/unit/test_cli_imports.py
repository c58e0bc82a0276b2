"""What using the client costs: the packages it must not load."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import pytest
from fake_daemon import FakeDaemon, answering

import mlxbc
import mlxbc.cli

HEAVY = {"asyncio", "click", "http", "json", "logging", "mlx", "mlx_lm", "numpy", "rich", "ssl", "typer", "uvloop"}
HEAVY |= {
    "email",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "mlxbcd",
    "pydantic",
    "pygls",
    "sqlite3",
    "starlette",
    "tokenizers",
}
HEAVY |= {"transformers", "uvicorn"}


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


def loaded(path: Path, program: str, *arguments: str) -> set[str]:
    """Every module that a fresh interpreter loads for a program: by its import log, and by what it has at the end."""
    listing = "import atexit, sys; atexit.register(lambda: print('', *sys.modules, sep='\\n| ', file=sys.stderr))"
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"{listing}\n{program}", *arguments],
        env=command_line.environment(path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"\| +(\S+)$", ended.stderr, re.MULTILINE))


def roots(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_importing_the_package_loads_next_to_nothing(path: Path) -> None:
    bare = loaded(path, "pass")
    assert loaded(path, "import mlxbc") - bare <= {"mlxbc", "__future__"}


def test_the_blocking_client_is_light(path: Path) -> None:
    modules = loaded(path, "import mlxbc; mlxbc.Client, mlxbc.Result, mlxbc.UnknownModel")
    assert "mlxbc.client" in modules
    assert not roots(modules) & HEAVY


def test_the_asynchronous_client_is_what_brings_asyncio(path: Path) -> None:
    assert "asyncio" in loaded(path, "import mlxbc; mlxbc.AsyncClient")


@pytest.mark.parametrize("arguments", [("ask", "-o", "seed", "1", "Hi"), ("ask", "--json", "--raw", "Hi"), ("chat",)])
def test_asking_is_light(path: Path, arguments: tuple[str, ...]) -> None:
    with FakeDaemon(path, answering("ok")):
        modules = loaded(path, "from mlxbc.cli import main; main()", *arguments)
    assert "mlxbc.client" in modules
    assert not roots(modules) & HEAVY
    commands = {f"mlxbc.cli.{name}" for name in set(mlxbc.cli.COMMANDS) - set(arguments)}
    assert not modules & commands


def test_every_public_name_is_there_and_nothing_else_is() -> None:
    for name in mlxbc.__all__:
        assert getattr(mlxbc, name).__name__ == name
        assert name in dir(mlxbc)
    with pytest.raises(AttributeError, match="Clinet"):
        _ = mlxbc.Clinet
