"""Owns the daemon's command line: what can be asked of `mlxbcd`, checked and frozen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, NoReturn

from mlxbcd.config.settings import KEYS, LOG_LEVELS, Settings
from mlxbcd.config.sources import Config, load

_EPILOG: Final = """\
examples:
  mlxbcd                              serve in the foreground, log to stderr
  mlxbcd --detach --wait              serve in the background; return once it answers
  mlxbcd --model smollm2 --no-preload load the default model at the first request
  mlxbcd --replace --detach --wait    after an update: take over without an interruption
  mlxbcd --set requests.queue=100     any setting; mlxbc config lists them

A second daemon on the same socket says that one is already running, and exits 0.
SIGTERM and SIGINT let running requests finish; a second signal does not. SIGHUP
reads the file of settings again.
"""

_FLAGS: Final = {
    "model": "--model",
    "preload": "--no-preload",
    "log.level": "--log-level",
    "log.file": "--log-file",
    "cache.ram": "--cache-ram",
    "cache.disk": "--cache-disk",
}
"""Settings that have an option of their own, by which they are told if it was that which gave them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Settings):
    """How to serve: the settings in force at the start, and where they are from.

    Attributes:
        socket: where to listen.
        replace: take the path over from a daemon that runs.
        config: what a reload starts from; None where these settings are all there is.
    """

    socket: Path
    config: Config | None = None
    replace: bool = False

    def arguments(self) -> list[str]:
        """The command line that gives these options, as far as a command line gave them."""
        line = ["--socket", str(self.socket), *(["--replace"] if self.replace else [])]
        if self.config is not None:
            line += ["--config", str(self.config.file)] if self.config.named and self.config.file else []
            origin = self.config.origin
            line += [_written(key, value, origin[key]) for key, value in self.config.flags.items()]
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed command line: how to serve, and whether in the background."""

    options: Options
    detach: bool
    wait: bool


def parse(argv: Sequence[str] | None = None) -> Command:
    """Read the command line and all other sources of settings; None reads the process's own.

    Raises:
        SystemExit: it is not a valid one (code 2), or it only asked for help (code 0).
        ConfigError: the user's socket path cannot work, or a setting isn't one.
    """
    parser = _parser()
    found = parser.parse_args(argv)
    if found.wait and not found.detach:
        parser.error("--wait needs --detach: in the foreground there is nothing to wait for")
    flags: dict[str, str] = {}
    for assignment in found.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            parser.error(f"--set takes KEY=VALUE, as in --set log.level=debug, not {assignment!r}")
        flags[key] = value
    own = {
        "model": found.model,
        "preload": None if found.preload else "false",
        "log.level": found.log_level,
        "log.file": None if found.log_file is None else str(_absolute(found.log_file)),
        "cache.ram": found.cache_ram,
        "cache.disk": found.cache_disk,
    }
    given = {key: value for key, value in own.items() if value is not None}
    flags |= given
    written = {key: _FLAGS[key] for key in given}
    file = _absolute(found.config) if found.config else None
    config = load(flags, options=written, file=file)
    if found.detach and config.settings.log_file is None:
        config = load(flags | {"log.file": _default_log()}, options=written | {"log.file": "--detach"}, file=file)
    settings = {one.name: getattr(config.settings, one.name) for one in fields(Settings)}
    socket = _absolute(found.socket) if found.socket else _default_socket()
    return Command(
        options=Options(socket=socket, replace=found.replace, config=config, **settings),
        detach=found.detach,
        wait=found.wait,
    )


class _Parser(argparse.ArgumentParser):
    """Its complaint is not the last of a dozen lines: the usage is in the help, which is named."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee: {self.prog} --help\n")


def _written(key: str, value: str, origin: str) -> str:
    """A setting as the word that says it, so that the daemon knows it from there too."""
    if origin.startswith("--set"):
        return f"--set={key}={value}"
    # Without such an option it is --detach, which has decided where the log is.
    return _FLAGS[key] if key == "preload" else f"{_FLAGS[key]}={value}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mlxbcd",
        description="Serve language models to this user's programs over a Unix socket.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--detach", action="store_true", help="serve in the background; print the process id")
    parser.add_argument("--wait", action="store_true", help="with --detach: return when it answers, or show why not")
    parser.add_argument(
        "--replace", action="store_true", help="take over from a running daemon, which finishes what runs and ends"
    )
    parser.add_argument("--socket", metavar="PATH", help="listen here (default: $MLXBC_SOCKET or the user's own)")
    parser.add_argument("--model", metavar="NAME", help="the model for requests that name none")
    parser.add_argument(
        "--no-preload", dest="preload", action="store_false", help="load no model before the first request"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help=f"(default: {KEYS['log.level'].default})")
    parser.add_argument("--log-file", metavar="PATH", help="log there (default: stderr; detached: the user's log)")
    parser.add_argument("--cache-ram", metavar="SIZE", help="memory for the prefix cache; 0: no cache (default: auto)")
    disk = parser.add_mutually_exclusive_group()
    disk.add_argument("--cache-disk", metavar="SIZE", help="disk for the prefix cache (default: auto)")
    disk.add_argument(
        "--no-cache-disk", dest="cache_disk", action="store_const", const="0", help="keep the cache off the disk"
    )
    parser.add_argument("--config", metavar="FILE", help="the file of settings (default: $MLXBC_CONFIG or the user's)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting; may be repeated (see mlxbc config)",
    )
    return parser


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _default_socket() -> Path:
    from mlxbc.paths import socket_path

    return socket_path()


def _default_log() -> str:
    from mlxbc.paths import log_dir

    return str(log_dir() / "mlxbcd.log")
