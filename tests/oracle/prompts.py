"""Owns the prompts of the oracle: twenty varied ones, chats and raw text, from one token to two thousand."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer

Turn = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: raw text, or the turns of a chat.

    Attributes:
        limit: tokens to cut raw text to; None takes it whole.
    """

    name: str
    text: str | None = None
    turns: tuple[Turn, ...] = ()
    limit: int | None = None

    def ids(self, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
        """The prompt as the model sees it."""
        if self.text is None:
            return tuple(tokenizer.encode(template.render(self.turns, {}), special=False))
        return tuple(tokenizer.encode(self.text)[: self.limit])

    @property
    def fields(self) -> dict[str, Any]:
        """The same as fields of a `generate` message; for prompts without a limit."""
        assert self.limit is None
        return {"prompt": self.text} if self.text is not None else {"messages": list(self.turns)}


def chat(name: str, *texts: str, system: str | None = None) -> Prompt:
    """A chat whose turns alternate, the user's first and last."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    first = [{"role": "system", "content": system}] if system else []
    return Prompt(name, turns=(*first, *turns))


def ledger(lines: int, seed: int) -> str:
    """A harbour's log book, a line per ship: long text of a kind that a small model goes on with."""
    draw = random.Random(seed)
    ships = ("Aurora", "Kittiwake", "Saint Brendan", "Meridian", "Old Tom", "Halcyon", "Wren", "Northern Light")
    goods = ("salt", "barley", "oak planks", "wool", "copper wire", "oranges", "letters", "window glass")
    winds = ("calm", "a light breeze", "rain from the west", "fog until noon", "a gale after dark")
    return "\n".join(
        f"Day {day}: the {draw.choice(ships)} came in with {draw.randint(2, 900)} crates of {draw.choice(goods)}; "
        f"{draw.choice(winds)}. Harbour dues paid: {draw.randint(1, 99)} shillings."
        for day in range(1, lines + 1)
    )


def module(functions: int) -> str:
    """Python code, a function after another."""
    names = ("width", "height", "depth", "weight", "volume", "price", "distance", "duration")
    return "\n\n".join(
        f"def {name}_{n}(values: list[float], scale: float = {n}.5) -> float:\n"
        f'    """The {name} of all values together, scaled."""\n'
        f"    total = 0.0\n    for index, value in enumerate(values):\n"
        f"        if index % {n + 2} == 0 or value < {n}:\n            continue\n"
        f"        total += value * scale\n    return total"
        for n in range(functions)
        for name in [names[n % len(names)]]
    )


PROMPTS: Final[Sequence[Prompt]] = (
    Prompt("one token", "The"),
    Prompt("two tokens", "Once upon"),
    Prompt("a sentence's beginning", "The lighthouse keeper opened the door and"),
    chat("capital", "What is the capital of France?"),
    chat("terse", "Name three colours.", system="You answer in one line."),
    chat("sum", "What is 17 + 25? Show the steps."),
    Prompt("code", "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n"),
    Prompt("json", '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "friends": [{"name":'),
    Prompt("shell", '#!/bin/sh\nset -eu\nfor file in *.txt; do\n    wc -l "$file"\ndone\n# The loop above'),
    Prompt("accents", "Übermäßig große Äpfel kosten im Café « Chez Zoë » 3,50 € — und"),
    Prompt("other scripts", "日本の首都は東京です。Привет, мир! שלום עולם. مرحبا بالعالم. नमस्ते"),
    Prompt("emoji", "Weather today: ☀️🌧️🌈 Family: 👩‍👩‍👧‍👦 Flags: 🇫🇷🇯🇵 and then"),
    chat("unicode chat", "Translate to English: « L’été dernier, à Orléans… » 🙂 — naïve façade, Ωμέγα, ½ ≠ ¾."),
    Prompt("odd spaces", "  a\t\tb\r\n\r\n\n c \u00a0 d\u200b e\u0301 \x07 <|im_sta rt|> </s> 0000 "),
    chat(
        "turns",
        "I have a dog called Bruno.",
        "That is a lovely name for a dog! What breed is he?",
        "A beagle. He eats too much.",
        "Beagles love food. You could measure his meals and walk him twice a day.",
        "Write a short poem about him.",
        system="You are a patient helper who likes animals.",
    ),
    Prompt("a hundred tokens", ledger(5, 1), limit=100),
    chat("a long question", f"Summarise this log book in one sentence:\n{ledger(6, 2)}"),
    Prompt("code of five hundred tokens", module(8), limit=500),
    Prompt("eight hundred tokens", ledger(30, 3), limit=800),
    Prompt("two thousand tokens", ledger(70, 4), limit=2000),
)
