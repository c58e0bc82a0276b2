"""Owns `mlxbc doctor`: look at everything that can be wrong, and name what mends it."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from importlib.util import find_spec

import msgspec

from mlxbc import __version__, wire
from mlxbc.cli import exits
from mlxbc.client import Client
from mlxbc.errors import ConfigError, DaemonUnavailable, MlxbcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mlxbcd.doctor.patient import Answer

_EPILOG = f"""\
Looks at the versions, the settings, the socket and its lock, the daemon, the
service and how it last ended, the models, the memory, other model servers, the
device (the same small work in the daemon and in this process), and the log.
Nothing is changed. Every fault comes with what mends it.

The exit status is 0 if nothing is wrong, and 1 if anything is; what is only
worth knowing is marked "note" and is no fault.

examples:
  mlxbc doctor
  mlxbc doctor --no-probe
  mlxbc doctor --json | jq -r '.[] | select(.level == "fault") | .fix'

{exits.HELP}"""

_PATIENCE_S = 10.0
_MARKS = {"ok": "ok    ", "note": "note  ", "fault": "FAULT "}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Find out what is wrong with the daemon and its surroundings."
    parser.epilog = _EPILOG
    parser.add_argument("--no-probe", dest="probe", action="store_false", help="don't try the device")
    parser.add_argument("--json", action="store_true", help="print a JSON array of findings")


def run(args: argparse.Namespace) -> int:
    """Look, and say what was found."""
    from mlxbcd.doctor.examine import examine
    from mlxbcd.doctor.findings import Level
    from mlxbcd.doctor.patient import this_patient

    answer = _ask()
    tries = args.probe and answer.welcome is not None and find_spec("mlx") is not None
    patient = this_patient(__version__, answer, _probe_daemon if tries else None, _probe_here if tries else None)
    worst, shown = exits.OK, []
    for finding in examine(patient):
        if finding.level is Level.FAULT:
            worst = exits.FAILED
        if args.json:
            shown.append(
                {"about": finding.about, "level": finding.level.value, "text": finding.text, "fix": finding.fix}
            )
            continue
        sys.stdout.write(f"{_MARKS[finding.level.value]}{finding.about:<9} {finding.text}\n")
        if finding.fix:
            sys.stdout.write(f"{'':16}-> {finding.fix}\n")
        sys.stdout.flush()
    if args.json:
        print(msgspec.json.encode(shown).decode())
    return worst


def _ask() -> Answer:
    """What the daemon says, as far as it does."""
    from mlxbcd.doctor.patient import Answer

    welcome: wire.Welcome | None = None
    status: wire.StatusReport | None = None
    try:
        with Client(client_name="mlxbc-doctor", timeout=_PATIENCE_S) as client:
            welcome = client.welcome
            status = client.status()
            return Answer(welcome=welcome, status=status, settings=client.config())
    except DaemonUnavailable as error:
        return Answer(error=str(error), absent=True)
    except (MlxbcError, ConfigError) as error:
        # A daemon of an older version knows less: what it has said counts.
        return Answer(welcome=welcome, status=status, error=str(error))


def _probe_daemon() -> float:
    with Client(client_name="mlxbc-doctor", timeout=_PATIENCE_S) as client:
        return client.probe()


def _probe_here() -> float:
    from mlxbcd.config.sources import load
    from mlxbcd.model.blas import enable

    with suppress(ConfigError):
        settings = load().settings
        enable(settings.blas, settings.blas_threads)
    if sys.platform.startswith("linux"):
        os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # as the daemon does
    from mlxbcd.model.probe import probe

    return probe()
