"""Owns the way to mlx-lm's parsers of tool calls: which one a model's calls need, imported without its package root."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from mlxbcd.model import zoo

Parse: TypeAlias = Callable[[str, list[dict[str, Any]] | None], Any]
"""From the text between the markers, and the tools there are, to one call or a list of them; raises if it can't."""

_PACKAGE: Final = "mlx_lm.tool_parsers"
_CHOOSES: Final = "_infer_tool_parser"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """How one kind of models writes tool calls.

    Attributes:
        name: mlx-lm's module.
        opening: text before a call, or before several.
        closing: text after it; empty where the end of the turn is the only mark.
    """

    name: str
    opening: str
    closing: str
    parse: Parse

    def marks(self, tokens: Iterable[str]) -> set[str]:
        """Those of a vocabulary's tokens that the parser has to see in the text."""
        source = _source(self.parse)
        return {
            token
            for token in tokens
            if token in self.opening or token in self.closing or token in source or re.escape(token) in source
        }


def names() -> list[str]:
    """Every parser that this mlx-lm has."""
    return sorted(path.stem for path in _directory().glob("*.py") if path.stem != "__init__")


def get(name: str) -> ToolParser:
    """A parser by its name.

    Raises:
        KeyError: mlx-lm has none of that name.
    """
    if name not in names():
        raise KeyError(name)
    module = importlib.import_module(f"{_PACKAGE}.{name}")
    return ToolParser(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def find(declared: object, chat_template: str | None, vocabulary: Mapping[str, int]) -> ToolParser | None:
    """The parser for a model, or None if its calls can't be told from text.

    Args:
        declared: `tool_parser_type` of tokenizer_config.json, if it has one; else mlx-lm's own guess decides.
        vocabulary: ids by token.
    """
    name: Any = declared or _choose()(SimpleNamespace(chat_template=chat_template, get_vocab=lambda: vocabulary))
    try:
        return get(name)
    except KeyError:
        return None


def _directory() -> Path:
    return zoo.bind().parent / "tool_parsers"


@cache
def _choose() -> Callable[[Any], Any]:
    """mlx-lm's function that guesses a parser, taken from its source: importing the module imports transformers."""
    tree = ast.parse((zoo.bind().parent / "tokenizer_utils.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    wanted, names = [functions[_CHOOSES]], {_CHOOSES}
    for function in wanted:
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in functions and node.id not in names:
                names.add(node.id)
                wanted.append(functions[node.id])
    namespace: dict[str, Any] = {}
    exec(compile(ast.Module(list(wanted), []), "tokenizer_utils.py", "exec"), namespace)
    choose: Callable[[Any], Any] = namespace[_CHOOSES]
    return choose


@cache
def _source(parse: Parse) -> str:
    """Source of the module that really holds a parser: one may lend its own to another."""
    path = sys.modules[parse.__module__].__file__
    assert path is not None
    return Path(path).read_text(encoding="utf-8")
