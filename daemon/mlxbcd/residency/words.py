"""Owns a model's words: its tokenizer and chat template, and how it writes calls and fills in middles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxbcd.model import tool_parsers
from mlxbcd.text.fim import FimStyle, find
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer
from mlxbcd.text.tools import ToolFormat


@dataclass(frozen=True, slots=True)
class Words:
    """What text work needs to know of one model. Immutable, for any thread.

    Attributes:
        calls: how it writes tool calls; None if they can't be told from text.
        fim: how it is asked to fill in a middle; None if it has no tokens for that.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    calls: ToolFormat | None = None
    fim: FimStyle | None = None

    @classmethod
    def load(cls, directory: Path) -> Words:
        """The words of a model directory.

        Raises:
            ServeError: load_failed, with what to do.
        """
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        parser = tool_parsers.find(tokenizer.tool_parser, tokenizer.chat_template, tokenizer.vocabulary)
        calls = None
        if parser is not None:
            calls = ToolFormat(parser.name, parser.opening, parser.closing, parser.parse)
            tokenizer = tokenizer.showing(parser.marks(tokenizer.specials))
        return cls(tokenizer, template, calls, find(tokenizer))
