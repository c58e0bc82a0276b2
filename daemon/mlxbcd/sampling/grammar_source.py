"""Owns a grammar as it was asked for: how llguidance spells it, and what is wrong with it where. Touches no MLX."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
from llguidance import LLMatcher

from mlxbcd.errors import ServeError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind: TypeAlias = Literal["schema", "grammar", "regex", "choice"]
"""A field of the wire."""
Path: TypeAlias = tuple[str | int, ...]
"""The keys and indices that lead to a part of a JSON value."""

LONGEST_SOURCE: Final = 256 * 1024
"""Characters of one grammar. Compiling the worst of this length takes seconds, and tens of megabytes."""
MOST_BEGINNINGS: Final = 40_000
"""Bytes of one list of choices, common beginnings counted once. Each is a state of the lexer that reads them, which has
to have room for all: requests share it, so what one has visited stays."""
_LONGEST_MESSAGE: Final = 300
_SEARCH_S: Final = 1.0
"""Seconds that parts of a schema are compiled to find the one at fault."""

_JSON: Final[JsonCompileOptions] = {"whitespace_pattern": r" |\r?\n[ \t]{0,40}"}
"""A space, or a new line and its indentation: where any white space may come, a model in doubt writes nothing else."""
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then")
_LISTED: Final = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_SHARED: Final = ("$defs", "definitions")
"""What references point into: a part of a schema is compiled together with these."""

_IN_LARK: Final = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_IN_REGEX: Final = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\n(?:error: )?(.*)")


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as it was asked for.

    Attributes:
        text: JSON text of a schema, the text of a Lark grammar or a regular expression, or JSON text of a list of
            choices.
    """

    kind: Kind
    text: str

    def __repr__(self) -> str:
        return f"Source({self.kind}, {len(self.text)} characters)"

    @classmethod
    def of_schema(cls, schema: Any) -> Source:
        """A JSON schema as plain data."""
        return cls("schema", _json("schema", schema))

    @classmethod
    def of_choices(cls, choices: list[str]) -> Source:
        """One of several texts."""
        return cls("choice", _json("choice", choices))

    def spell(self) -> str:
        """What llguidance compiles.

        Raises:
            ServeError: grammar_invalid, it is too long, or has too much to choose from.
        """
        if len(self.text) > LONGEST_SOURCE:
            problem = f"has {len(self.text)} characters; {LONGEST_SOURCE} are the most a grammar may have"
            raise ServeError("grammar_invalid", f"the {self.kind} {problem}")
        match self.kind:
            case "schema":
                text = "{}" if self.text == "true" else self.text
                return LLMatcher.grammar_from_json_schema(text, defaults=_JSON if text.startswith("{") else None)
            case "grammar":
                return LLMatcher.grammar_from_lark(self.text)
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "choice":
                return LLMatcher.grammar_from_lark(_alternatives(msgspec.json.decode(self.text, type=list[str])))

    def refusal(self, problem: str) -> ServeError:
        """The error for a client: llguidance's `problem`, and the place where it can be told.

        The place is a JSON pointer into a schema (`at`), a line and a column of a grammar, or a column of a regular
        expression, all counted from 1.
        """
        if self.kind == "schema":
            at = "#" + "".join(f"/{_escaped(key)}" for key in _place(json.loads(self.text), _core(problem)))
            return _refusal(f"the schema can't be used: {_shorten(_gist(problem))}, at {_shorten(at)}", at=at)
        if self.kind == "regex" and "\n" not in self.text and (found := _IN_REGEX.search(problem)):
            column = len(found[1]) + 1
            return _refusal(f"the regex can't be used: {_shorten(found[2])}, at column {column}", column=column)
        where = _IN_LARK.match(problem)
        said = _shorten(_gist(problem[where.end() if where else 0 :]))
        if self.kind == "grammar" and where:
            line, column = int(where[1]), int(where[2])
            message = f"the grammar can't be used: {said}, at line {line}, column {column}"
            return _refusal(message, line=line, column=column)
        return _refusal(f"the {self.kind} can't be used: {said}")


def lark_string(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    # Lark's lexer takes no DEL as it is, and neither does it take raw control characters, which JSON escapes.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _alternatives(choices: list[str]) -> str:
    """A Lark grammar of one of these.

    They make one terminal, which the lexer reads however many there are: alternatives of a rule would fill a row of the
    parser, which takes 2,000.
    """
    beginnings = _beginnings([choice.encode() for choice in choices])
    if beginnings > MOST_BEGINNINGS:
        raise _refusal(
            f"the choices have {beginnings} bytes, common beginnings counted once; {MOST_BEGINNINGS} are the most: "
            "give fewer of them, or shorter ones"
        )
    return "start: CHOICE\nCHOICE: " + " | ".join(map(lark_string, dict.fromkeys(choices)))


def _beginnings(texts: list[bytes]) -> int:
    """How many different texts, the empty one left out, one of these begins with."""
    ordered = sorted(texts)
    return sum(map(len, ordered)) - sum(starmap(_in_common, pairwise(ordered)))


def _in_common(one: bytes, other: bytes) -> int:
    """How many bytes two texts both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _json(kind: Kind, value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(f"the {kind} is no JSON value ({type(error).__name__}); send plain data") from None


def _refusal(message: str, **place: Any) -> ServeError:
    return ServeError("grammar_invalid", message, **place)


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


def _core(problem: str) -> str:
    """A problem with a schema, without the references that led to it."""
    return problem.partition("\n  while processing ")[0]


def _gist(problem: str) -> str:
    """The line of a problem that says what it is."""
    lines = _core(problem).split("\n")
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _escaped(key: str | int) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


def _place(schema: Any, problem: str) -> Path:
    """The path to the smallest part of a schema that has the same problem on its own."""
    path: Path = ()
    shared = {key: schema[key] for key in _SHARED if key in schema} if isinstance(schema, dict) else {}
    part, followed = schema, set[Path]()
    until = time.monotonic() + _SEARCH_S
    while isinstance(part, dict):
        for step, inner in _parts(part, shared):
            if time.monotonic() > until:
                return path
            if _target(inner) in followed:
                continue
            if _core(LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(shared | inner))) == problem:
                if (target := _target(part)) is not None:
                    followed.add(target)
                    path = ()
                path, part = path + step, inner
                break
        else:
            return path
    return path


def _target(schema: dict[str, Any]) -> Path | None:
    """The path that a reference to a shared part stands for; None for any other schema."""
    match str(schema.get("$ref")).split("/"):
        case ["#", key, name] if key in _SHARED:
            return key, name
    return None


def _parts(schema: dict[str, Any], shared: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The schemas directly within a schema, with the path to each; what it refers to, from the root, included."""
    if (target := _target(schema)) is not None:
        found = shared.get(str(target[0]), {}).get(target[1])
        if isinstance(found, dict):
            yield target, found
        return
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, str(name)), part) for name, part in named.items() if isinstance(part, dict))
    for key in _SINGLE:
        if isinstance(single := schema.get(key), dict):
            yield (key,), single
    for key in _LISTED:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, i), part) for i, part in enumerate(listed) if isinstance(part, dict))
