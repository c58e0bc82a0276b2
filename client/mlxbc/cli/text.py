"""Owns the text that a command works on: standard input, files and the arguments, put together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

ARGUMENT_HELP = "the text; several words need no quotes, and - stands for standard input"


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add -f."""
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file whose text goes before the arguments; may be repeated",
    )


def gather(
    parser: argparse.ArgumentParser,
    words: list[str],
    *,
    exact: bool,
    files: Sequence[str] = (),
    optional: bool = False,
    stdin: bool = True,
) -> str:
    """What standard input holds, unless it is a terminal and no argument is `-`, then the files, then the arguments.

    Args:
        parser: ends the program with a usage error if there is no text, or if it isn't UTF-8.
        words: the arguments.
        exact: every character counts, the last newline of a file too; else the parts become paragraphs.
        files: paths. More than one are headed by their names, unless every character counts.
        optional: no text is fine.
        stdin: standard input is part of it.
    """
    try:
        piped = _stdin() if stdin and _wants_stdin(words) else ""
    except UnicodeDecodeError:
        parser.error("standard input is not UTF-8 text")
    read = [_file(parser, path) for path in files]
    typed = " ".join(word for word in words if word != "-")
    if exact:
        text = "".join([piped, *read, typed])
    else:
        if len(files) > 1:
            read = [f"--- {path}\n{content}" for path, content in zip(files, read, strict=True)]
        text = "\n\n".join(part for part in (*(one.strip("\n") for one in (piped, *read)), typed) if part.strip())
    if not text and not optional:
        parser.error("there is no text: give one, or pipe one in")
    return text


def _wants_stdin(words: list[str]) -> bool:
    return sys.stdin is not None and ("-" in words or not sys.stdin.isatty())


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8")


def _file(parser: argparse.ArgumentParser, path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        parser.error(f"{path} is not UTF-8 text")
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror or error}")
