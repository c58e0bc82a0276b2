"""Owns `mlxbc chat`: a conversation in a terminal, or one question a line from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from mlxbc import wire
from mlxbc.cli import answer, exits, options
from mlxbc.cli.terminal import Terminal
from mlxbc.client import Client
from mlxbc.errors import MlxbcError

_COMMANDS = """\
  /clear       forget the conversation
  /bye         leave, as Ctrl-D does
  /help        show this
  \"\"\"          begin and end a message of several lines
"""

_EPILOG = f"""\
Ctrl-C ends an answer and stays in the conversation, with what came of it;
pressed again, it leaves. Input that is not a terminal is read as one message a
line, up to the first failure; standard output carries the answers alone.

at the prompt:
{_COMMANDS}
examples:
  mlxbc chat
  mlxbc chat -m smollm2 -s "You are a patient teacher." -o temperature 0.7
  printf 'My name is Ada.\\nWhat is my name?\\n' | mlxbc chat

{exits.HELP}"""


class _Leave(Exception):
    """Ctrl-C, and nothing left to stay for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Talk with a model. The conversation is kept in memory and ends with the program."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    options.add_system(parser)
    options.add_generation(parser)
    parser.add_argument(
        "--stats",
        action="store_true",
        help="print token counts and times after each answer to standard error",
    )
    parser.add_argument("-R", "--hide-reasoning", action="store_true", help="don't show what the model thinks")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress and no notes")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends."""
    fields = options.generation(args.parser, args)
    chat = _Chat(args, fields, Terminal(quiet=args.quiet, reasoning=not args.hide_reasoning))
    with Client(client_name="mlxbc-chat"):
        pass  # without a daemon, say so before the first question is typed
    try:
        for message in _messages(chat):
            chat.take(message)
    except _Leave:
        return exits.INTERRUPTED
    return exits.OK


class _Chat:
    """A conversation: its history and how it goes on."""

    def __init__(self, args: argparse.Namespace, fields: dict[str, Any], terminal: Terminal) -> None:
        self.terminal = terminal
        self.attended = sys.stdin is not None and sys.stdin.isatty()
        self.interrupted = False
        self._fields = fields
        self._stats: bool = args.stats
        self._start = [wire.Message(role="system", content=args.system)] if args.system is not None else []
        self._history: list[wire.Message] = list(self._start)

    def take(self, message: str) -> None:
        """Answer a message, or obey a command."""
        self.interrupted = False
        if message.strip() == "/clear":
            self._history = list(self._start)
        elif message.strip() == "/help":
            self.terminal.note(_COMMANDS.rstrip("\n"))
        elif message.strip():
            self._answer(message)

    def interrupt(self) -> None:
        """Ctrl-C with nothing to cancel.

        Raises:
            _Leave: it was the second one in a row.
        """
        self.terminal.note("")
        if self.interrupted:
            raise _Leave
        self.interrupted = True
        self.terminal.note("(Ctrl-C again, Ctrl-D or /bye leaves)")

    def _answer(self, message: str) -> None:
        question = wire.Message(role="user", content=message)
        try:
            # A connection for each turn: a conversation outlives a restart of the daemon.
            with (
                Client(client_name="mlxbc-chat") as client,
                client.generate(messages=[*self._history, question], **self._fields) as stream,
            ):
                result = answer.follow(stream, self.terminal)
        except MlxbcError as error:
            if not self.attended:
                raise  # the next line of a pipe was written for an answer that never came
            exits.explain(str(error))
            return
        except KeyboardInterrupt:  # before there was an answer to cancel
            if not self.attended:
                raise
            self.interrupt()
            return
        self._history.append(question)
        self._history.append(wire.Message(role="assistant", content=result.text))
        if self._stats:
            self.terminal.report(answer.stats(result))
        if result.reason == "cancelled":
            if not self.attended:
                raise _Leave
            self.interrupted = True


def _messages(chat: _Chat) -> Iterator[str]:
    """What the user says, until the end of input or /bye."""
    if chat.attended:
        import readline  # noqa: F401  (line editing and a history for input())
    while (line := _line(">>> ", chat)) is not None and line.strip() != "/bye":
        if line.lstrip().startswith('"""'):
            line = _block(line.lstrip()[3:], chat)
        yield line


def _block(first: str, chat: _Chat) -> str:
    """The rest of a message that began with three quotes."""
    lines = [first]
    while not lines[-1].rstrip().endswith('"""'):
        line = _line("... ", chat)
        if line is None:
            break
        lines.append(line)
    text = "\n".join(lines).rstrip()
    return text.removesuffix('"""').strip("\n")


def _line(prompt: str, chat: _Chat) -> str | None:
    """One line of input without its end, or None at the end of input."""
    while True:
        try:
            if not chat.attended:
                line = sys.stdin.readline() if sys.stdin is not None else ""
                return line.rstrip("\n") if line else None
            if sys.stdout.isatty():
                return input(prompt)
            # input() would write its prompt to standard output, where only answers belong.
            sys.stderr.write(prompt)
            sys.stderr.flush()
            return input()
        except EOFError:
            chat.terminal.note("")
            return None
        except KeyboardInterrupt:
            if not chat.attended:
                raise
            chat.interrupt()
