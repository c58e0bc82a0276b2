"""Owns `mlxbc models`: what can be loaded."""

from __future__ import annotations

import argparse
import sys

import msgspec

from mlxbc import wire
from mlxbc.cli import exits
from mlxbc.cli.table import size, table
from mlxbc.client import Client

_EPILOG = f"""\
SIZE is that of the files, MEMORY about what the weights take once they are
loaded, and FITS whether there is room for that: now, if other models go, or not
at all. What running requests need comes on top.

SOURCE is embedded (the model that mlxbc pull knows by a short name), hub (the
Hugging Face cache) or directory. The model that answers when none is named is
marked default. mlxbc pull adds models.

examples:
  mlxbc models
  mlxbc models --json | jq -r '.[].name'

{exits.HELP}"""

_HEADER = ("NAME", "SIZE", "MEMORY", "FITS", "SOURCE", "STATE")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "List the models on this machine, resident or not."
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """List them."""
    with Client(client_name="mlxbc-models") as client:
        models = client.models(memory=True)
        report = client.status()
    if args.json:
        print(msgspec.json.encode(models).decode())
    else:
        sys.stdout.write(table(_HEADER, [_row(model, report) for model in models]))
    return exits.OK


def _row(model: wire.ModelEntry, report: wire.StatusReport) -> tuple[str, ...]:
    state = [word for word, holds in (("resident", model.resident), ("default", model.default)) if holds]
    memory = size(model.memory) if model.memory else "-"
    return model.name, size(model.bytes), memory, fits(model, report), model.source, ", ".join(state) or "-"


def fits(model: wire.ModelEntry, report: wire.StatusReport) -> str:
    """Whether there is room for a model in memory."""
    if not model.memory or not report.memory_limit:
        return "-"
    if model.resident or model.memory <= report.memory_limit - report.memory_used:
        return "yes"
    return "if others go" if model.memory <= report.memory_limit else "no"
