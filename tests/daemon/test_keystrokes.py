"""Somebody types while others generate: each key makes the completion before it stale."""

from __future__ import annotations

import time
from typing import Any

import pytest
from real_daemon import Daemon, Frames, Solo, ask, tokens
from stories import STORIES

from mlxbc import wire

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

FILE = '''\
"""Rectangles, and what can be said of them."""


class Rectangle:
    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height


'''
TYPED = "    def area(self) -> float:\n        return self.width * sel"
"""Sixty keys, whose end asks for more."""
PACE_S = 0.05


def completion(text: str) -> dict[str, Any]:
    """What an editor asks when the file's text is this, up to the cursor."""
    return {
        "fim": {"prefix": FILE + text, "suffix": "\n", "path": "shapes.py", "language": "python"},
        "temperature": 0,
    }


def until_ended(frames: Frames, requests: set[int]) -> list[wire.Reply]:
    """Everything that comes, up to the last of these requests' ends."""
    journal: list[wire.Reply] = []
    left = set(requests)
    while left:
        frame = frames.read()
        assert frame is not None
        assert not isinstance(frame, wire.Error), frame
        journal.append(frame)
        if isinstance(frame, wire.Done):
            left.remove(frame.id)
    return journal


def test_sixty_keystrokes_in_three_seconds(shared: Daemon, solo: Solo) -> None:
    keys = range(1, len(TYPED) + 1)
    streams = range(len(STORIES))
    with shared.frames() as company, shared.frames() as typist:
        company.say(*(ask(n, story, priority="background", max_tokens=4000) for n, story in enumerate(STORIES)))
        started: list[wire.Reply] = []
        while not all(tokens(started, n) for n in streams):
            frame = company.read()
            assert frame is not None
            started.append(frame)

        began = time.monotonic()
        for key in keys:
            fields = completion(TYPED[:key])
            typist.say(
                ask(
                    key,
                    fields,
                    supersede="line",
                    priority="interactive",
                    explain=True,
                    deadline_ms=60_000,
                    max_tokens=8,
                )
            )
            time.sleep(max(0.0, began + key * PACE_S - time.monotonic()))
        typed_s = time.monotonic() - began
        journal = until_ended(typist, set(keys))

        company.say(*(wire.Cancel(id=n) for n in streams))
        stories = started + until_ended(company, set(streams))

    assert typed_s < len(keys) * PACE_S + 0.5, "typing is not held up"
    ends = {frame.id: frame for frame in journal if isinstance(frame, wire.Done)}
    alive: set[int] = set()
    accepted = {frame.id for frame in journal if isinstance(frame, wire.Accepted)}
    for frame in journal:
        if isinstance(frame, wire.Accepted):
            alive.add(frame.id)
        elif isinstance(frame, wire.Done):
            alive.discard(frame.id)
        assert len(alive) <= 1, alive

    last = ends.pop(len(keys))
    assert last.reason == "length"
    assert tokens(journal, len(keys)) == solo.ids(completion(TYPED), 8)
    superseded = [end for end in ends.values() if end.reason == "superseded"]
    # One that was quick enough to be done before the next key is no waste either.
    assert len(superseded) >= len(ends) - 5
    for end in superseded:
        # Without a plan it was still being read when the next key came: nothing has run for it.
        assert end.plan is None or len(end.plan.chunks) <= 1, end
        assert (end.plan is None) == (end.id not in accepted), end
    for n, story in enumerate(STORIES):
        told = tokens(stories, n)
        assert told == solo.ids(story, len(told))
