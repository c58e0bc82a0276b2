"""Owns how much of a rendered chat other prompts begin with: all that the next turn repeats, and what chats share.

Templates rewrite history: they strip earlier reasoning, open a block of reasoning that the next turn doesn't have, or
move tools to the newest message. So nothing about the next turn is assumed: one is made up and rendered, and what both
texts have in common is what the next one will find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxbcd.errors import ServeError

Messages = Sequence[Mapping[str, Any]]

_ANSWER: Final = {"role": "assistant", "content": "Yes."}
_QUESTION: Final = {"role": "user", "content": "Why?"}
_LONG_SYSTEM: Final = 512
"""Characters from which a system prompt may be worth a snapshot of its own."""


@dataclass(frozen=True, slots=True)
class Stable:
    """Tokens that a prompt has in common with others.

    Attributes:
        length: with the next turn of the same chat.
        shared: with other chats that have the same system prompt and tools; 0 where these are too short to matter.
    """

    length: int
    shared: int = 0


def stable(
    messages: Messages,
    tokens: Sequence[int],
    render: Callable[[Messages], list[int]],
    *,
    tools: bool = False,
    next_turn: bool = True,
) -> Stable:
    """What of a chat's prompt will come again. Costs up to two more renderings.

    Args:
        tokens: the prompt's.
        render: makes tokens of messages, exactly as it did of these.
        tools: the prompt describes tools.
        next_turn: the next turn matters; else all of the prompt is taken to come again.
    """
    length = _shared(tokens, [*messages, _ANSWER, _QUESTION], render) if next_turn else None
    head = [message for message in messages[:1] if message.get("role") == "system"]
    long = head and len(head[0].get("content") or "") >= _LONG_SYSTEM
    if length is None:
        # Nobody asked, or the template refuses such a chat, and nothing is known about what may follow.
        length = len(tokens)
    shared = _shared(tokens, [*head, _QUESTION], render) if long or tools else None
    return Stable(length, min(shared or 0, length))


def _shared(tokens: Sequence[int], messages: Messages, render: Callable[[Messages], list[int]]) -> int | None:
    try:
        other = render(messages)
    except ServeError:
        return None
    length = 0
    for a, b in zip(tokens, other, strict=False):
        if a != b:
            break
        length += 1
    return length
