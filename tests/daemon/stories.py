"""Owns the requests of the daemon's tests: stories without an end, of every kind of sampler, and one long prompt."""

from __future__ import annotations

from typing import Final

from real_daemon import Fields

END: Final = 2
"""The default model's end token, ruled out so that a story goes on for as long as a test needs it."""
_ENDLESS: Final = {"logit_bias": {END: -100.0}}

STORIES: Final[tuple[Fields, ...]] = (
    {
        "messages": [{"role": "user", "content": "Tell me a long story about a lighthouse."}],
        "temperature": 0,
        **_ENDLESS,
    },
    {"prompt": "Once upon a time, in a village by the sea,", "temperature": 0.8, "seed": 11, **_ENDLESS},
    {"prompt": "The history of bread begins", "temperature": 1.0, "top_p": 0.9, "seed": 12, **_ENDLESS},
    {"prompt": "A recipe for onion soup. First,", "temperature": 0, "repetition_penalty": 1.2, **_ENDLESS},
)

LONG: Final = "\n".join(
    f"Day {day}: the ship number {day * 37 % 101} came in with {day * 53 % 97} crates of salt, and left before noon."
    for day in range(1, 75)
)
"""A prompt of about two thousand tokens."""
