"""Owns `mlxbc chat`: a conversation in a terminal, or one question a line from a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxbc import wire
from mlxbc.cli import answer, exits, options
from mlxbc.cli.question import add_conversation, begun, earlier
from mlxbc.cli.terminal import Terminal
from mlxbc.cli.text import add_files, gather
from mlxbc.client import Client
from mlxbc.errors import MlxbcError
from mlxbc.result import Result

if TYPE_CHECKING:
    from mlxbc.cli.conversations import Conversation

_COMMANDS = """\
  /clear         forget the conversation
  /retry [T]     another answer to the last message; with T, drawn at that
                 temperature, such as 0.8
  /system TEXT   another system prompt; without TEXT, none
  /model NAME    another model; without NAME, the daemon's own choice
  /exit          leave, as /quit, /bye and Ctrl-D do
  /help          show this
  \"\"\"            begin and end a message of several lines
"""

_WORDS_TO_LEAVE = ("/exit", "/quit", "/bye")

_EPILOG = f"""\
Ctrl-C ends an answer and stays in the conversation, with what came of it;
pressed again, it leaves. Input that is not a terminal is read as one message a
line, up to the first failure; standard output carries the answers alone.

at the prompt:
{_COMMANDS}
The arrow keys bring back what was typed before; where conversations are kept,
that of earlier chats too. Files of -f go with the first message.

examples:
  mlxbc chat
  mlxbc chat -m smollm2 -s "You are a patient teacher." -o temperature 0.7
  mlxbc chat -f notes.md --md
  mlxbc chat -c
  printf 'My name is Ada.\\nWhat is my name?\\n' | mlxbc chat

{exits.HELP}"""


class _Leave(Exception):
    """Ctrl-C, and nothing left to stay for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Talk with a model."
    parser.epilog = _EPILOG
    parser.set_defaults(parser=parser)
    add_files(parser)
    options.add_system(parser)
    options.add_generation(parser)
    add_conversation(parser)
    options.add_keep_alive(parser)
    parser.add_argument("--md", action="store_true", help="show Markdown as a terminal can")
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
    options.check_markdown(args.parser, args)
    files = gather(args.parser, [], exact=False, files=args.file, optional=True, stdin=False)
    chat = _Chat(args, fields, files, Terminal(quiet=args.quiet, reasoning=not args.hide_reasoning))
    with Client(client_name="mlxbc-chat", on_starting=chat.terminal.starting):
        pass  # without a daemon, say so before the first question is typed
    if args.md:
        chat.terminal.render_markdown()
    if chat.attended:
        chat.terminal.note("/help shows what else can be typed; /exit or Ctrl-D leaves")
    try:
        for message in _messages(chat):
            chat.take(message)
    except _Leave:
        return exits.INTERRUPTED
    return exits.OK


class _Chat:
    """A conversation: what was said, and how it goes on.

    Attributes:
        attended: somebody types.
        interrupted: Ctrl-C was the last thing that happened.
        kept: conversations are, and so is what was typed.
    """

    def __init__(self, args: argparse.Namespace, fields: dict[str, Any], files: str, terminal: Terminal) -> None:
        self.terminal = terminal
        self.attended = sys.stdin is not None and sys.stdin.isatty()
        self.interrupted = False
        self._args = args
        # What the daemon keeps of the conversation, it keeps and lets go together.
        self._fields = {"session": f"chat-{os.urandom(8).hex()}", **fields}
        if self.attended:
            self._fields.setdefault("priority", "interactive")
        self._before = files
        self._log: Conversation | None = earlier(args)
        self._history: list[wire.Message] = [] if self._log is None else self._log.messages(None)
        self._system: str | None = args.system
        if self._history and self._history[0].role == "system":
            first = self._history.pop(0)
            self._system = first.content if self._system is None else self._system
        if self._log is not None and self._log.model is not None:
            self._fields.setdefault("model", self._log.model)
        self._log = self._log or begun(args)
        self.kept = self._log is not None and not args.no_log
        if not self.kept:
            self._log = None

    def take(self, message: str) -> None:
        """Answer a message, or obey a command."""
        self.interrupted = False
        name, _, rest = message.strip().partition(" ")
        command = self._commands.get(name)
        if command is not None:
            command(rest.strip())
        elif self.attended and name.startswith("/") and name[1:].isalpha():
            self.terminal.note(f"there is no {name}; /help shows what there is")
        elif message.strip():
            if self._before:
                message, self._before = f"{self._before}\n\n{message}", ""
            self._answer(message)

    @property
    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "/clear": self._clear,
            "/retry": self._retry,
            "/system": self._set_system,
            "/model": self._set_model,
            "/help": lambda _rest: self.terminal.note(_COMMANDS.rstrip("\n")),
        }

    def interrupt(self) -> None:
        """Ctrl-C with nothing to cancel.

        Raises:
            _Leave: it was the second one in a row.
        """
        self.terminal.note("")
        if self.interrupted:
            raise _Leave
        self.interrupted = True
        self.terminal.note("(Ctrl-C again, Ctrl-D or /exit leaves)")

    def _clear(self, _rest: str) -> None:
        self._history = []
        if self._log is not None:
            from mlxbc.cli import conversations

            self._log = conversations.new()

    def _retry(self, rest: str) -> None:
        if len(self._history) < 2:
            self.terminal.note("nothing has been answered yet")
            return
        # The same seed would give the same answer.
        fields = {name: value for name, value in self._fields.items() if name != "seed"}
        if rest:
            try:
                fields |= options.parse([["temperature", rest]])
            except ValueError:
                self.terminal.note("/retry takes a temperature from 0 to 10, or nothing")
                return
        question, before = self._history[-2:]
        self._history = self._history[:-2]
        if self._log is not None:
            self._log.take_back()
        result = self._answer(question.content, fields)
        if result is not None and result.reason != "cancelled" and result.text == before.content:
            self.terminal.note("that is the same answer: these settings take the likeliest words; try /retry 0.8")

    def _set_system(self, rest: str) -> None:
        self._system = rest or None

    def _set_model(self, rest: str) -> None:
        if rest:
            self._fields["model"] = options.model_name(rest)
        else:
            self._fields.pop("model", None)

    def _answer(self, message: str, fields: dict[str, Any] | None = None) -> Result | None:
        """Show the answer to a message, and keep both; None if there was none."""
        question = wire.Message(role="user", content=message)
        system = [] if self._system is None else [wire.Message(role="system", content=self._system)]
        try:
            # A connection for each turn: a conversation outlives a restart of the daemon.
            chosen = self._fields if fields is None else fields
            messages = [*system, *self._history, question]
            connect = partial(Client, client_name="mlxbc-chat")
            with answer.start(connect, self.terminal, messages=messages, **chosen) as stream:
                result = answer.follow(stream, self.terminal)
        except MlxbcError as error:
            if not self.attended:
                raise  # the next line of a pipe was written for an answer that never came
            exits.explain(str(error))
            return None
        except KeyboardInterrupt:  # before there was an answer to cancel
            if not self.attended:
                raise
            self.interrupt()
            return None
        self._history.append(question)
        self._history.append(wire.Message(role="assistant", content=result.text))
        self._keep(message, result)
        if self._args.stats:
            self.terminal.report(answer.stats(result))
        if answer.ending(result) == exits.INTERRUPTED:
            if not self.attended:
                raise _Leave
            self.interrupted = True
        return result

    def _keep(self, message: str, result: Result) -> None:
        if self._log is not None:
            from mlxbc.cli.conversations import turn

            self._log.add(turn(message, result, system=self._system))


def _messages(chat: _Chat) -> Iterator[str]:
    """What the user says, until the end of input or a word that leaves."""
    if chat.attended:
        from mlxbc.cli.typed import history

        with history(kept=chat.kept):
            yield from _typed(chat)
    else:
        yield from _typed(chat)


def _typed(chat: _Chat) -> Iterator[str]:
    while (line := _line(">>> ", chat)) is not None and line.strip() not in _WORDS_TO_LEAVE:
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
