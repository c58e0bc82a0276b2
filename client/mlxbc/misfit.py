"""Owns what is said of a value that fits no field: msgspec's words, and where it is one of a few, which these are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from msgspec import inspect

_AT: Final = re.compile(r"^Invalid (?:enum )?value .* - at `\$(?P<path>[^`]*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[[^\]]*\]")


def said(error: Exception, kind: Any, tag: str | None = None) -> str:
    """What is wrong, in a line.

    Args:
        error: what msgspec raised when it made a value of `kind`.
        kind: the type that was expected.
        tag: of a union's messages, the one that it was to be.
    """
    message = str(error)
    found = _AT.match(message) or re.match("Invalid enum value [^`]*$(?P<path>)", message)
    if found is None:
        return message
    from msgspec import inspect

    steps = [step[1] for step in _STEP.finditer(found["path"])]
    values = dict.fromkeys(str(value) for value in _values(inspect.type_info(kind), steps, tag))
    return f"{message}; it is one of {', '.join(values)}" if values else message


def _values(info: inspect.Type, steps: list[str | None], tag: str | None) -> Iterator[object]:
    """What a type lets stand at the end of a path: names of fields, and None for a place in a container."""
    from msgspec import inspect

    match info:
        case inspect.Metadata(type=inner):
            yield from _values(inner, steps, tag)
        case inspect.UnionType(types=kinds):
            for one in kinds:
                yield from _values(one, steps, tag)
        case inspect.LiteralType(values=values) if not steps:
            yield from values
        case inspect.StructType(tag_field=str(name), tag=mine) if steps and name == steps[0]:
            yield mine
        case inspect.StructType(tag=mine, fields=fields) if steps and (tag is None or mine is None or mine == tag):
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from _values(field.type, steps[1:], None)
        case inspect.DictType(value_type=inner) | inspect.ListType(item_type=inner) if steps and steps[0] is None:
            yield from _values(inner, steps[1:], tag)
