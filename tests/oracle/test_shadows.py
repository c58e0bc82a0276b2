"""Probes beside plain steps: the drafter guesses what is drawn anyway, and no token, state or pipelining changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.speculative import SpeculativeGroup
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth, Key
from mlxbcd.spec.drafter import Drafter
from oracle.families import VOCABULARY
from oracle.guesses import Guesses, always, mixed, right, wrong
from oracle.speculation import Play, alone, requests
from oracle.test_draft_model import check_companion, drafter_of
from oracle.test_heads import built, knowing_head, subject_of, write_checkpoint
from oracle.test_heads import drafter_of as head_of
from oracle.test_speculative import (
    EOS,
    PLAIN,
    WINDOWED,
    Texts,
    asked,
    compare,
    covers_what_was_delivered,
    subject,
)


class Shadowing(Depth):
    """Shadows every step that can be, unless a test wants something else.

    Attributes:
        wanted: it shadows them.
        deep: what it drafts where it doesn't.
        seen: by row, (drafted, accepted) of each draft.
        told: of each step, whether it could be shadowed.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.deep = 0
        self.seen: dict[Key, list[tuple[int, int]]] = {}
        self.told: list[bool] = []
        super().__init__(1, VerifyCosts())

    def next(self, cap: int, rows: Collection[Key], *, shadows: bool = False) -> int:
        self.shadowing = shadows and self.wanted
        self.told.append(shadows)
        return 0 if self.wanted else min(cap, self.deep)

    def saw(self, row: Key, drafted: int, accepted: int) -> None:
        self.seen.setdefault(row, []).append((drafted, accepted))


GUESSES: dict[str, Callable[[Texts], Drafter]] = {
    "right": lambda texts: Guesses(right(texts)),
    "wrong": lambda texts: Guesses(wrong(texts, VOCABULARY)),
    "mixed": lambda texts: Guesses(mixed(texts, VOCABULARY)),
    "the end token": lambda texts: Guesses(always(EOS)),
    "the model itself": lambda texts: drafter_of(PLAIN),
}


@pytest.mark.parametrize("ahead", Ahead)
@pytest.mark.parametrize("drafter", GUESSES)
def test_rows_draw_what_they_draw_and_shadows_tell_who_was_right(drafter: str, ahead: Ahead) -> None:
    """Rows of every way to draw. Each guess stands for the draw in flight: a model guesses its own draws."""
    made, texts = asked(PLAIN)
    depth = Shadowing()
    play = Play(subject(PLAIN), drafter=GUESSES[drafter](texts), depth=depth, ahead=ahead)
    play.run(made, together=4, check=covers_what_was_delivered)
    compare(PLAIN, play, made, texts)
    assert play.group.rounds() == []
    assert all(play.statistics(key).drafted == 0 for key in made), "nothing was proposed"
    seen = [accepted for row in depth.seen.values() for _, accepted in row]
    if drafter == "the end token":
        assert seen == [], "as in a window, no row is told that it ends"
        return
    # Nearly every step but the first after a row has joined or left.
    assert len(seen) > 0.5 * sum(len(text) for text in texts.values())
    shares = {"right": (1.0, 1.0), "the model itself": (1.0, 1.0), "wrong": (0.0, 0.0), "mixed": (0.5, 0.95)}
    low, high = shares[drafter]
    assert low <= sum(seen) / len(seen) <= high


@pytest.mark.parametrize("ahead", Ahead)
def test_shadowed_steps_stay_built_ahead(ahead: Ahead) -> None:
    made, texts = asked(PLAIN)
    depth = Shadowing()
    play = Play(subject(PLAIN), drafter=Guesses(right(texts)), depth=depth, ahead=ahead)
    play.admit(0, made[0])
    for step in range(5):
        play.step()
        assert play.group._flight is not None
        # The first token came with the prompt, and the newest one is in flight.
        assert len(play.tokens(0)) == 1 + step
    assert depth.told == [False, True, True, True, True], "the first step had nothing in flight before it"


@pytest.mark.parametrize("name", [PLAIN, WINDOWED])
def test_a_companion_stays_right_under_shadows_rounds_and_plain_steps(name: str) -> None:
    made, _ = asked(name)
    rng, drafter, depth, checked = random.Random(4), drafter_of(name), Shadowing(), 0
    play = Play(subject(name), drafter=drafter, depth=depth)
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    waiting = list(made.items())
    while waiting or len(group):
        if waiting and len(group) < 3:
            play.admit(*waiting.pop(0))
        if len(group) > 2 and rng.random() < 0.15:
            group.leave([rng.choice(group.keys)], play.events.extend)
        depth.wanted, depth.deep = rng.random() < 0.5, rng.choice([0, 2])
        play.step(covers_what_was_delivered)
        if group._flight is None:
            for key in group.keys:
                if rng.random() < 0.3:
                    check_companion(drafter, key, [*made[key].prompt, *play.tokens(key)])
                    checked += 1
    assert checked > 5
    seen = [one for row in depth.seen.values() for one in row]
    assert all(drafted == accepted for drafted, accepted in seen), "it is the model itself"
    assert min(seen.count((1, 1)), seen.count((2, 2))) > 10


def test_a_head_guesses_beside_plain_steps(tmp_path: Path) -> None:
    model = built(write_checkpoint(tmp_path / "knowing", knowing_head(), layers=True))
    made = requests(6, VOCABULARY, length=16)
    texts = {key: alone(subject_of(model), request) for key, request in made.items()}
    depth = Shadowing()
    play = Play(subject_of(model), drafter=head_of(model), depth=depth)
    play.run(made, together=4, check=covers_what_was_delivered)
    assert {key: play.tokens(key) for key in made} == texts
    seen = [one for row in depth.seen.values() for one in row]
    assert set(seen) == {(1, 1)}
    assert len(seen) > 30
