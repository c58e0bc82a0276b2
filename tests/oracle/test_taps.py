"""Drafters that read single layers of their target get what these layers answer, of every token that is covered."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxbcd.engine.executor import Executor
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Drawn
from mlxbcd.methods.speculative import WIDEST, SpeculativeGroup
from mlxbcd.model.forward import Group
from mlxbcd.model.swap import swap
from mlxbcd.model.taps import Taps, Untappable
from mlxbcd.plan.request import Request
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth
from mlxbcd.spec.drafter import READ_OF_PROMPT, Companion, Covered
from mlxbcd.state import packing
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import PreparedChange, Rows
from oracle.families import CONFIGS, VOCABULARY, load
from oracle.guesses import Guesses, mixed
from oracle.speculation import Cheap, Play, alone
from oracle.test_speculative import NESTED, PLAIN, RECURRENT, WINDOWED, asked, compare, subject

UNTAPPABLE = {
    "deepseek_v41": r"answered something of shape \(1, 2, 4, 128\)",
    "gemma3n": r"answered something of shape \(4, 1, 2, 128\)",
    "iquestloopcoder": "answered 0 times",
    "nanbeige": "answered 2 times",
}
"""Families whose hidden states between layers are several streams, or whose layers aren't called, or more than once."""

TRIMMED = {(PLAIN, Ahead.RUN), (RECURRENT, Ahead.BUILD)}


@dataclass
class Tapping(Guesses):
    """Proposes what a test wants, and keeps what it has been given of each row.

    Attributes:
        states: [1, n, taps · D], of the row's last n tokens that are covered.
    """

    reads_hidden: bool = True
    states: dict[Key, mx.array] = field(default_factory=dict)

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> _Change:
        return _Change(self, super().prepare(keep=keep, join=join).commit, set(keep), join)

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        super().commit(covered, hidden)
        assert hidden is not None
        for i, row in enumerate(covered):
            self.states[row.key] = mx.concatenate([self.states[row.key], hidden[i : i + 1, : len(row.tokens)]], axis=1)
        mx.eval(self.states)


@dataclass
class _Change:
    drafter: Tapping
    guesses: Callable[[], None]
    keep: set[Key]
    join: Mapping[Key, Companion]
    prepared: Sequence[PreparedChange] = ()

    def commit(self) -> None:
        self.guesses()
        states = self.drafter.states
        self.drafter.states = {key: state for key, state in states.items() if key in self.keep}
        for key, companion in self.join.items():
            assert companion.hidden is not None
            self.drafter.states[key] = companion.hidden


def hooked(name: str, text: Sequence[int], layers: Sequence[int]) -> mx.array:
    """What some layers answer when the model reads a text anew, side by side: [1, n, layers · D]."""
    family = load(name)
    seen: dict[int, mx.array] = {}

    def watch(layer: int) -> Callable[..., Any]:
        def call(plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            answer = plain(module, *args, **kwargs)
            seen[layer] = answer[0] if isinstance(answer, tuple) else answer
            return answer

        return call

    modules = [family.model.layers[layer] for layer in layers]
    classes = [swap(module, watch(layer)) for module, layer in zip(modules, layers, strict=True)]
    try:
        family.model(mx.array([list(text)]), cache=family.composition.make_stock())
    finally:
        for module, plain in zip(modules, classes, strict=True):
            module.__class__ = plain
    return mx.concatenate([seen[layer] for layer in layers], axis=-1)


def agree(got: mx.array, wanted: mx.array) -> None:
    assert got.shape == wanted.shape
    assert mx.abs(got - wanted).max().item() <= 2e-3 * mx.abs(wanted).max().item()


def two_layers(name: str) -> tuple[int, int]:
    """The last but one and the first, in this order."""
    return len(load(name).model.layers) - 2, 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layers_of_a_family_can_be_tapped_or_are_refused(name: str) -> None:
    family = load(name)
    layers = (len(family.model.layers) - 1, 0)
    if name in UNTAPPABLE:
        classes = [type(layer) for layer in family.model.layers]
        with pytest.raises(Untappable, match=UNTAPPABLE[name]):
            Taps(family.forward, layers)
        assert [type(layer) for layer in family.model.layers] == classes, "nothing of the attempt stays"
        return
    taps = Taps(family.forward, layers)
    text = list(range(3, 9))
    (tapped,) = taps.run([Group(mx.array([text]), family.composition.make_stock())])
    agree(tapped.read, hooked(name, text, layers))
    agree(tapped.hidden, family.forward.hidden(mx.array([text]), family.composition.make_stock()))


@pytest.mark.parametrize("layers", [(0, 0), (-1,), (99,)])
def test_layers_that_a_model_lacks_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(Untappable, match="taps are different layers from 0 to"):
        Taps(load(PLAIN).forward, layers)


def test_without_taps_the_final_hidden_states_are_read() -> None:
    family = load(PLAIN)
    (tapped,) = Taps(family.forward).run([Group(mx.array([[1, 2]]), family.composition.make_stock())])
    assert tapped.read is tapped.hidden


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        pytest.param(name, ahead, marks=() if (name, ahead) in TRIMMED else pytest.mark.slow)
        for name in (PLAIN, WINDOWED, RECURRENT, NESTED)
        for ahead in Ahead
    ],
)
def test_a_drafter_with_two_taps_gets_both_of_every_token_covered(name: str, ahead: Ahead) -> None:
    """Rounds of any acceptance, plain steps, joins and leaves; and the tokens stay what they are."""
    made, texts = asked(name)
    taps = two_layers(name)
    drafter = Tapping(mixed(texts, VOCABULARY), taps=taps)
    play = Play(subject(name), drafter=drafter, depth=3, ahead=ahead)
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    assert group._depth is not None
    rng, waiting, checked, gone = random.Random(5), list(made.items()), 0, set()
    while waiting or len(group):
        if waiting and len(group) < 3:
            play.admit(*waiting.pop(0))
        if len(group) > 2 and rng.random() < 0.1:
            gone.add(rng.choice(group.keys))
            group.leave(gone, play.events.extend)
        group._depth.most = rng.choice([0, 3])
        play.step()
        if group._flight is None:
            for key in group.keys:
                covered = [*made[key].prompt, *play.tokens(key)][:-1]
                assert drafter.texts[key] == covered
                agree(drafter.states[key], hooked(name, covered, taps))
                checked += 1
    assert checked > 20
    compare(name, play, {key: request for key, request in made.items() if key not in gone}, texts)
    plain = sum(play.statistics(key).forwards - play.statistics(key).drafts.rounds for key in made if key not in gone)
    assert plain > 10, "some steps were plain"


def test_the_executor_gives_what_is_tapped_of_the_end_of_each_prompt() -> None:
    """In pieces, two of them at once, of a model whose pieces would share a forward."""
    family, taps = load(PLAIN), two_layers(PLAIN)
    rng = random.Random(8)
    made = {
        key: Request(
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(length)),
            max_tokens=12,
            eos=frozenset(),
            drafts=frozenset({"guesses"}),
        )
        for key, length in (("a", 30), ("b", READ_OF_PROMPT + 22))
    }
    texts = {key: alone(subject(PLAIN), request) for key, request in made.items()}
    drafter = Tapping(lambda key, drawn, depth: texts[str(key)][drawn : drawn + depth], taps=taps)
    packer = packing.inspect(family.forward, family.composition).packer
    assert packer is not None
    executor = Executor(
        family.forward,
        family.composition,
        subject(PLAIN).vocabulary,
        Ahead.BUILD,
        verify=VerifyCosts(),
        drafter=drafter,
        packer=packer,
    )
    told: list[Any] = []
    start = list(made.items())
    for at in range(0, READ_OF_PROMPT + 22, 16):
        pieces = [
            Piece(key, width, ends=True)
            for key, request in made.items()
            if (width := min(16, len(request.prompt) - at)) > 0
        ]
        executor.iterate(Iteration(True, pieces[0], beside=tuple(pieces[1:])), start, (), told.extend)
        start = []
    while executor.iterate(Iteration(True, None), (), (), told.extend).running:
        for key, state in drafter.states.items():
            covered = drafter.texts[key]
            agree(state, hooked(PLAIN, covered, taps)[:, -state.shape[1] :])
            assert state.shape[1] == len(covered) - max(len(made[str(key)].prompt) - READ_OF_PROMPT, 0)
    for key in made:
        assert [event.sample.token for event in told if isinstance(event, Drawn) and event.key == key] == texts[key]


def test_a_group_whose_drafter_taps_what_cannot_be_is_refused_when_it_is_made() -> None:
    family = load("gemma3n")
    rows, drafter = Rows(family.composition, widest=WIDEST), Tapping(mixed({}, VOCABULARY), taps=(0,))
    with pytest.raises(Untappable, match="layer 0 can't be tapped"):
        SpeculativeGroup(
            family.forward, rows, Ahead.BUILD, costs=Cheap(), drafter=drafter, depth=Depth(2, VerifyCosts())
        )
