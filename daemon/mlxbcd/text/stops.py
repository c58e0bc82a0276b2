"""Owns stop strings: text goes in as it is generated, and comes out once no stop string can claim it.

Matching is on text, so a stop string is found wherever token boundaries fall.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxbcd.text.matching import Matcher


class StopMatcher:
    """Cuts one stream's text before its first stop string.

    The stop string that is complete first wins; of several that end at the same character, the longest, so
    that nothing of it is sent. The outcome doesn't depend on how the text is split over calls.

    Args:
        stops: strings of at least one character; none at all lets everything through at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = Matcher(stops) if stops else None
        self._hit: str | None = None

    def __repr__(self) -> str:
        return f"StopMatcher({self._matcher!r}, hit {self._hit!r})"

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text.

        Returns:
            (text that is safe to send, the stop string that was hit or None). After a hit all later text is
            dropped, and each call reports the hit again.
        """
        if self._matcher is None:
            return text, None
        if self._hit is not None:
            return "", self._hit
        safe, self._hit, _ = self._matcher.scan(text)
        return safe, self._hit

    def finish(self) -> str:
        """The text ended: release what was held back. Empty after a hit."""
        return self._matcher.flush() if self._matcher is not None else ""
