"""Owns the `mlxbc` command: which commands there are, and how any of them ends.

Each command is a module of this package with `configure(parser)` and `run(args) -> int`, imported only when
it is the one that was asked for: `mlxbc ask` must reach the daemon before a heavier program has finished
importing.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from mlxbc import __version__
from mlxbc.cli import exits
from mlxbc.cli.lean import import_msgspec
from mlxbc.errors import MlxbcError

COMMANDS = {
    "ask": "ask one question; the answer streams to standard output",
    "chat": "talk with a model",
    "fim": "write on at a place in a file",
    "explain": "show how a question would be run, and why",
    "log": "look at conversations that were kept",
    "templates": "list the templates of ask",
    "serve": "start the daemon",
    "service": "let launchd or systemd keep the daemon running",
    "http": "serve OpenAI's HTTP API for programs that know no other",
    "lsp": "complete in any editor that speaks the Language Server Protocol",
    "stop": "stop the daemon",
    "doctor": "find out what is wrong, and what mends it",
    "config": "show the daemon's settings, and where each comes from",
    "cache": "show what the daemon keeps of prompts, empty it, or prime it",
    "status": "show how the daemon is",
    "watch": "show how the daemon is whenever that changes",
    "trace": "record what the daemon does",
    "ps": "list the resident models",
    "models": "list the models on this machine",
    "pull": "fetch a model",
    "load": "make a model resident",
    "unload": "drop a resident model",
    "tokenize": "show a text's token ids",
    "count": "count a text's tokens",
    "completion": "print what lets a shell complete this command line",
}
HIDDEN = ("complete",)
"""Commands for programs: not in the list."""
_VARIABLES = ("MLXBC_SOCKET", "MLXBC_DATA", "MLXBC_CONFIG")
"""What nearly all have who have any."""
_TELL_THEMSELVES = ("serve", "doctor")
"""Commands that look at the variables anyway."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is not the last of a dozen lines: the usage is in the help, which is named."""

    def error(self, message: str) -> NoReturn:
        self.exit(exits.USAGE, f"{self.prog}: error: {message}\nsee: {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        sys.stdout = _Closed()
    try:
        code = _dispatch(arguments)
        _flush()
        return code
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return exits.BROKEN_PIPE
    except MlxbcError as error:
        exits.explain(str(error))
        return exits.of_error(error)
    except OSError as error:
        _abandon_output()
        exits.explain(error.strerror or str(error))
        return exits.IO_ERROR


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        parser = _top()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return exits.USAGE
    name, *rest = arguments
    if name not in COMMANDS and name not in HIDDEN:
        return _unknown(name)
    if name not in _TELL_THEMSELVES and name not in HIDDEN:
        _doubt_variables()
    if name != "serve":
        import_msgspec()
    command = import_module(f"mlxbc.cli.{name}")
    if name == "serve":  # its arguments are the daemon's: not parsed here, `--help` included
        return int(command.run(rest))
    parser = Parser(prog=f"mlxbc {name}", formatter_class=_formatter, allow_abbrev=False)
    command.configure(parser)
    # Intermixed: words of a text may come on both sides of an option.
    args, odd = parser.parse_known_intermixed_args(rest)
    if odd:
        from mlxbc.cli.hints import unrecognized

        parser.error(unrecognized(parser, odd))
    return int(command.run(args))


def _doubt_variables() -> None:
    """Tell of variables whose names nobody reads but which are near one that is."""
    if any(name.startswith("MLXBC_") and name not in _VARIABLES for name in os.environ):
        from mlxbc.variables import doubts

        for doubt in doubts(os.environ):
            exits.explain(doubt)


def _formatter(prog: str) -> argparse.HelpFormatter:
    """As wide as the terminal. argparse would import all of shutil to find that out, for every argument added."""
    try:
        columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError, AttributeError):
        columns = 80
    return argparse.RawDescriptionHelpFormatter(prog, width=columns - 2)


def _top() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<12}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="mlxbc",
        usage="mlxbc COMMAND [ARGUMENT ...]",
        description="Ask language models that stay resident in a local daemon.",
        epilog=f"""\
commands:
{commands}

`mlxbc COMMAND --help` tells more about one of them.

examples:
  mlxbc serve --detach --wait
  mlxbc ask "What is the capital of France?"
  git diff | mlxbc ask "Write a commit message for this change"

environment:
  MLXBC_SOCKET  the daemon's socket, instead of the user's own
  MLXBC_DATA    the directory of imported models
  MLXBC_CONFIG  the daemon's file of settings, instead of the user's own
  NO_COLOR      no escape sequences on the terminal
""",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"mlxbc {__version__}")
    return parser


def _unknown(name: str) -> int:
    import_msgspec()
    from mlxbc.cli.hints import command

    exits.explain(f"unknown command {name!r}; {command(name, COMMANDS)}")
    return exits.USAGE


class _Closed(io.TextIOBase):
    """Standard output where there is none."""

    def write(self, text: str) -> int:
        raise OSError("standard output is closed")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A language server closes the streams that it was given, once it is told to leave.
        if stream is not None and not stream.closed:
            stream.flush()


def _abandon_output() -> None:
    """What is still buffered cannot be written: don't let the interpreter try once more as it exits."""
    if sys.stdout.writable():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
