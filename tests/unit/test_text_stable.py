"""What a chat's prompt keeps: the next turn begins with it, whatever the template does to earlier turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text_template import CHATML, HEADERS, THINKING

from mlxbcd.text.stable import Messages, stable
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer

OPENS = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
"""Earlier answers lose their reasoning, and the next one begins inside it."""
STRICT = """{%- for m in messages %}{%- if m.role not in ('user', 'system') %}{{ raise_exception('no') }}{%- endif %}
{{- m.content }}{%- endfor %}"""

Render = Callable[[Messages], list[int]]


def by_character(source: str) -> Render:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return lambda messages: [ord(character) for character in template.render(list(messages), {})]


def chat(*contents: str, system: str = "") -> list[dict[str, Any]]:
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(contents)]


def text(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKING, OPENS], ids=["chatml", "headers", "thinking", "opens"])
@given(
    st.lists(st.text("ab <>/think\n", min_size=1, max_size=12), min_size=3, max_size=7).filter(lambda c: len(c) % 2),
    st.text("ab c", min_size=1),
)
@settings(deadline=None, max_examples=30)
def test_the_next_turn_repeats_it_whatever_is_said(source: str, contents: list[str], system: str) -> None:
    render = by_character(source)
    for end in range(1, len(contents) - 1, 2):
        turn = chat(*contents[:end], system=system)
        tokens = render(turn)
        following = render(chat(*contents[: end + 2], system=system))
        length = stable(turn, tokens, render).length
        assert tokens[:length] == following[:length]


def test_what_the_template_will_take_back_is_not_counted() -> None:
    render = by_character(OPENS)
    turn = chat("Hello")
    tokens = render(turn)
    assert text(tokens).endswith("<|assistant|><think>")
    assert text(tokens[: stable(turn, tokens, render).length]).endswith("Hello<|end|><|assistant|>")


def test_reasoning_in_the_last_answer_ends_it_before_that_answer() -> None:
    render = by_character(THINKING)
    turn = [*chat("Hello", "<think>\nhm\n</think>\n\nHi"), {"role": "tool", "content": "42"}]
    tokens = render(turn)
    kept = text(tokens[: stable(turn, tokens, render).length])
    assert "hm" not in kept
    assert "Hello" in kept


def test_a_long_system_prompt_is_shared_with_other_chats() -> None:
    render = by_character(CHATML)
    system = "Be kind. " * 100
    one, two = chat("Hello", system=system), chat("Something else", system=system)
    tokens = render(one)
    shared = stable(one, tokens, render).shared
    assert shared > len(system) - 2
    assert tokens[:shared] == render(two)[:shared]
    assert stable(chat("Hello"), render(chat("Hello")), render).shared == 0


def test_a_template_that_refuses_the_next_turn_takes_nothing_away() -> None:
    render = by_character(STRICT)
    tokens = render(chat("Hello"))
    assert stable(chat("Hello"), tokens, render).length == len(tokens)


@pytest.mark.model
def test_the_default_models_prompt_is_kept_whole(model_directory: Path) -> None:
    tokenizer = Tokenizer.load(model_directory)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)

    def render(messages: Messages) -> list[int]:
        return tokenizer.encode(template.render(list(messages), {}), special=False)

    turn = chat("What is the capital of France?", "Paris.", "And of Spain?")
    tokens = render(turn)
    assert stable(turn, tokens, render).length == len(tokens)
