"""Owns the names of the environment variables that either side reads, and what is said of one that is nearly one.

A command imports this only where it finds a variable of the prefix that it doesn't read itself.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "MLXBC_"

OWN = frozenset({"MLXBC_SOCKET", "MLXBC_DATA", "MLXBC_CONFIG", "MLXBC_HTTP_TOKEN"})
"""Those that are no settings of the daemon."""

_SETTINGS = """
MODEL PRELOAD BLAS BLAS_THREADS LOG_LEVEL LOG_FILE LOG_FORMAT MODELS_KEEP_ALIVE MODELS_PIN_DEFAULT
MEMORY_LIMIT MEMORY_CACHE MEMORY_WIRED POWER_BATTERY POWER_LOW_POWER POWER_THERMAL
CACHE_MODE CACHE_RAM CACHE_DISK CACHE_FREE CACHE_DIRECTORY
REQUESTS_QUEUE REQUESTS_PROMPTS REQUESTS_MAX_TOKENS REQUESTS_FIM
SCHEDULE_DECODE_GAP_MS SCHEDULE_MAX_PIECE_MS SCHEDULE_MAX_ROWS
"""
SETTINGS = frozenset(PREFIX + name for name in _SETTINGS.split())
"""Those that are: by hand, since the client doesn't know the daemon. A test compares them with its keys."""

_ALIKE = 0.75


def near(name: str) -> str | None:
    """The variable that `name` was probably meant to be; None if it is like none of them."""
    from difflib import get_close_matches

    # Compared without what all of them begin with, or any two would be alike.
    known = {one.removeprefix(PREFIX): one for one in sorted(OWN | SETTINGS)}
    found = get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=_ALIKE)
    return known[found[0]] if found else None


def doubts(names: Iterable[str]) -> list[str]:
    """A line for each variable that looks like a mistake. What is like nothing of ours may be another program's."""
    lines = []
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in OWN | SETTINGS:
            meant = near(name)
            if meant is not None:
                lines.append(f"nothing reads the variable {name}; did you mean {meant}?")
    return lines
