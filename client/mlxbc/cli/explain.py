"""Owns `mlxbc explain`: how a question would be run, and why not otherwise."""

from __future__ import annotations

import argparse

import msgspec

from mlxbc import request, wire
from mlxbc.cli import exits, options
from mlxbc.cli.structure import add_structure, structure
from mlxbc.cli.text import ARGUMENT_HELP, add_files, gather
from mlxbc.client import Client

_EPILOG = f"""\
Takes a text, -f, -s, -m, -o, --raw, --schema, --grammar and --tools as mlxbc
ask does, generates nothing, and prints the plan: the method, whether the
request shares a batch, which features apply and why the others don't, and the
chunks in which the prompt will be processed.

examples:
  mlxbc explain "What is the capital of France?"
  mlxbc explain -o logprobs true --raw "Once upon a time"
  mlxbc explain -f main.c --schema leak.json "Where is the leak?"
  mlxbc explain --json "Hi" | jq .plan.off

{exits.HELP}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Show how a question would be run."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("text", nargs="*", help=ARGUMENT_HELP)
    add_files(parser)
    options.add_system(parser)
    options.add_generation(parser)
    add_structure(parser)
    parser.add_argument("--raw", action="store_true", help="take the text as it is, without the model's chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask for the plan, and print it."""
    parser: argparse.ArgumentParser = args.parser
    fields = options.generation(parser, args, logprobs=True) | structure(parser, args)
    if args.raw and args.system is not None:
        parser.error("-s needs the chat template that --raw leaves out")
    text = gather(parser, args.text, exact=args.raw, files=args.file)
    fields |= {"prompt": text} if args.raw else {"messages": request.conversation(text, args.system)}
    with Client(client_name="mlxbc-explain") as client:
        explained = client.explain(**fields)
    print(msgspec.json.encode(explained).decode() if args.json else "\n".join(lines(explained)))
    return exits.OK


def lines(explained: wire.Explained) -> list[str]:
    """The plan for a person."""
    plan = explained.plan
    share = {
        "continuous": "in one batch with others",
        "alone": f"alone: {plan.reason}",
        "unsupported": f"not at all: {plan.reason}",
    }[plan.mechanism]
    expected = "not measured yet" if explained.first_token_ms is None else f"{explained.first_token_ms / 1e3:.2f} s"
    facts = {
        "model": explained.model,
        "prompt": f"{explained.prompt} tokens of {explained.context}",
        "priority": explained.priority,
        "method": plan.method,
        "runs": share,
        "chunks": _runs(plan.chunks),
        "first token": f"{expected}, with the machine to itself" if explained.first_token_ms is not None else expected,
    }
    if plan.mechanism == "unsupported":
        for name in ("method", "chunks", "first token"):  # what will not be has none
            del facts[name]
    facts |= dict.fromkeys(plan.on, "yes") | {name: f"no: {reason}" for name, reason in plan.off.items()}
    if plan.drafters:
        facts["drafts"] = f"yes: {', '.join(plan.drafters)}"
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def _runs(chunks: list[int]) -> str:
    """Equal chunks in a row, counted."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][0] == chunk:
            runs[-1] = (chunk, runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return " + ".join(f"{count} x {chunk}" if count > 1 else str(chunk) for chunk, count in runs)
