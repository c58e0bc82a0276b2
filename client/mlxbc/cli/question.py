"""Owns what `mlxbc ask` asks: the text, a template, a conversation to go on with, and options make one request."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mlxbc import request, wire
from mlxbc.cli import exits, options
from mlxbc.cli.structure import structure
from mlxbc.cli.text import gather
from mlxbc.result import Result

if TYPE_CHECKING:
    from mlxbc.cli.conversations import Conversation


def add_template(parser: argparse.ArgumentParser) -> None:
    """Add -t, -p and --save."""
    parser.add_argument("-t", "--template", metavar="NAME", help="ask as this template says")
    parser.add_argument(
        "-p",
        "--param",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "TEXT"),
        help="fill a blank of the template; may be repeated",
    )
    parser.add_argument("--save", metavar="NAME", help="keep all this as a template, and ask nothing")


def add_conversation(parser: argparse.ArgumentParser) -> None:
    """Add -c, --cid, --log and --no-log."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-c", "--continue", dest="latest", action="store_true", help="go on with the last conversation")
    which.add_argument("--cid", metavar="ID", help="go on with this conversation; mlxbc log lists them")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument("--log", action="store_true", help="keep the conversation, so that -c can go on with it")
    keep.add_argument("--no-log", action="store_true", help="don't, even if mlxbc log is on")


def earlier(args: argparse.Namespace) -> Conversation | None:
    """The conversation that the arguments go on with, if they do.

    Raises:
        ConfigError: it is not there.
    """
    if args.cid is None and not args.latest:
        return None
    from mlxbc.cli import conversations

    return conversations.latest() if args.cid is None else conversations.find(args.cid)


def begun(args: argparse.Namespace) -> Conversation | None:
    """A conversation for what begins here, if it is to be kept.

    To be asked when the answer is there: where nothing is kept, finding that out takes longer than asking did.
    """
    from mlxbc.cli import conversations

    return conversations.new() if not args.no_log and (args.log or conversations.always()) else None


class Question:
    """One question, ready to be asked.

    Attributes:
        fields: of the `generate` request.
        extract: of the answer, its first block of code is wanted.
    """

    def __init__(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        self.fields: dict[str, Any] = options.generation(parser, args, logprobs=args.json)
        form = structure(parser, args)
        if form and args.save is not None:
            parser.error(f"a template keeps no {', '.join(form)}: give that when you ask with it")
        self.fields |= form
        self.extract: bool = args.extract
        self._raw: bool = args.raw
        self._args = args
        self._text = gather(
            parser, args.text, exact=args.raw, files=args.file, optional=bool(args.template or args.save)
        )
        self._system: str | None = args.system
        if args.save is not None:
            return
        if args.template is not None:
            self._fill(args)
        if not self._text:
            parser.error("there is no text: give one, or pipe one in")
        if args.code:
            from mlxbc.cli.fences import CODE_ONLY

            self._system = CODE_ONLY if self._system is None else f"{self._system}\n\n{CODE_ONLY}"
        self._conversation = earlier(args)
        if self._raw:
            if self._system is not None:
                parser.error("a system prompt needs the chat template that --raw leaves out")
            self.fields["prompt"] = self._text
        elif self._conversation is None:
            self.fields["messages"] = request.conversation(self._text, self._system)
        else:
            before = self._conversation.messages(self._system)
            self.fields["messages"] = [*before, wire.Message(role="user", content=self._text)]
            self.fields.setdefault("session", self._conversation.cid)
            if self._conversation.model is not None:
                self.fields.setdefault("model", self._conversation.model)

    def keep(self, result: Result) -> None:
        """Write the question and its answer to the log, if they are to be kept.

        Raises:
            ConfigError: that can't be done.
        """
        conversation = self._conversation or begun(self._args)
        if conversation is None or self._args.no_log:
            return
        from mlxbc.cli.conversations import turn

        conversation.add(turn(self._text, result, system=self._system, raw=self._raw))

    def save(self, name: str) -> int:
        """Keep all this as a template; the exit code."""
        from mlxbc.cli import template as templates

        model = self.fields.pop("model", None)
        template = templates.Template(
            prompt=self._text, system=self._system, model=model, extract=self.extract, options=self.fields
        )
        path = templates.save(name, template)
        exits.tell(f"kept as {path}; ask with: mlxbc ask -t {name}")
        return exits.OK

    def _fill(self, args: argparse.Namespace) -> None:
        from mlxbc.cli import template as templates

        template = templates.load(args.template)
        self._text, system = templates.fill(template, self._text, dict(args.param))
        self._system = system if self._system is None else self._system
        self.extract = self.extract or template.extract
        self.fields = {**template.options, **self.fields}
        if template.model is not None:
            self.fields.setdefault("model", options.model_name(template.model))
