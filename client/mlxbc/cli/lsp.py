"""Owns `mlxbc lsp`: the language server, as a command."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from mlxbc.cli import exits, options

_EPILOG = f"""\
An editor starts it and talks with it over standard input and output. It answers
textDocument/inlineCompletion (LSP 3.18), and passes $/cancelRequest on to the
daemon. Documents are kept in memory and go to the daemon alone.

Without a daemon it says so once and suggests nothing; one that is started or
restarted later is found by itself.

examples:
  mlxbc lsp -m smollm2

in Neovim 0.12:
  vim.lsp.config('mlxbc', {{ cmd = {{ 'mlxbc', 'lsp' }} }})
  vim.lsp.enable('mlxbc')
  vim.lsp.inline_completion.enable()

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Complete code in any editor that speaks the Language Server Protocol."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    options.add_model(parser)
    for name, default, what in (
        ("--max-tokens", 96, "the most tokens of a suggestion"),
        ("--deadline-ms", 3000, "the daemon ends a suggestion after so many milliseconds with what it has"),
        ("--lines-before", 256, "lines before the cursor that the model sees"),
        ("--lines-after", 64, "lines after it"),
    ):
        parser.add_argument(name, type=_count, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    # Some editors add it by themselves; there is no other way to talk.
    parser.add_argument("--stdio", action="store_true", help="what it does anyway")


def run(args: argparse.Namespace) -> int:
    """Serve until the editor leaves."""
    if find_spec("pygls") is None:
        exits.explain(
            f"the language server is not installed (no pygls); "
            f"in mlxbc's checkout: {sys.executable} -m pip install '.[lsp]'"
        )
        return exits.UNAVAILABLE
    from mlxbc.lsp.around import Reach
    from mlxbc.lsp.server import Options, server

    reach = Reach(before=args.lines_before, after=args.lines_after)
    server(Options(model=args.model, max_tokens=args.max_tokens, deadline_ms=args.deadline_ms, reach=reach)).start_io()
    return exits.OK


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
