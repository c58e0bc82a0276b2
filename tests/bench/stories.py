"""Owns the prompts: plain English of a chosen length, never the same twice, so that no cache knows its beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mlxbcd.text.tokenizer import Tokenizer

Messages = list[dict[str, str]]

_WORDS = tuple(
    word
    for line in (
        "the old lighthouse keeper counted ships along a quiet northern coast while rain fell over harbour stones",
        "and children carried lanterns from door to door asking every neighbour for stories about storms and gold",
    )
    for word in line.split()
)


def words(count: int, seed: int) -> str:
    """`count` English words in an order that follows from `seed`."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(count))


def chat(count: int, nonce: str, seed: int) -> Messages:
    """A chat that asks about `count` words. The nonce comes first of all, so no two nonces share a prefix to reuse."""
    return [
        {"role": "system", "content": f"{nonce}: you tell very long stories in many chapters and never stop early."},
        {"role": "user", "content": f"Tell a long story from these words: {words(count, seed)}"},
    ]


def token_prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Ragged prompts as token ids, one of each length."""
    return [tokenizer.encode(words(length, seed))[:length] for seed, length in enumerate(lengths)]
