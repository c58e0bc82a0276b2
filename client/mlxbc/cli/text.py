"""Owns the text that a command works on: standard input and the arguments, put together."""

from __future__ import annotations

import argparse
import sys

ARGUMENT_HELP = "the text; several words need no quotes, and - stands for standard input"


def gather(parser: argparse.ArgumentParser, words: list[str], *, exact: bool) -> str:
    """What standard input holds, unless it is a terminal and no argument is `-`, then the arguments.

    Args:
        parser: ends the program with a usage error if there is no text, or if it isn't UTF-8.
        words: the arguments.
        exact: every character counts, the last newline of a file too; else the two parts become paragraphs.
    """
    try:
        piped = _stdin() if _wants_stdin(words) else ""
    except UnicodeDecodeError:
        parser.error("standard input is not UTF-8 text")
    typed = " ".join(word for word in words if word != "-")
    if exact:
        text = piped + typed
    else:
        text = "\n\n".join(part for part in (piped.strip("\n"), typed) if part.strip())
    if not text:
        parser.error("there is no text: give one, or pipe one in")
    return text


def _wants_stdin(words: list[str]) -> bool:
    return sys.stdin is not None and ("-" in words or not sys.stdin.isatty())


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8")
