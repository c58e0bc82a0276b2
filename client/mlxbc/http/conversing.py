"""Owns what OpenAI's messages, tools and formats are on our wire, or why they are nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from mlxbc import wire
from mlxbc.http.asked import Chat, Message, Part, ToolCall
from mlxbc.http.failures import Refused
from mlxbc.misfit import said

_EFFORTS: Final[Mapping[str, dict[str, Any]]] = {
    "none": {"thinking": False},
    "minimal": {"thinking": True, "thinking_budget": 256},
    "low": {"thinking": True, "thinking_budget": 1024},
    "medium": {"thinking": True, "thinking_budget": 4096},
    "high": {"thinking": True},
    "xhigh": {"thinking": True},
}
"""OpenAI's words for how long to think, as tokens."""


def messages(given: Sequence[Message]) -> list[wire.Message]:
    """The conversation.

    Raises:
        Refused: it has parts that the daemon doesn't take.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def tools(body: Chat) -> dict[str, Any]:
    """The fields about tools.

    Raises:
        Refused: they can't be had as asked for.
    """
    if not body.tools:
        if body.tool_choice not in (None, "none", "auto"):
            raise refused("tool_choice", "tool_choice needs tools")
        return {}
    fields: dict[str, Any] = {"tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]}
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body.tool_choice)
    if body.parallel_tool_calls is False and (body.n or 1) > 1:
        raise refused("parallel_tool_calls", "one call at a time needs one choice: leave n or parallel_tool_calls out")
    return fields


def response_format(wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that hold a response to its format.

    Raises:
        Refused: there is no such format.
    """
    match wanted:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            for name in rest:
                if name not in ("name", "strict"):
                    raise refused(
                        f"response_format.json_schema.{str(name)[:40]}", "only name, schema and strict are understood"
                    )
            return {"schema": schema}
    raise refused(
        "response_format", "response_format is text, json_object, or json_schema with a schema in its json_schema"
    )


def effort(wanted: str | None) -> dict[str, Any]:
    """The fields about reasoning.

    Raises:
        Refused: there is no such effort.
    """
    if wanted is None:
        return {}
    if wanted not in _EFFORTS:
        raise refused("reasoning_effort", f"reasoning_effort is one of {', '.join(_EFFORTS)}")
    return dict(_EFFORTS[wanted])


def prediction(given: Mapping[str, Any] | None) -> str | None:
    """What the client thinks the answer will be like.

    Raises:
        Refused: that is no text.
    """
    match given:
        case None:
            return None
        case {"type": "content", "content": str(text)}:
            return text or None
        case {"type": "content", "content": list(parts)}:
            try:
                return _text(msgspec.convert(parts, list[Part]), "prediction.content") or None
            except msgspec.ValidationError as error:
                raise refused("prediction.content", said(error, list[Part])) from None
    raise refused("prediction", "a prediction has type content, and a text as its content")


def refused(param: str, message: str) -> Refused:
    """What can't be done, by name."""
    return Refused(message, param=param, code="unsupported_parameter")


def _message(message: Message, at: str) -> wire.Message:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise refused(f"{at}.{name}", f"{name} in messages is not supported")
    if message.role == "function":
        raise refused(f"{at}.role", "messages of role function are not supported; results of calls have the role tool")
    if message.name is not None and message.role != "tool":
        raise refused(f"{at}.name", "chat templates know no names of participants; write it into the content")
    if message.tool_calls and message.role != "assistant":
        raise refused(f"{at}.tool_calls", "only assistant messages have tool calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise refused(f"{at}.tool_call_id", "only tool messages answer a call")
    if message.content is None and not message.tool_calls:
        raise refused(f"{at}.content", "a message needs content")
    return wire.Message(
        role="system" if message.role == "developer" else message.role,
        content=_text(message.content, f"{at}.content"),
        tool_calls=[_past(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _past(call: ToolCall, at: str) -> wire.PastCall:
    if call.type != "function" or call.function is None:
        raise refused(at, f"calls of type {call.type[:40]!r} are not supported")
    return wire.PastCall(name=call.function.name, arguments=call.function.arguments or "{}", id=call.id or "")


def _text(content: str | list[Part] | None, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    pieces = []
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise refused(f"{at}[{i}]", f"content of type {part.type[:40]!r} is not supported; send text")
        pieces.append(part.text)
    return "".join(pieces)


def _tool(tool: Mapping[str, Any], at: str) -> wire.Tool:
    match tool:
        case {"type": "function", "function": dict(function)}:
            if function.get("strict"):
                raise refused(f"{at}.function.strict", "arguments are not held to their schema; leave strict out")
            kept = {name: value for name, value in function.items() if name != "strict" and value is not None}
            try:
                return msgspec.convert({"function": kept}, wire.Tool)
            except msgspec.ValidationError as error:
                raise refused(f"{at}.function", said(error, wire.Tool).replace("$.function", "$")) from None
    raise refused(at, "a tool is a function: type function, and its definition as function")


def _choice(choice: str | Mapping[str, Any]) -> str:
    match choice:
        case "none" | "auto" | "required":
            return choice
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise refused("tool_choice", "tool_choice is none, auto, required, or names one function")
