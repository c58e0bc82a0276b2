"""Owns `mlxbc completion`: the files with which a shell completes mlxbc's command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlxbc.cli import exits

FILES = {"bash": "mlxbc.bash", "zsh": "_mlxbc", "fish": "mlxbc.fish"}
"""Shell → the file in `DIRECTORY`."""
DIRECTORY = Path(__file__).parents[1] / "completions"

_EPILOG = f"""\
bash, with the package bash-completion:
  mkdir -p ~/.local/share/bash-completion/completions
  mlxbc completion bash >~/.local/share/bash-completion/completions/mlxbc

zsh, with a directory of your own in fpath before compinit is called:
  mkdir -p ~/.zfunc
  mlxbc completion zsh >~/.zfunc/_mlxbc

fish:
  mlxbc completion fish >~/.config/fish/completions/mlxbc.fish

Names of models, templates and conversations are looked up when TAB is pressed;
those of models by asking the daemon, if it runs.

examples:
  mlxbc completion bash

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Print what lets a shell complete mlxbc's command line."
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=list(FILES), metavar="SHELL", help=", ".join(FILES))


def run(args: argparse.Namespace) -> int:
    """Print it."""
    sys.stdout.write((DIRECTORY / FILES[args.shell]).read_text(encoding="utf-8"))
    return exits.OK
