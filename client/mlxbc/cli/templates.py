"""Owns `mlxbc templates`: the questions with blanks that mlxbc ask -t knows."""

from __future__ import annotations

import argparse
import sys

import msgspec

from mlxbc.cli import exits, template
from mlxbc.cli.table import table

_EPILOG = f"""\
A template is a file NAME.toml in the directory that --path prints:

  prompt = "Explain $input to a $reader."
  system = "Be brief."
  model = "smollm2"
  extract = false          # true: the answer is its first block of code

  [options]                # as -o sets them
  temperature = 0.2

  [defaults]               # for blanks that -p doesn't fill
  reader = "child"

All of these may be left out. $input is the text that mlxbc ask was given; where
the prompt has no such blank, the text follows it. A dollar sign is written $$.

examples:
  mlxbc templates
  mlxbc templates explain
  mlxbc ask --save explain -s "Be brief." 'Explain $input to a $reader.'
  mlxbc ask -t explain -p reader physicist "why the sky is blue"

{exits.HELP}"""

_SHOWN = 60
"""Characters of a prompt in the list."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "List the templates of mlxbc ask, or show one."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one")
    parser.add_argument("--path", action="store_true", help="print the directory they are in")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List or show."""
    if args.path:
        print(template.directory())
    elif args.name is not None:
        one = template.load(args.name)
        sys.stdout.write(msgspec.json.encode(one).decode() + "\n" if args.json else template.render(one))
    elif args.json:
        print(msgspec.json.encode(template.names()).decode())
    else:
        sys.stdout.write(table(("NAME", "PROMPT"), [(name, _short(name)) for name in template.names()]))
    return exits.OK


def _short(name: str) -> str:
    one = template.load(name)
    text = " ".join((one.prompt or one.system or "").split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
