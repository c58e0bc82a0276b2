"""Owns the daemon's command line: what can be asked of `mlxbcd`, checked and frozen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_EPILOG: Final = """\
examples:
  mlxbcd                              serve in the foreground, log to stderr
  mlxbcd --detach --wait              serve in the background; return once it answers
  mlxbcd --model smollm2 --no-preload load the default model at the first request

A second daemon on the same socket says that one is already running, and exits 0.
SIGTERM and SIGINT let running requests finish; a second signal does not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to serve.

    Attributes:
        socket: where to listen.
        model: the default model; None leaves the choice to the service.
        preload: load the default model now instead of at the first request.
        log_level: one of `LOG_LEVELS`.
        log_file: where to log; None is stderr.
    """

    socket: Path
    model: str | None = None
    preload: bool = True
    log_level: str = "info"
    log_file: Path | None = None

    def arguments(self) -> list[str]:
        """The command line that gives these options."""
        line = ["--socket", str(self.socket), "--log-level", self.log_level]
        if self.model is not None:
            line += ["--model", self.model]
        if not self.preload:
            line.append("--no-preload")
        if self.log_file is not None:
            line += ["--log-file", str(self.log_file)]
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed command line: how to serve, and whether in the background."""

    options: Options
    detach: bool
    wait: bool


def parse(argv: Sequence[str] | None = None) -> Command:
    """Read the command line; None reads the process's own.

    Raises:
        SystemExit: it is not a valid one (code 2), or it only asked for help (code 0).
        ConfigError: the user's socket path cannot work.
    """
    parser = _parser()
    found = parser.parse_args(argv)
    if found.wait and not found.detach:
        parser.error("--wait needs --detach: in the foreground there is nothing to wait for")
    if found.detach and found.log_file is None:
        found.log_file = _default_log()
    options = Options(
        socket=_absolute(found.socket) if found.socket else _default_socket(),
        model=found.model,
        preload=found.preload,
        log_level=found.log_level,
        log_file=_absolute(found.log_file) if found.log_file else None,
    )
    return Command(options=options, detach=found.detach, wait=found.wait)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxbcd",
        description="Serve language models to this user's programs over a Unix socket.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--detach", action="store_true", help="serve in the background; print the process id")
    parser.add_argument("--wait", action="store_true", help="with --detach: return when it answers, or show why not")
    parser.add_argument("--socket", metavar="PATH", help="listen here (default: $MLXBC_SOCKET or the user's own)")
    parser.add_argument("--model", metavar="NAME", help="the model for requests that name none")
    parser.add_argument(
        "--no-preload", dest="preload", action="store_false", help="load no model before the first request"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: info)")
    parser.add_argument("--log-file", metavar="PATH", help="log there (default: stderr; detached: the user's log)")
    return parser


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _default_socket() -> Path:
    from mlxbc.paths import socket_path

    return socket_path()


def _default_log() -> str:
    from mlxbc.paths import log_dir

    return str(log_dir() / "mlxbcd.log")
