"""Owns turning arguments into request messages, so that a mistake is found before anything is sent.

The wire's Structs are the only list of fields and ranges: both clients take any field of `wire.Generate` by
its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from mlxbc import wire
from mlxbc.errors import BadRequest
from mlxbc.misfit import said

MessageLike: TypeAlias = wire.Message | Mapping[str, str]
"""A chat message: `wire.Message`, or a mapping with `role` and `content`."""
Numbered: TypeAlias = (
    wire.Generate
    | wire.Explain
    | wire.Tokenize
    | wire.Count
    | wire.Models
    | wire.Load
    | wire.Unload
    | wire.Status
    | wire.Ps
    | wire.Watch
    | wire.Trace
    | wire.Config
    | wire.Probe
    | wire.Prime
    | wire.Cache
    | wire.CacheClear
    | wire.Ping
    | wire.Shutdown
)
"""The requests that are answered under their own id."""
T = TypeVar("T", bound=Numbered)


G = TypeVar("G", wire.Generate, wire.Explain, wire.Prime)


def generate(
    kind: type[G], number: int, prompt: str | None, messages: Sequence[MessageLike] | None, fields: dict[str, Any]
) -> G:
    """A `generate`, `explain` or `prime` request from exactly one prompt form (`fim` is a field) and any other fields.

    Raises:
        BadRequest: both or neither prompt form, an unknown field, or a value out of range.
    """
    if sum(source is not None for source in (prompt, messages, fields.get("fim"))) != 1:
        raise BadRequest("give exactly one of prompt (raw text), messages (a chat) and fim (a place in a file)")
    return build(kind, number, prompt=prompt, messages=messages, **fields)


def tokens(
    kind: type[T],
    number: int,
    text: str | None,
    messages: Sequence[MessageLike] | None,
    fields: dict[str, Any],
) -> T:
    """A `tokenize` or `count` request.

    Raises:
        BadRequest: as for `generate`.
    """
    if (text is None) == (messages is None):
        raise BadRequest("give exactly one of text and messages (a chat)")
    return build(kind, number, text=text, messages=messages, **fields)


def build(kind: type[T], number: int, /, **fields: Any) -> T:
    """A checked request of one kind; constructing a Struct by hand would check nothing.

    Raises:
        BadRequest: an unknown field, or a value of the wrong type or out of range.
    """
    if reserved := fields.keys() & {"id", "type"}:
        raise BadRequest(f"{reserved.pop()} is chosen by the client, not by its caller")
    if messages := fields.get("messages"):
        fields["messages"] = [m if isinstance(m, wire.Message) else dict(m) for m in messages]
    try:
        return msgspec.convert({**fields, "id": number}, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(said(error, kind)) from None


def conversation(text: str, system: str | None) -> list[wire.Message]:
    """The messages of a chat that begins with `text`."""
    user = wire.Message(role="user", content=text)
    return [user] if system is None else [wire.Message(role="system", content=system), user]
