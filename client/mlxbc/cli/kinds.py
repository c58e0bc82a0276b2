"""Owns what is said of the values that an option takes: a number from 0 to 10, one of none, ram, disk.

Imported only once there was another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec import inspect

_SHOWN: Final = 60


def misfit(kind: Any, text: str) -> str:
    """What `text` should have been instead, for a field of a message that has the type `kind`."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"is {' or '.join(_described(inspect.type_info(kind)))}, not {shown!r}"


def _described(info: inspect.Type) -> Iterator[str]:
    match info:
        case inspect.Metadata(type=inner):
            yield from _described(inner)
        case inspect.UnionType(types=kinds):
            for one in kinds:
                if not isinstance(one, inspect.NoneType):
                    yield from _described(one)
        case inspect.BoolType():
            yield "true or false"
        case inspect.IntType():
            yield f"a whole number{_between(info)}"
        case inspect.FloatType():
            yield f"a number{_between(info)}"
        case inspect.LiteralType(values=values):
            yield f"one of {', '.join(map(str, values))}"
        case inspect.StrType(min_length=least, max_length=most):
            yield "text" + _up_to(least, most, "character")
        case inspect.ListType(item_type=item, max_length=most):
            yield " or ".join(_described(item)) + (f", given {most} times at most" if most else "")
        case inspect.DictType(key_type=key, value_type=value):
            parts = [
                f"{' or '.join(_described(part))} as each {name}"
                for name, part in (("key", key), ("value", value))
                if not isinstance(part, inspect.AnyType) and part != inspect.StrType()
            ]
            yield "a JSON object" + (f" with {' and '.join(parts)}" if parts else "")
        case _:
            yield "something else"


def _between(info: inspect.IntType | inspect.FloatType) -> str:
    least, above = _number(info.ge), _number(info.gt)
    most = _number(info.le)
    if above:
        return f" above {above}" + (f", at most {most}" if most else "")
    if least and most:
        return f" from {least} to {most}"
    return (f" from {least} on" if least else "") + (f" of {most} at most" if most else "")


def _number(bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{int(bound):,}" if bound == int(bound) else str(bound)


def _up_to(least: int | None, most: int | None, unit: str) -> str:
    if most is None:
        return f" of a {unit} or more" if least else ""
    return f" of {least or 0:,} to {most:,} {unit}s"
