"""Owns what a chat template is given: messages with their calls, definitions of tools, the switch for thinking. Pure.

Templates were written for the messages that transformers passes them, which have the arguments of a call as an object.
Some want the JSON text that came over the wire, so both can be made.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from mlxbc import wire
from mlxbcd.errors import unmet

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates let reasoning be turned on and off."""
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


def turns(messages: Sequence[wire.Message], *, parsed: bool = True) -> list[dict[str, Any]]:
    """Messages for a template.

    Args:
        parsed: arguments of calls as objects where they are JSON; else as they came.
    """
    return [_turn(message, parsed) for message in messages]


def has_calls(messages: Sequence[wire.Message]) -> bool:
    """Whether it matters how calls are rendered."""
    return any(message.tool_calls for message in messages)


def definitions(tools: Sequence[wire.Tool]) -> list[dict[str, Any]]:
    """Tools for a template, and for the parser of calls."""
    return [
        {
            "type": tool.type,
            "function": {
                "name": tool.function.name,
                "description": tool.function.description,
                "parameters": tool.function.parameters or _NO_PARAMETERS,
            },
        }
        for tool in tools
    ]


def thinking_options(
    thinking: bool | None, variables: Collection[str], reasoning: tuple[str, str] | None
) -> dict[str, bool]:
    """The template's options for a request that wants thinking, or wants none.

    Args:
        variables: those that the template reads.
        reasoning: the model's markers, if it has any.

    Raises:
        ServeError: bad_request, it can't be had.
    """
    if thinking is None:
        return {}
    if switches := [name for name in _SWITCHES if name in variables]:
        return dict.fromkeys(switches, thinking)
    if thinking and reasoning is None:
        raise unmet("bad_request", "this model has no reasoning", "leave thinking out", ["thinking"])
    if not thinking and reasoning is not None:
        why, advice = "this model's chat template can't turn thinking off", "set thinking_budget to 0 instead"
        raise unmet("bad_request", why, advice, ["thinking"])
    return {}


def _turn(message: wire.Message, parsed: bool) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, parsed) for call in message.tool_calls]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _call(call: wire.PastCall, parsed: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if parsed:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = call.arguments
    entry: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **entry} if call.id else entry
