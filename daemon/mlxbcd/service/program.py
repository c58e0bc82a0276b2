"""Owns what a service runs: the daemon's command, its environment and its files, and when it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mlxbc.errors import ConfigError
from mlxbc.paths import log_dir, socket_path
from mlxbcd.config.settings import KEYS

CARRIED: Final = (
    "MLXBC_SOCKET",
    "MLXBC_DATA",
    "MLXBC_CONFIG",
    *(key.variable for key in KEYS.values()),
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
)
"""Variables that the daemon reads. A service manager runs no shell start-up file, so they come along from here."""

_PATHS: Final = frozenset(CARRIED) - {key.variable for key in KEYS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One daemon to keep running.

    Attributes:
        command: absolute path of the interpreter, and its arguments.
        socket: where it listens.
        log_dir: where it logs, if the service manager keeps no logs.
        environment: variables to set.
        on_demand: start at the first connection instead of at login.
    """

    command: tuple[str, ...]
    socket: Path
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    on_demand: bool = False

    @property
    def log(self) -> Path:
        """The daemon's own log, the same as a detached daemon's."""
        return self.log_dir / "mlxbcd.log"

    @property
    def crash_log(self) -> Path:
        """What reaches standard output and standard error in spite of the log: the last words of a crash."""
        return self.log_dir / "mlxbcd.stderr.log"


def program(
    *,
    on_demand: bool = False,
    model: str | None = None,
    preload: bool = True,
    platform: str = sys.platform,
) -> Program:
    """The daemon of this interpreter and this environment.

    Args:
        model: the default model; None leaves the choice to the daemon.
        preload: load the default model when the daemon starts, instead of at the first request.

    Raises:
        ConfigError: the socket's path is too long, or a value can't be written into a unit.
    """
    # -P: the directory that the daemon is started in must not be able to replace its modules.
    command = [os.path.abspath(sys.executable), "-P", "-m", "mlxbcd.serve.main"]
    if model is not None:
        command.append(f"--model={model}")
    if not preload:
        command.append("--no-preload")
    carried = {name: _absolute(name, os.environ[name]) for name in CARRIED if os.environ.get(name)}
    for text in (*command, *carried.values()):
        if not text.isprintable():
            raise ConfigError(f"{text!r} cannot be written into a service's unit: take the odd characters out")
    return Program(
        command=tuple(command),
        socket=socket_path(platform),
        log_dir=log_dir(platform),
        environment=carried,
        on_demand=on_demand,
    )


def _absolute(name: str, value: str) -> str:
    """A path means the same wherever the daemon is started."""
    return os.path.abspath(os.path.expanduser(value)) if name in _PATHS else value
