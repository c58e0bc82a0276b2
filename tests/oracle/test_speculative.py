"""Speculation changes speed only: with and without it a request has the same tokens, whoever proposes what."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Drawn
from mlxbcd.methods.speculative import SpeculativeGroup
from mlxbcd.model.forward import Group
from mlxbcd.plan.request import Request
from mlxbcd.state.composition import KvScheme
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, Turn, commit
from mlxbcd.state.schemes import Quantised
from oracle.agreement import Tally
from oracle.families import VOCABULARY, load
from oracle.guesses import Guess, Guesses, always, anything, mixed, right, wrong
from oracle.speculation import Play, Subject, alone, requests

PLAIN, WINDOWED, RECURRENT, NESTED, QUANTISED = "llama", "exaone4", "qwen3_5", "falcon_h1", "llama, 8 bits"
SUBJECTS = (PLAIN, WINDOWED, RECURRENT, NESTED, QUANTISED)
LENGTH = 24
BATCHES = (1, 4, 8)
EOS = 5

Texts = Mapping[Key, Sequence[int]]

DRAFTERS: Mapping[str, Callable[[Texts], Guess]] = {
    "right": right,
    "wrong": lambda texts: wrong(texts, VOCABULARY),
    "anything": lambda texts: anything(VOCABULARY),
    "the end token": lambda texts: always(EOS),
    "mixed, of any length": lambda texts: mixed(texts, VOCABULARY),
}


@lru_cache(maxsize=2)
def subject(name: str) -> Subject:
    family = load(name.partition(",")[0])
    composition = family.composition
    if name == QUANTISED:
        composition = family.quantised(KvScheme(Quantised(bits=8, group_size=32), start=20))
    vocabulary = family.forward.head(family.forward.hidden(mx.array([[1]]), composition.make_stock())).shape[-1]
    return Subject(family.forward, composition, vocabulary)


@lru_cache(maxsize=4)
def asked(name: str) -> tuple[dict[Key, Request], dict[Key, list[int]]]:
    """Requests, and what they draw without speculation."""
    made = requests(9, VOCABULARY, length=LENGTH, eos=[EOS])
    return made, {key: alone(subject(name), request) for key, request in made.items()}


def compare(name: str, play: Play, made: dict[Key, Request], texts: Texts) -> None:
    tally = Tally()
    for key, request in made.items():
        tokens = play.tokens(key)
        tally.compare(f"{name} {key}", tokens, texts[key], partial(scores, name, request, tokens))
    tally.check()


def scores(name: str, request: Request, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """What each next token scores along `tokens`."""
    from oracle.teacher import score

    model = load(name.partition(",")[0]).model
    text = [*request.prompt, *tokens]
    logits = np.array(model(mx.array([text[:-1]]))[0, len(request.prompt) - 1 :], dtype=np.float64)
    return np.array([score(row, request.sampling, text[: len(request.prompt) + n], n) for n, row in enumerate(logits)])


def covers_what_was_delivered(play: Play) -> None:
    """After every call, a settled group's states cover each row's tokens but the pending one, the drafter's too."""
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    if group._flight is not None:
        return
    rows = group._state
    assert isinstance(rows, Rows)
    for key, row in group._rows.items():
        drawn = play.tokens(key)
        assert row.pending == drawn[-1]
        assert rows.lengths[key] == len(row.request.prompt) + len(drawn) - 1
        if isinstance(play.drafter, Guesses):
            assert play.drafter.texts[key] == [*row.request.prompt, *drawn[:-1]]


SLOW = pytest.mark.slow
CASES = [
    pytest.param(name, drafter, batch, marks=() if trimmed else SLOW)
    for name in SUBJECTS
    for drafter in DRAFTERS
    for batch in BATCHES
    for trimmed in [
        (drafter == "mixed, of any length" and batch == 4 and name != NESTED) or (name == PLAIN and batch == 8)
    ]
]


@pytest.mark.parametrize(("name", "drafter", "batch"), CASES)
def test_tokens_are_the_same_whatever_is_drafted(name: str, drafter: str, batch: int) -> None:
    made, texts = asked(name)
    guesses = Guesses(DRAFTERS[drafter](texts))
    play = Play(subject(name), drafter=guesses, depth=5)
    play.run(made, together=batch, check=covers_what_was_delivered)
    compare(name, play, made, texts)
    assert guesses.asked
    if drafter == "right" and name != QUANTISED:
        total = sum(len(text) for text in texts.values())
        assert sum(play.statistics(key).forwards for key in made) < 0.5 * total


@pytest.mark.parametrize("ahead", Ahead)
@pytest.mark.parametrize("name", [PLAIN, *(pytest.param(name, marks=SLOW) for name in SUBJECTS[1:])])
def test_tokens_are_the_same_when_rows_copy_what_is_known(name: str, ahead: Ahead) -> None:
    """Most rows get a source that is what they will say, with changes; between spans steps are plain, built ahead."""
    made, texts = asked(name)
    rng = random.Random(2)
    play = Play(subject(name), echo=True, ahead=ahead)
    waiting = list(made.items())
    while waiting or len(play.group):
        if waiting and len(play.group) < 4:
            key, request = waiting.pop(0)
            source = [token if rng.random() < 0.9 else 7 for token in texts[key]]
            play.admit(key, request, [source] if key else [])
        play.step(covers_what_was_delivered)
    compare(name, play, made, texts)
    echoed = [play.statistics(key).echo.accepted for key in made]
    assert sum(echoed) > 20, echoed
    assert echoed[0] == 0, "nobody supplied anything"


def test_rows_without_speculation_share_the_rounds_of_others() -> None:
    made, texts = asked(PLAIN)
    play = Play(subject(PLAIN), drafter=Guesses(right(texts)))
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    for key in range(4):
        play.admit(key, made[key])
        group._speculations[key].drafts = key % 2 == 0
    while len(group):
        play.step(covers_what_was_delivered)
    compare(PLAIN, play, {key: made[key] for key in range(4)}, texts)
    assert [play.statistics(key).drafted > 0 for key in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("name", [PLAIN, RECURRENT])
def test_rows_that_leave_take_nobody_with_them(name: str) -> None:
    made, texts = asked(name)
    guesses = Guesses(mixed(texts, VOCABULARY))
    play = Play(subject(name), drafter=guesses, depth=4, echo=True)
    rng = random.Random(3)
    waiting, gone = list(made.items()), set()
    while waiting or len(play.group):
        if waiting and len(play.group) < 4:
            play.admit(*waiting.pop(0))
        if len(play.group) > 1 and rng.random() < 0.2:
            key = rng.choice(play.group.keys)
            play.group.leave([key], play.events.extend)
            gone.add(key)
            covers_what_was_delivered(play)
        play.step(covers_what_was_delivered)
    assert 2 <= len(gone) < len(made)
    compare(name, play, {key: request for key, request in made.items() if key not in gone}, texts)
    for key in gone:
        assert play.tokens(key) == texts[key][: len(play.tokens(key))], "what a row said before it left was right"


def test_each_round_tells_and_a_row_ends_once_with_all_its_figures() -> None:
    made, texts = asked(PLAIN)
    play = Play(subject(PLAIN), drafter=Guesses(right(texts)), depth=3)
    play.run({0: made[0]}, together=1)
    figures = play.statistics(0)
    # The first token came out of the prompt; each round then gives four, all of them right.
    assert figures.generated == len(texts[0]) - 1
    assert figures.forwards == -(-figures.generated // 4)
    assert figures.forwards_saved == figures.generated - figures.forwards
    assert figures.drafts.accepted == figures.drafts.drafted
    assert figures.drafts.lengths[3] >= figures.forwards - 1
    ends = [event for event in play.events if isinstance(event, Drawn) and event.ended]
    assert len(ends) == 1
    assert play.events.index(ends[0]) == len(play.events) - 1


def test_a_round_that_fails_takes_its_group_and_the_next_one_is_clean() -> None:
    made, texts = asked(PLAIN)
    play = Play(subject(PLAIN), drafter=Guesses(right(texts)))
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    for key in (0, 1):
        play.admit(key, made[key])
    healthy, group._round_steps = group._round_steps, _Broken()
    with pytest.raises(RuntimeError, match="broken"):
        group.step(play.events.extend)
    assert sorted(group.discard(), key=str) == [0, 1]
    assert (len(group), group.nbytes) == (0, 0)
    group._round_steps = healthy
    play.admit(2, made[2])
    while len(group):
        play.step(covers_what_was_delivered)
    assert play.tokens(2) == texts[2]


class _Broken:
    def hidden(self, turn: Turn, ids: mx.array) -> mx.array:
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    "name", [WINDOWED, RECURRENT, *(pytest.param(name, marks=SLOW) for name in (PLAIN, NESTED, QUANTISED))]
)
def test_states_hold_what_processing_the_delivered_tokens_anew_gives(name: str) -> None:
    """After rounds of all kinds, each row's next logits are those of a row that has just read its text."""
    made, texts = asked(name)
    play = Play(subject(name), drafter=Guesses(mixed(texts, VOCABULARY)), depth=5)
    for key in range(4):
        play.admit(key, made[key])
    for _ in range(4):
        play.step()
    play.group.settle(play.events.extend)
    state = play.group._state
    assert isinstance(state, Rows)
    assert len(state) >= 2
    taken = {key: state.extract(key) for key in state.order}
    forward = subject(name).forward
    for key, row in taken.items():
        text = [*made[key].prompt, *play.tokens(key)]
        assert row.length == len(text) - 1
        ours, anew = Rows(subject(name).composition), Rows(subject(name).composition)
        commit(ours.prepare(join=[Joiner(key, row, row.length + 1)]))
        commit(anew.prepare(join=[Joiner(key, COLD, row.length + 1)]))
        for token in text[:-1]:
            _logits(forward, anew, token)
        got, wanted = _logits(forward, ours, text[-1]), _logits(forward, anew, text[-1])
        assert mx.abs(got - wanted).max().item() <= 2e-3 * mx.abs(wanted).max().item()


def _logits(forward: object, rows: Rows, token: int) -> mx.array:
    turn = rows.begin(1)
    (hidden,) = forward.run([Group(mx.array([[token]]), turn.caches)])
    logits = forward.head(hidden)
    mx.eval(logits, turn.arrays())
    turn.resolve()
    return logits
