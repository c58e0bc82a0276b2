"""Owns the sandbox of chat templates: Jinja as the hub's templates expect it, with the size of every step
capped.

A template comes with a model and is not trusted. Jinja's immutable sandbox keeps it from reaching Python's
internals and from changing its inputs; a time limit (`text.deadline`) ends its loops. What neither covers is
one step that alone takes forever or all memory, such as ``"x" * 10**10``. So each operator, string method,
filter and join whose result can be much larger than its operands checks the size first, and raises
`OverLimit`.

Not covered: comparing, sorting or hashing lists that share sublists (``[l, l]`` nested forty times) takes time
exponential in a template's length within one step.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment, Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import do_batch, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

CHARACTERS: Final = 16 * 1024 * 1024
"""Longest string a template may make; its output too."""
ITEMS: Final = 1024 * 1024
"""Longest list a template may make by `*` or `+`."""
INTEGER_BITS: Final = 1 << 16
TOTAL: Final = 16 * CHARACTERS
"""What all steps of one rendering may make together, which bounds its memory."""

_made: ContextVar[int] = ContextVar("made", default=0)


class OverLimit(TemplateError):
    """A step would have made something larger than the sandbox permits."""


class Refusal(TemplateError):
    """The template called `raise_exception`: it can't render these messages, and says why."""


def render(template: Template, variables: dict[str, Any]) -> str:
    """Render with a fresh allowance."""
    _made.set(0)
    return template.render(variables)


def allow(size: int, limit: int = CHARACTERS) -> None:
    """Ask for permission to make a value of a size; raises `OverLimit` if it is, or makes the total, too large."""
    made = _made.get() + max(size, 0)
    if size > limit or made > TOTAL:
        raise OverLimit(f"a value of size {size}, where {limit} is the limit, and {TOTAL} for all values")
    _made.set(made)


def measure(value: object) -> int:
    """About how many characters a value has as text.

    It counts in small steps, as values that share parts can be astronomically long when written out.

    Raises:
        OverLimit: more than `CHARACTERS`.
    """
    if isinstance(value, str):
        return len(value)
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, int):
            total += item.bit_length() // 3 + 1
        elif isinstance(item, str | bytes | Mapping | list | tuple | set | frozenset):
            total += len(item) + 1
        if total > CHARACTERS:
            raise OverLimit(f"a value that has over {CHARACTERS} characters when written out")
        if isinstance(item, Mapping):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    return total


def as_text(value: object) -> str:
    """`str`, of a value that isn't too long."""
    if isinstance(value, str):
        return value
    measure(value)
    return str(value)


def join(parts: Iterable[object], separator: str = "") -> str:
    """The parts as one string.

    Raises:
        OverLimit: it would be longer than `CHARACTERS`.
    """
    texts: list[str] = []
    total = 0
    for part in parts:
        text = as_text(part)
        texts.append(text)
        total += len(text) + len(separator)
        if total > CHARACTERS:
            break
    allow(total)
    return separator.join(texts)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates are compiled in."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join)
    """Jinja's own join, of the output, of blocks, of macros and of ``{% set %}`` bodies."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_printable,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
            "dict": _dict,
        }
        self.filters |= _FILTERS
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja has wrapped str.format already; the method is then one step further in.
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, types.BuiltinMethodType) and isinstance(method.__self__, str | bytes):
            if method.__name__ == "join" and isinstance(method.__self__, str) and len(args) == 1:
                return join(args[0], method.__self__)
            if limit := _STRING_METHODS.get(method.__name__):
                own = {name: value for name, value in kwargs.items() if name not in _JINJA_ARGUMENTS}
                limit(method.__self__, *args, **own)
        return super().call(__context, __obj, *args, **kwargs)


class _CodeGenerator(CodeGenerator):
    """Jinja joins the operands of ``~`` without asking anybody: ask `join`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


Sandbox.code_generator_class = _CodeGenerator


class _GenerationTag(Extension):
    """``{% generation %}`` marks an assistant's words for training; here its body simply renders."""

    tags = {"generation"}  # noqa: RUF012  # as the base has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """``namespace()``, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace can't have an attribute {name!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise Refusal(as_text(message))


def _strftime_now(form: str) -> str:
    allow(len(form), 1024)
    return datetime.now().strftime(form)


def _printable(value: Any) -> Any:
    """What ``{{ … }}`` shows: Jinja makes text of it in one step."""
    if not isinstance(value, str):
        measure(value)
    return value


# -------------------------------------------------------------------------------------------------- operators


def _limit_add(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        allow(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        allow(len(left) + len(right), ITEMS)


def _limit_multiply(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        allow(left.bit_length() + right.bit_length(), INTEGER_BITS)
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(sequence, str | bytes | list | tuple):
            allow(len(sequence) * times, CHARACTERS if isinstance(sequence, str | bytes) else ITEMS)


def _limit_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        allow(left.bit_length() * right, INTEGER_BITS)


def _limit_percent(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes):
        _limit_format(left if isinstance(left, str) else left.decode("latin-1"), "%", right)


_INDIRECT: Final = {"%": re.compile(r"%[^%a-zA-Z]*\*"), "{": re.compile(r"\{[^{}]*\{")}
"""A width that is itself an argument, in both kinds of format string."""
_WIDE: Final = re.compile(r"\d{5}")


def _limit_format(form: str, field: str, values: object) -> None:
    """Widths are limited to four digits that stand in the format itself.

    A value may be used by many fields, so the bound on the whole is generous, but finite.
    """
    if _WIDE.search(form) or _INDIRECT[field].search(form.replace(field * 2, "")):
        raise OverLimit("a width in a format string is over the limit")
    allow(len(form) + form.count(field) * measure(values), 4 * CHARACTERS)


_OPERATORS: Final[dict[str, Callable[[Any, Any], None]]] = {
    "+": _limit_add,
    "*": _limit_multiply,
    "**": _limit_power,
    "%": _limit_percent,
}

# --------------------------------------------------------------------------------------------- string methods


def _limit_width(text: str | bytes, width: int, *_: Any) -> None:
    allow(max(len(text), width))


def _limit_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    allow(len(text) + text.count(old) * len(new))


def _limit_tabs(text: Any, tabsize: int = 8) -> None:
    allow(len(text) + text.count("\t" if isinstance(text, str) else b"\t") * tabsize)


def _limit_translate(text: Any, table: Any, *_: Any, **__: Any) -> None:
    values = table.values() if isinstance(table, Mapping) else ()
    allow(len(text) * max((len(value) for value in values if isinstance(value, str)), default=1))


def _limit_join(text: bytes, parts: Any) -> None:
    raise SecurityError("bytes can't be joined in a chat template")


def _limit_str_format(form: Any, *args: Any, **kwargs: Any) -> None:
    _limit_format(form, "{", [*args, *kwargs.values()])


_STRING_METHODS: Final[dict[str, Callable[..., None]]] = {
    "center": _limit_width,
    "ljust": _limit_width,
    "rjust": _limit_width,
    "zfill": _limit_width,
    "replace": _limit_replace,
    "expandtabs": _limit_tabs,
    "translate": _limit_translate,
    "join": _limit_join,
    "format": _limit_str_format,
    "format_map": _limit_str_format,
}
_JINJA_ARGUMENTS: Final = frozenset({"_loop_vars", "_block_vars"})
"""What compiled templates add to calls inside loops and blocks."""
_UNSAFE_METHODS: Final = frozenset({"to_bytes"})

# ---------------------------------------------------------------------------------------------------- filters


def _center(value: object, width: int = 80) -> str:
    allow(width)
    return as_text(value).center(width)


def _replace(value: object, old: object, new: object, count: int = -1) -> str:
    text, old_text, new_text = as_text(value), as_text(old), as_text(new)
    _limit_replace(text, old_text, new_text)
    return text.replace(old_text, new_text, count)


def _format(value: object, *args: Any, **kwargs: Any) -> str:
    form, values = as_text(value), kwargs or args
    _limit_percent(form, values)
    return form % values


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return join(items, as_text(d))


@pass_environment
def _sum(environment: Sandbox, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    for item in value if attribute is None else map(make_attrgetter(environment, attribute), value):
        _limit_add(start, item)
        start = start + item
    return start


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = as_text(value)
    allow(len(text) + (text.count("\n") + 2) * (len(width) if isinstance(width, str) else width))
    return do_indent(text, width, first, blank)


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterable[Any]:
    allow(linecount, ITEMS)
    return do_batch(value, linecount, fill_with)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model reads it: no HTML escapes, non-ASCII characters as they are."""
    measure(value)
    allow(len(indent) if isinstance(indent, str) else indent or 0, 16)
    allow(measure(separators), 32)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "string": as_text,
    "sum": _sum,
    "tojson": _tojson,
}
_UNBOUNDED_FILTERS: Final = ("pprint", "urlize", "wordwrap")
"""Filters that can't be bounded from outside, and that no chat template needs."""
