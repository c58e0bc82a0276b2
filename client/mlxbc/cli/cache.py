"""Owns `mlxbc cache`: what the daemon keeps of prompts, how much that helps, and what it has of one prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from mlxbc import request, wire
from mlxbc.cli import exits, options
from mlxbc.cli.table import size
from mlxbc.cli.terminal import Terminal
from mlxbc.cli.text import ARGUMENT_HELP, gather
from mlxbc.client import Client

_EPILOG = f"""\
verbs:
  show       what is kept, and how much it has helped (default)
  explain    how much of a prompt would be reused, and why not more
  prime      process a prompt, so that what begins with it starts at once
  clear      forget everything, on the disk too, and the answers that could
             still be continued

The daemon keeps the states of prompts and answers of 256 tokens and more, and
of shorter beginnings that several shared, so that what begins alike is not
processed again. On the disk they survive a restart, and reveal the prompts
to whoever can read your files: -o cache ram keeps one request off the disk, and
-o cache none out of the cache. mlxbc config has cache.mode for all of them.

examples:
  mlxbc cache
  mlxbc cache explain "What is the capital of France?"
  mlxbc cache prime -s "$(cat instructions.txt)" Hello
  mlxbc cache clear

{exits.HELP}"""

_Reply: TypeAlias = wire.CacheReport | wire.CacheCleared | wire.Explained | wire.Primed
_WHY = {
    "whole": "it is all there: the last token is always processed",
    "diverges": "what is kept goes on with other text, or not at all",
    "untrimmable": "more is the same, but this model's state can't be cut back to where the texts part",
    "converted": "more is the same, but only up to before its keys and values were quantised",
    "on_disk": "more is on the disk",
    "short": "a few tokens are the same, which is not worth it",
}
_NOTHING = "nothing is kept that begins like it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Show the prefix cache, empty it, or ask what it has of a prompt."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "verb", nargs="?", choices=list(_VERBS), default="show", metavar="VERB", help="one of those below"
    )
    parser.add_argument("text", nargs="*", help=ARGUMENT_HELP)
    options.add_system(parser)
    options.add_model(parser)
    parser.add_argument("--raw", action="store_true", help="take the text as it is, without the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do it."""
    takes_text = args.verb in ("explain", "prime")
    if not takes_text and (args.text or args.raw or args.model or args.system is not None):
        args.parser.error(f"{args.verb} takes no text")
    fields = _prompt(args) if takes_text else {}
    with Client(client_name="mlxbc-cache") as client:
        reply: _Reply = _VERBS[args.verb](client, fields)
    if args.json:
        print(msgspec.json.encode(reply).decode())
    else:
        sys.stdout.write(_told(reply))
    return exits.OK


def _prompt(args: argparse.Namespace) -> dict[str, Any]:
    if args.raw and args.system is not None:
        args.parser.error("-s needs the chat template that --raw leaves out")
    text = gather(args.parser, args.text, exact=args.raw)
    prompt: dict[str, Any] = {"prompt": text} if args.raw else {"messages": request.conversation(text, args.system)}
    return prompt | ({"model": args.model} if args.model else {})


def _show(client: Client, _fields: dict[str, Any]) -> wire.CacheReport:
    return client.cache()


def _clear(client: Client, _fields: dict[str, Any]) -> wire.CacheCleared:
    return client.clear_cache()


def _explain(client: Client, fields: dict[str, Any]) -> wire.Explained:
    return client.explain(**fields)


def _prime(client: Client, fields: dict[str, Any]) -> wire.Primed:
    terminal = Terminal(quiet=False, reasoning=False)
    try:
        return client.prime(**fields, on_progress=terminal.progress)
    finally:
        terminal.end_text()


def _told(reply: _Reply) -> str:
    match reply:
        case wire.CacheReport():
            return "".join(f"{name:<10}{value}\n" for name, value in _report(reply))
        case wire.CacheCleared(streams=0):
            return f"freed {size(reply.bytes)}\n"
        case wire.CacheCleared():
            return f"freed {size(reply.bytes)}, and forgot {reply.streams} answers that could be continued\n"
        case wire.Primed(usage=usage):
            return f"{usage.prompt} tokens, {usage.cached} of them from the cache\n"
        case wire.Explained(cached=None):
            return (
                f"{reply.prompt} tokens; the cache doesn't apply: {reply.plan.off.get('prefix cache', 'not known')}\n"
            )
        case wire.Explained(cached=cached):
            assert cached is not None
            line = f"{cached.disk} of {reply.prompt} tokens would be reused"
            if cached.disk > cached.ram:
                line += f", {cached.disk - cached.ram} of them from the disk"
            why = _WHY.get(cached.why, cached.why) if cached.matched or cached.disk else _NOTHING
            return f"{line}; {why}\n"


def _report(found: wire.CacheReport) -> list[tuple[str, str]]:
    if not found.ram_limit:
        return [("cache", "off")]
    lines = [
        ("mode", f"{found.mode}, for requests that do not say"),
        ("memory", f"{size(found.ram_bytes)} of {size(found.ram_limit)}, {found.ram_entries} pieces"),
    ]
    if found.disk_limit:
        lines.append(("disk", f"{size(found.disk_bytes)} of {size(found.disk_limit)}, {found.disk_entries} pieces"))
        lines.append(("directory", found.directory))
    else:
        lines.append(("disk", "off"))
    share = f", {100 * found.reused / found.tokens:.0f} % of their tokens reused" if found.tokens else ""
    lines.append(("hits", f"{found.hits} of {found.lookups} requests{share}"))
    if found.pending:
        lines.append(("writing", f"{found.pending} pieces wait"))
    if found.trouble:
        lines.append(("trouble", found.trouble))
    return lines


_VERBS: dict[str, Callable[[Client, dict[str, Any]], _Reply]] = {
    "show": _show,
    "explain": _explain,
    "prime": _prime,
    "clear": _clear,
}
