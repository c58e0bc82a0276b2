"""Owns making a model call a tool: a grammar for the beginning of a call, in each format, up to the function's name at
least. Where the arguments are JSON, the grammar holds for them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mlxbcd.errors import ServeError
from mlxbcd.text.tools import ToolFormat

_NAME: Final = "\0"
"""Where the function's name goes."""
_ARGUMENTS: Final = "\1"
"""Where its arguments go, as JSON; a call whose arguments have another form is left to the model from there on."""

_CALLS: Final[dict[str, str]] = {
    "function_gemma": f"call:{_NAME}{{",
    "gemma4": f"call:{_NAME}{{",
    "glm47": f"{_NAME}\n",
    "json_tools": f'\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>',
    "kimi_k2": (
        f"<|tool_call_begin|>functions.{_NAME}:0<|tool_call_argument_begin|>{_ARGUMENTS}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": f'<|open|>call tool="{_NAME}" index="1"<|sep|>',
    "laguna": f"{_NAME}\n",
    "longcat": f"{_NAME}\n",
    "minicpm5": f'"{_NAME}">',
    "minimax_m2": f'\n<invoke name="{_NAME}">',
    "mistral": f"{_NAME}[ARGS]{_ARGUMENTS}",
    "muse_spark": f'\n<atem:invoke name="{_NAME}">',
    "pythonic": f"[{_NAME}(",
    "qwen3_coder": f"\n<function={_NAME}>",
}
"""What follows the opening marker, by the name of the format."""
_MISTRAL_LIST: Final = f'[{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}]'
"""What models of Mistral without a token [ARGS] write."""


def call_grammar(
    style: ToolFormat, tools: Sequence[Mapping[str, Any]], choice: str, control: Callable[[str], int | None]
) -> str:
    """A Lark grammar of a call's beginning, which has to come first.

    Args:
        tools: as the chat template sees them.
        choice: "required", or the function to call.
        control: ids of control tokens, which no text spells.

    Raises:
        ServeError: bad_request, it isn't known how such a call begins.
    """
    form = _CALLS.get(style.name)
    if form is None:
        message = f"calls can't be required of this model, whose format is {style.name}; leave tool_choice out"
        raise ServeError("bad_request", message)
    if style.name == "mistral" and control("[ARGS]") is None:
        form = _MISTRAL_LIST
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if choice in ("required", function["name"])]
    calls = " | ".join(_call(style.opening + form, function, control) for function in chosen)
    return f"start: {calls}"


def _call(form: str, function: Mapping[str, Any], control: Callable[[str], int | None]) -> str:
    terms = []
    for part in re.split(f"([{_NAME}{_ARGUMENTS}])", form):
        if part == _ARGUMENTS:
            terms.append(f"%json {json.dumps(function['parameters'])}")
        else:
            terms += _terms(function["name"] if part == _NAME else part, control)
    return " ".join(terms)


def _terms(text: str, control: Callable[[str], int | None]) -> list[str]:
    """A text as terms of a grammar: control tokens by their ids, all else as it is spelled."""
    terms = []
    for part in re.split(r"(<\|[^|]*\|>|<\|\w+>|<\w+\|>|<\w+>|\[[A-Z_]+\])", text):
        if part:
            index = control(part)
            terms.append(json.dumps(part) if index is None else f"<[{index}]>")
    return terms
