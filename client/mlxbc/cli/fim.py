"""Owns `mlxbc fim`: what belongs at a place in a file."""

from __future__ import annotations

import argparse
import os
import re
import sys

import msgspec

from mlxbc import wire
from mlxbc.cli import answer, exits, options
from mlxbc.cli.terminal import Terminal
from mlxbc.client import Client

_EPILOG = f"""\
LINE and COLUMN count from 1, as compilers and editors do: the text goes in
before that character. Without a column it goes at the line's end, and without a
line at the end of the file. A FILE of - is standard input; --path then says
what it would be called.

A model that was trained to fill in the middle sees what is before and after the
place; any other only goes on from what is before it. Files of -c are shown to
it as well, what matters most last.

Standard output carries the new text and nothing else, or with --insert the
whole file with it.

examples:
  mlxbc fim main.py:12:9
  mlxbc fim --single-line -c util.py main.py:12
  mlxbc fim --insert main.py:12 >new.py
  mlxbc fim --path notes.md - <notes.md

{exits.HELP}"""

_PLACE = re.compile(r"(?P<file>.+?)(?::(?P<line>\d+)(?::(?P<column>\d+))?)?", re.DOTALL)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Write on at a place in a file; the new text streams to standard output."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    parser.add_argument("place", metavar="FILE[:LINE[:COLUMN]]", help="where the text goes; - is standard input")
    parser.add_argument(
        "-c", "--context", action="append", default=[], metavar="FILE", help="another file to show; may be repeated"
    )
    parser.add_argument("-1", "--single-line", action="store_true", help="end at the end of the line")
    parser.add_argument("--path", metavar="NAME", help="what the file is called (default: its own name)")
    parser.add_argument("--language", default="", metavar="NAME", help="its language (default: by its name)")
    options.add_generation(parser)
    parser.add_argument("--insert", action="store_true", help="print the whole file, with the new text in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object: text, reason, usage, timings, ...")
    parser.add_argument("--stats", action="store_true", help="print token counts and times to standard error")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no notes")


def run(args: argparse.Namespace) -> int:
    """Complete, and show the text."""
    parser: argparse.ArgumentParser = args.parser
    fields = options.generation(parser, args, logprobs=args.json)
    prefix, suffix, name = _at(parser, args.place)
    fim = wire.Fim(
        prefix=prefix,
        suffix=suffix,
        path=name if args.path is None else args.path,
        language=args.language,
        context=[wire.Excerpt(text=_read(parser, path), path=path) for path in args.context],
        single_line=args.single_line,
    )
    terminal = Terminal(quiet=args.quiet)
    streaming = not (args.json or args.insert)
    connected = Client(client_name="mlxbc-fim", on_starting=terminal.starting)
    with connected as client, client.generate(fim=fim, **fields) as stream:
        result = answer.follow(stream, terminal, streaming=streaming)
    if args.json:
        print(msgspec.json.encode(result).decode())
    elif args.insert:
        sys.stdout.write(prefix + result.text + suffix)
    if args.stats:
        terminal.report(answer.stats(result))
    return answer.ending(result)


def _at(parser: argparse.ArgumentParser, place: str) -> tuple[str, str, str]:
    """The text before a place, the text after it, and the file's name."""
    # A file whose own name ends like a place is taken by its whole name.
    found = None if place == "-" or os.path.exists(place) else _PLACE.fullmatch(place)
    name, line, column = (place, None, None) if found is None else found.group("file", "line", "column")
    text = _read(parser, name)
    offset = _offset(parser, text, *(None if number is None else int(number) for number in (line, column)))
    return text[:offset], text[offset:], "" if name == "-" else name


def _offset(parser: argparse.ArgumentParser, text: str, line: int | None, column: int | None) -> int:
    if line is None:
        return len(text)
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        parser.error(f"there is no line {line}: the file has {len(lines)}")
    begin = sum(len(before) + 1 for before in lines[: line - 1])
    width = len(lines[line - 1].removesuffix("\r"))
    if column is None:
        return begin + width
    if not 1 <= column <= width + 1:
        parser.error(f"there is no column {column}: line {line} has {width} characters")
    return begin + column - 1


def _read(parser: argparse.ArgumentParser, name: str) -> str:
    """A file as it is: its newlines are the text's own."""
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(name, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        parser.error(f"{'standard input' if name == '-' else name} is not UTF-8 text")
    except OSError as error:
        parser.error(f"{name} can't be read: {error.strerror}")
