"""Owns `mlxbc ask`: one question, one answer."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from mlxbc.cli import answer, exits, options
from mlxbc.cli.question import Question, add_conversation, add_template
from mlxbc.cli.structure import add_structure, calls
from mlxbc.cli.terminal import Terminal
from mlxbc.cli.text import ARGUMENT_HELP, add_files
from mlxbc.client import Client
from mlxbc.result import Result

_FORMS = ("schema", "grammar", "regex", "choice")
"""Fields that say which form an answer has."""

_EPILOG = f"""\
The text is what standard input holds, unless that is a terminal, then the files
of -f, then the arguments. An argument of - reads standard input even from a
terminal. In a loop that reads a file, redirect it: mlxbc ask ... </dev/null

With --raw all are sent character by character; otherwise they become
paragraphs of one message, and several files are headed by their names.

Standard output carries the model's text and nothing else, ended by a newline.
Reasoning (dimmed), progress and notes go to standard error, and only if that
is a terminal.

Without -o max_tokens N an answer is at most 2048 tokens long; on a terminal a
note says when it was cut there, and --json always gives the reason. One that
-o deadline_ms N has cut exits with 124, one that was cut before it has the form
that was asked for with 1.

-x prints the answer's first block of code and fails if there is none; --code
also asks the model for nothing else. --md shows Markdown as a terminal can, and
changes nothing where the output is no terminal.

--schema FILE makes the answer JSON that satisfies a JSON Schema, --grammar FILE
a text of a Lark grammar; -o regex and -o choice work likewise. With --tools
FILE the model may call functions, defined as in OpenAI's API; each call is
printed as a line of JSON. -o thinking_budget N ends reasoning after N tokens.

--dry-run prints the text that the model would see, and with --json the request.

-t NAME takes the question, the system prompt, the model and options from a
template: see mlxbc templates --help.

Nothing is kept unless you say so: --log keeps this conversation, mlxbc log on
all of them. -c goes on with the last one that was kept, --cid with any.

On a terminal the request goes before others, as -o priority interactive asks
for anywhere; -o priority background lets all others go first.

Ctrl-C ends the answer and keeps what came of it; pressed again, it exits at
once.

examples:
  mlxbc ask "What is the capital of France?"
  mlxbc ask -s "Answer in one word." -o temperature 0 "Is the sky blue?"
  git diff | mlxbc ask "Write a commit message for this change"
  mlxbc ask -f main.c -f main.h "Where is the leak?"
  mlxbc ask --code "A shell loop over all PNG files" >loop.sh
  mlxbc ask --log "Name three rivers"; mlxbc ask -c "Which is the longest?"
  mlxbc ask --schema person.json "Ada Lovelace" | jq .born
  mlxbc ask -o choice yes -o choice no "Is the sky blue?"
  mlxbc ask --raw -o max_tokens 40 -o stop $'\\n\\n' <prompt.txt
  mlxbc ask -o seed 7 -o logit_bias '{{"42": -100}}' --json "Hi" | jq .text

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Ask a model one question; the answer streams to standard output."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("text", nargs="*", help=ARGUMENT_HELP)
    add_files(parser)
    options.add_system(parser)
    options.add_generation(parser)
    add_template(parser)
    add_conversation(parser)
    add_structure(parser)
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the model's chat template")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("-x", "--extract", action="store_true", help="print the first block of code in the answer")
    shape.add_argument("--code", action="store_true", help="ask for code alone, and print that")
    shape.add_argument("--md", action="store_true", help="show Markdown as a terminal can")
    shape.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: text, reasoning, reason, usage, timings, ...",
    )
    options.add_keep_alive(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the answer once it is complete")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the model would see, and ask nothing",
    )
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    parser.add_argument("-R", "--hide-reasoning", action="store_true", help="don't show what the model thinks")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no notes")


def run(args: argparse.Namespace) -> int:
    """Ask, and show the answer."""
    _check(args.parser, args)
    question = Question(args.parser, args)
    if args.save is not None:
        return question.save(args.save)
    if args.dry_run:
        return _dry_run(question.fields, as_json=args.json)
    terminal = Terminal(quiet=args.quiet, reasoning=not args.hide_reasoning)
    if terminal.screen:
        question.fields.setdefault("priority", "interactive")
    whole = args.no_stream or args.json or question.extract or args.code

    def connect() -> Client:
        return Client(client_name="mlxbc-ask", on_starting=terminal.starting)

    with answer.start(connect, terminal, **question.fields) as stream:
        if args.md:
            terminal.render_markdown()  # while the daemon works: that takes a while to import
        result = answer.follow(stream, terminal, streaming=not whole)
    code = exits.OK
    if args.json:
        _print_json(result, reasoning=not args.hide_reasoning)
    elif whole:
        terminal.reasoning(result.reasoning)
        code = _print_whole(terminal, result, extract=question.extract, code=args.code)
    if result.tool_calls and not args.json:
        terminal.text(calls(result.tool_calls))
    if result.unparsed:
        terminal.note(f"mlxbc: a tool call was cut off or made no sense: {result.unparsed[0]}")
    if result.reason == "length":
        cut = f"mlxbc: stopped after {result.usage.generated} tokens; -o max_tokens N allows more"
        if any(question.fields.get(form) is not None for form in _FORMS):
            # Whoever reads it counts on the form.
            terminal.report(f"{cut}: so far the answer has not the form that was asked for")
            code = code or exits.FAILED
        else:
            terminal.note(cut)
    if args.stats:
        terminal.report(answer.stats(result))
    question.keep(result)
    return answer.ending(result) or code


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.raw and args.system is not None:
        parser.error("-s needs the chat template that --raw leaves out")
    if args.raw and (args.latest or args.cid is not None):
        parser.error("a conversation needs the chat template that --raw leaves out")
    if args.param and args.template is None:
        parser.error("-p fills the blanks of a template: -t NAME")
    options.check_markdown(parser, args)


def _print_whole(terminal: Terminal, result: Result, *, extract: bool, code: bool) -> int:
    text: str | None = result.text
    if extract or code:
        from mlxbc.cli import fences

        text = fences.code(result.text) if code else fences.first(result.text)
    if text is None:
        exits.explain("there is no block of code in the answer; without -x all of it is printed")
        return exits.FAILED
    terminal.text(text)
    terminal.end_text()
    return exits.OK


def _print_json(result: Result, *, reasoning: bool) -> None:
    if not reasoning:
        result = msgspec.structs.replace(result, reasoning="")
    print(msgspec.json.encode(result).decode())


def _dry_run(fields: dict[str, Any], *, as_json: bool) -> int:
    """Print what the model would see, and how many tokens that is."""
    named = ("messages", "model", "template_options", "tools", "thinking")
    asked = {name: fields[name] for name in named if name in fields}
    with Client(client_name="mlxbc-ask") as client:
        seen = client.render(fields.get("prompt"), **asked)
    if as_json:
        print(msgspec.json.encode({"request": fields, "prompt": seen.text, "tokens": len(seen.tokens)}).decode())
    else:
        terminal = Terminal()
        terminal.text(seen.text)
        terminal.end_text()
        terminal.report(f"{len(seen.tokens)} tokens")
    return exits.OK
