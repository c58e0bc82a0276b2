"""Owns `mlxbc ask`: one question, one answer."""

from __future__ import annotations

import argparse

import msgspec

from mlxbc import request
from mlxbc.cli import answer, exits, options
from mlxbc.cli.terminal import Terminal
from mlxbc.cli.text import ARGUMENT_HELP, gather
from mlxbc.client import Client
from mlxbc.result import Result

_EPILOG = f"""\
The text is what standard input holds, unless that is a terminal, followed by
the arguments. An argument of - reads standard input even from a terminal. In a
loop that reads a file, redirect it: mlxbc ask ... </dev/null

With --raw both are sent character by character; otherwise they become
paragraphs of one message.

Standard output carries the model's text and nothing else, ended by a newline.
Reasoning (dimmed), progress and notes go to standard error, and only if that
is a terminal.

Without -o max_tokens N an answer is at most 2048 tokens long; on a terminal a
note says when it was cut there, and --json always gives the reason.

Ctrl-C ends the answer and keeps what came of it; pressed again, it exits at
once.

examples:
  mlxbc ask "What is the capital of France?"
  mlxbc ask -s "Answer in one word." -o temperature 0 "Is the sky blue?"
  git diff | mlxbc ask "Write a commit message for this change"
  mlxbc ask --raw -o max_tokens 40 -o stop $'\\n\\n' <prompt.txt
  mlxbc ask -o seed 7 -o logit_bias '{{"42": -100}}' --json "Hi" | jq .text

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Ask a model one question; the answer streams to standard output."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("text", nargs="*", help=ARGUMENT_HELP)
    options.add_system(parser)
    options.add_generation(parser)
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the model's chat template")
    parser.add_argument("--no-stream", action="store_true", help="print the answer once it is complete")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: text, reasoning, reason, usage, timings, ...",
    )
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    parser.add_argument("-R", "--hide-reasoning", action="store_true", help="don't show what the model thinks")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no notes")


def run(args: argparse.Namespace) -> int:
    """Ask, and show the answer."""
    parser: argparse.ArgumentParser = args.parser
    fields = options.generation(parser, args, logprobs=args.json)
    if args.raw and args.system is not None:
        parser.error("-s needs the chat template that --raw leaves out")
    text = gather(parser, args.text, exact=args.raw)
    fields |= {"prompt": text} if args.raw else {"messages": request.conversation(text, args.system)}
    terminal = Terminal(quiet=args.quiet, reasoning=not args.hide_reasoning)
    with Client(client_name="mlxbc-ask") as client, client.generate(**fields) as stream:
        result = answer.follow(stream, terminal, streaming=not (args.no_stream or args.json))
    if args.json:
        _print_json(result, reasoning=not args.hide_reasoning)
    elif args.no_stream:
        terminal.reasoning(result.reasoning)
        terminal.text(result.text)
        terminal.end_text()
    if result.reason == "length":
        terminal.note(f"mlxbc: stopped after {result.usage.generated} tokens; -o max_tokens N allows more")
    if args.stats:
        terminal.report(answer.stats(result))
    return exits.INTERRUPTED if result.reason == "cancelled" else exits.OK


def _print_json(result: Result, *, reasoning: bool) -> None:
    if not reasoning:
        result = msgspec.structs.replace(result, reasoning="")
    print(msgspec.json.encode(result).decode())
