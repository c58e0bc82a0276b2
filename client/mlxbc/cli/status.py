"""Owns `mlxbc status`: how the daemon is."""

from __future__ import annotations

import argparse
import sys

import msgspec

from mlxbc import __version__, wire
from mlxbc.cli import exits
from mlxbc.cli.table import duration, size, titled
from mlxbc.client import Client

_EPILOG = f"""\
examples:
  mlxbc status
  mlxbc status --json | jq .running
  mlxbc status --prometheus > /var/lib/node_exporter/mlxbc.prom

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Show how the daemon is. It answers at once, whatever the device does."
    parser.epilog = _EPILOG
    parser.add_argument("--prometheus", action="store_true", help="print what a Prometheus exporter would")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Show it."""
    with Client(client_name="mlxbc-status") as client:
        report = client.status()
    if args.prometheus:
        from mlxbc.cli.prometheus import exposition

        sys.stdout.write(exposition(report))
    elif args.json:
        print(msgspec.json.encode(report).decode())
    else:
        sys.stdout.write(_text(report))
    return exits.OK


def _memory(report: wire.StatusReport) -> str:
    used = f"{size(report.memory_used)} of {size(report.memory_limit)} for models"
    return f"{used}, {size(report.footprint)} in all ({report.footprint_measure})" if report.footprint else used


def _text(report: wire.StatusReport) -> str:
    resident = ", ".join(map(titled, report.models)) or "none"
    guesses = f", {report.accepted_tokens} of {report.drafted_tokens} guesses right" if report.drafted_tokens else ""
    lines = [
        f"{report.state}, pid {report.pid}, version {report.version}, up {duration(report.uptime_s)}",
        f"device    {report.device}, {size(report.memory_active)} in use, {size(report.memory_cache)} spare",
        f"memory    {_memory(report)}",
        f"models    {resident}",
        f"requests  {report.running} running, {report.queued} queued, {report.served} served, {report.failed} failed",
        f"tokens    {report.generated_tokens} generated{guesses}",
        f"clients   {report.connections} connected",
        *(f"note      {note}" for note in report.notes),
    ]
    if report.version != __version__:
        lines.append(
            f"note      this command is version {__version__}; replace the daemon with: mlxbc serve --replace --detach"
        )
    return "\n".join(lines) + "\n"
