"""Owns `mlxbc config`: the daemon's settings, where each comes from, and its file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.cli.table import table
from mlxbc.client import Client
from mlxbc.errors import ConfigError, DaemonUnavailable
from mlxbc.files import create

_EPILOG = f"""\
verbs:
  show       the settings in force and where each comes from (default); of the
             running daemon, or else of the one that would be started from here
  init       write a file that documents every key and sets none
  check      read the file as a daemon would
  reload     let the running daemon read its file again
  path       print where the file is

An option of the daemon wins over a variable, and a variable over the file. The
variable of log.level is MLXBC_LOG_LEVEL, and so on. Another file is named by
MLXBC_CONFIG. The socket (MLXBC_SOCKET) and the directory of models (MLXBC_DATA)
are not settings of the daemon, since clients need them too.

examples:
  mlxbc config
  mlxbc config init && $EDITOR "$(mlxbc config path)"
  mlxbc config check && mlxbc config reload

{exits.HELP}"""

_HEADER = ("KEY", "VALUE", "FROM", "RELOAD")
_RELOAD_S = 5.0
_POLL_S = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Show the daemon's settings, or work on their file."
    parser.epilog = _EPILOG
    parser.add_argument(
        "verb", nargs="?", choices=list(_VERBS), default="show", metavar="VERB", help="one of those below"
    )
    parser.add_argument("--json", action="store_true", help="with show: print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    return _VERBS[args.verb](args)


def _show(args: argparse.Namespace) -> int:
    try:
        with Client(client_name="mlxbc-config") as client:
            whose, found = f"daemon {client.welcome.pid}", client.config()
    except DaemonUnavailable:
        whose, found = "no daemon runs; what one would take", _here()
    if args.json:
        print(msgspec.json.encode(found).decode())
        return exits.OK
    rows = [(one.key, one.value, one.source, "yes" if one.live else "no") for one in found.settings]
    sys.stdout.write(table(_HEADER, rows))
    notes = [f"{whose}; file: {found.file or 'none'}{'' if Path(found.file).is_file() else ' (not there)'}"]
    if found.error:
        notes.append(f"the file is wrong, so its last version is in force: {found.error}")
    if found.waiting:
        notes.append(f"changed in the file, and waiting for a restart: {', '.join(found.waiting)}")
    for note in notes:
        exits.explain(note)
    return exits.OK


def _init(_args: argparse.Namespace) -> int:
    from mlxbcd.config.document import template
    from mlxbcd.config.sources import user_file

    path = user_file()
    try:
        create(path, template())
    except FileExistsError:
        raise ConfigError(f"{path} is there already; move it away to get a new one") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    print(path)
    return exits.OK


def _check(_args: argparse.Namespace) -> int:
    found = _here()
    exits.explain(f"{found.file} is fine" if Path(found.file).is_file() else f"there is no {found.file}, which is fine")
    return exits.OK


def _reload(_args: argparse.Namespace) -> int:
    _here()  # a wrong file is refused here, where somebody sees it
    with Client(client_name="mlxbc-config") as client:
        before = client.config().loads
        os.kill(client.welcome.pid, signal.SIGHUP)
        given_up = time.monotonic() + _RELOAD_S
        while (found := client.config()).loads == before:
            if time.monotonic() > given_up:
                exits.explain("the daemon has not read its settings; is it still starting?")
                return exits.TIMEOUT
            time.sleep(_POLL_S)
    if found.error:
        raise ConfigError(found.error)
    if found.waiting:
        exits.explain(f"these need a restart of the daemon: {', '.join(found.waiting)}")
    return exits.OK


def _path(_args: argparse.Namespace) -> int:
    from mlxbcd.config.sources import user_file

    print(user_file())
    return exits.OK


def _here() -> wire.Settings:
    """What a daemon started from here would take."""
    from mlxbcd.config.sources import entries, load

    config = load()
    return wire.Settings(id=0, file=str(config.file), settings=[wire.Setting(**one) for one in entries(config)])


_VERBS = {"show": _show, "init": _init, "check": _check, "reload": _reload, "path": _path}
