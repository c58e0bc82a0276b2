"""Owns `mlxbc log`: the conversations that are kept."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from mlxbc.cli import conversations, exits
from mlxbc.cli.conversations import Conversation
from mlxbc.cli.table import table
from mlxbc.cli.terminal import Terminal

_EPILOG = f"""\
verbs:
  list       the conversations, the newest last (default)
  show       what was said in one: its ID, or the end or beginning of it;
             without one, in the last
  on         keep all conversations of mlxbc ask and chat from now on
  off        keep only those that --log asks for
  remove     delete one, or all with --all
  path       print where they are

Nothing is kept until you say so. Each conversation is a file of JSON lines that
only you can read. It holds prompts and answers as they were.

examples:
  mlxbc log on
  mlxbc log show
  mlxbc log show 3f2a --json | jq -r .assistant
  mlxbc log remove --all

{exits.HELP}"""

_VERBS = ("list", "show", "on", "off", "remove", "path")
_HEADER = ("ID", "LAST", "TURNS", "MODEL", "FIRST QUESTION")
_QUESTION = 40
"""Characters of a question in the list."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Look at the conversations that are kept, and say whether they are."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("verb", nargs="?", choices=_VERBS, default="list", metavar="VERB", help=", ".join(_VERBS))
    parser.add_argument("cid", nargs="?", metavar="ID", help="a conversation, for show and remove")
    parser.add_argument("--all", action="store_true", help="with remove: every conversation")
    parser.add_argument("--json", action="store_true", help="with list and show: JSON lines")


def run(args: argparse.Namespace) -> int:
    """Do what the verb says."""
    parser: argparse.ArgumentParser = args.parser
    if args.cid is not None and args.verb not in ("show", "remove"):
        parser.error(f"{args.verb} takes no ID")
    match args.verb:
        case "list":
            _list(as_json=args.json)
        case "show":
            _show(conversations.latest() if args.cid is None else conversations.find(args.cid), as_json=args.json)
        case "on" | "off":
            conversations.keep_always(args.verb == "on")
            kept = "are kept from now on" if args.verb == "on" else "are kept only with --log from now on"
            exits.tell(f"conversations {kept}, in {conversations.directory()}")
        case "remove":
            if args.all == (args.cid is not None):
                parser.error("remove what? give an ID, or --all")
            for one in conversations.every() if args.all else [conversations.find(args.cid)]:
                conversations.remove(one.cid)
        case "path":
            print(conversations.directory())
    return exits.OK


def _list(*, as_json: bool) -> None:
    found = [one for one in conversations.every() if one.turns]
    if as_json:
        for one in found:
            last = one.turns[-1]
            entry = {"cid": one.cid, "time": last.time, "turns": len(one.turns), "model": last.model}
            print(msgspec.json.encode({**entry, "question": one.turns[0].user}).decode())
    else:
        sys.stdout.write(table(_HEADER, [_row(one) for one in found]))


def _row(one: Conversation) -> tuple[str, ...]:
    last = one.turns[-1]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last.time))
    question = " ".join(one.turns[0].user.split())
    short = question if len(question) <= _QUESTION else f"{question[: _QUESTION - 1]}…"
    return one.cid, when, str(len(one.turns)), last.model, "".join(c if c.isprintable() else "?" for c in short)


def _show(one: Conversation, *, as_json: bool) -> None:
    if as_json:
        for turn in one.turns:
            print(msgspec.json.encode(turn).decode())
        return
    terminal = Terminal()
    for turn in one.turns:
        for heading, text in (("system", turn.system), ("user", turn.user), (turn.model, turn.assistant)):
            if text is not None:
                terminal.text(f"## {heading}\n\n{text.rstrip()}\n\n")
