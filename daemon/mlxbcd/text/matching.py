"""Owns finding several strings in a text that arrives in parts, without ever looking at a character twice.

The automaton is Aho and Corasick's: a state is the longest end of the text so far that could still begin one
of the strings, so the characters to hold back are exactly those of the state.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class Matcher:
    """An incremental search for `patterns`, each at least one character. One per stream.

    The match found is the one that is *complete first*; of several that end at the same character, the
    longest. Waiting for a longer match that began earlier would hold back text that may never be needed.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if not all(patterns):
            raise ValueError("a string to search for needs at least one character")
        self._build(patterns)
        # From the root only a first character leads anywhere: let the regex engine find the next one.
        firsts = "|".join(re.escape(first) for first in sorted({pattern[0] for pattern in patterns}))
        self._first = re.compile(firsts or r"(?!)")
        self._state = 0
        self._held = ""

    def __repr__(self) -> str:
        return f"Matcher(holding {self._held!r})"

    def scan(self, text: str, start: int = 0) -> tuple[str, str | None, int]:
        """Read `text[start:]` up to the first match.

        Returns:
            (text that is certainly before any match, the pattern matched or None, where to go on in `text`).
            After a match the search begins afresh: matches don't overlap.
        """
        state, position, end = self._state, start, len(text)
        next_states, fallback = self._next, self._fallback
        while position < end:
            if not state:
                first = self._first.search(text, position)
                if first is None:
                    break
                position = first.start()
            character = text[position]
            while state and character not in next_states[state]:
                state = fallback[state]
            state = next_states[state].get(character, 0)
            position += 1
            match = self._match[state]
            if match is not None:
                seen = self._held + text[start:position]
                self._state, self._held = 0, ""
                return seen[: len(seen) - len(match)], match, position
        seen = self._held + text[start:]
        cut = len(seen) - self._depth[state]
        self._state, self._held = state, seen[cut:]
        return seen[:cut], None, end

    def flush(self) -> str:
        """The text ended: release what was held back as the possible beginning of a match."""
        held, self._state, self._held = self._held, 0, ""
        return held

    def _build(self, patterns: Sequence[str]) -> None:
        """Lay out the states: 0 is the root, and each other one is a prefix of some pattern."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for pattern in patterns:
            state = 0
            for character in pattern:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(None)
                state = self._next[state][character]
            self._match[state] = pattern
        # Breadth first, so that a state's fallback (its longest proper suffix that is a state) is complete
        # before it.
        self._fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fallback = self._fallback[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(character, 0)
                self._match[child] = self._match[child] or self._match[self._fallback[child]]
                queue.append(child)
