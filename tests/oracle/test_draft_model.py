"""Two models: one drafts for another, for itself, or as the first layers of it, and its states follow the target's."""

from __future__ import annotations

import dataclasses
import random

import mlx.core as mx
import pytest

from mlxbcd.methods.speculative import SpeculativeGroup
from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.spec.draft_model import CHUNK, ModelDrafter
from mlxbcd.spec.drafter import Asked, Selection
from mlxbcd.state.composition import inspect
from mlxbcd.state.geometry import Key, capacity_for
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from oracle.families import CONFIGS, VOCABULARY, load
from oracle.speculation import Play, alone, requests
from oracle.test_speculative import (
    PLAIN,
    RECURRENT,
    WINDOWED,
    _logits,
    asked,
    compare,
    covers_what_was_delivered,
    subject,
)

DEPTH = 4


def drafter_of(name: str, layers: int | None = None, selection: Selection = Selection.REQUEST) -> ModelDrafter:
    """The family's own model, or its first layers with the same weights."""
    family = load(name)
    forward, composition = family.forward, family.composition
    if layers is not None:
        config = CONFIGS[name] | {"num_hidden_layers": layers}
        model_class, args_class = zoo.model_classes(config)
        model = model_class(args_class.from_dict(config))
        model.update(
            {
                "model": {
                    "embed_tokens": family.model.model.embed_tokens.parameters(),
                    "layers": [layer.parameters() for layer in family.model.model.layers[:layers]],
                    "norm": family.model.model.norm.parameters(),
                }
            }
        )
        if "lm_head" in family.model:
            model.update({"lm_head": family.model.lm_head.parameters()})
        model.eval()
        forward, composition = Forward(model), inspect(model, zoo.module_name(config))
    return ModelDrafter(forward, composition, subject(name).vocabulary, selection=selection)


@pytest.mark.parametrize("name", [PLAIN, pytest.param(WINDOWED, marks=pytest.mark.slow)])
def test_a_model_that_drafts_for_itself_is_always_right(name: str) -> None:
    made, texts = asked(name)
    play = Play(subject(name), drafter=drafter_of(name), depth=DEPTH)
    play.run(made, together=4, check=covers_what_was_delivered)
    compare(name, play, made, texts)
    for key, request in made.items():
        figures = play.statistics(key)
        assert figures.drafts.accepted == figures.drafts.drafted, request.sampling
        assert figures.forwards == -(-figures.generated // (DEPTH + 1)), "each forward gives depth + 1 tokens"


@pytest.mark.parametrize("selection", Selection)
def test_the_first_layers_of_a_model_draft_for_all_of_it(selection: Selection) -> None:
    made, texts = asked(PLAIN)
    drafter = drafter_of(PLAIN, layers=len(load(PLAIN).model.layers) - 1, selection=selection)
    play = Play(subject(PLAIN), drafter=drafter, depth=DEPTH)
    play.run(made, together=4, check=covers_what_was_delivered)
    compare(PLAIN, play, made, texts)
    accepted, drafted = (sum(getattr(play.statistics(key), of) for key in made) for of in ("accepted", "drafted"))
    assert 0 < accepted < drafted


def test_a_draft_model_whose_vocabulary_is_padded_less_changes_no_token() -> None:
    """It lacks the last tokens, and the rows draw some of them."""
    made, texts = asked(PLAIN)
    narrow = CONFIGS[PLAIN] | {"vocab_size": subject(PLAIN).vocabulary // 2}
    model_class, args_class = zoo.model_classes(narrow)
    model = model_class(args_class.from_dict(narrow))
    mx.eval(model.parameters())
    drafter = ModelDrafter(Forward(model), inspect(model, zoo.module_name(narrow)), subject(PLAIN).vocabulary)
    assert any(token >= narrow["vocab_size"] for text in texts.values() for token in text)
    play = Play(subject(PLAIN), drafter=drafter, depth=DEPTH)
    play.run(made, together=4, check=covers_what_was_delivered)
    compare(PLAIN, play, made, texts)
    assert sum(play.statistics(key).drafted for key in made) > len(made)


def test_drafts_by_a_rows_own_rules_are_right_more_often_than_the_likeliest_tokens() -> None:
    """Draft and target share the noise of each draw."""
    made, _ = asked(PLAIN)
    random_rows = {key: request for key, request in made.items() if request.sampling.temperature}

    def right(selection: Selection) -> int:
        play = Play(subject(PLAIN), drafter=drafter_of(PLAIN, selection=selection), depth=DEPTH)
        play.run(random_rows, together=4)
        return sum(play.statistics(key).accepted for key in random_rows)

    assert right(Selection.REQUEST) > 1.2 * right(Selection.LIKELIEST)


@pytest.mark.parametrize("name", [PLAIN, WINDOWED])
def test_companions_cover_what_the_target_covers_whatever_happens(name: str) -> None:
    """Rounds, plain steps, echoed spans, joins and leaves: what a drafter has read and owes is each row's text."""
    made, texts = asked(name)
    rng = random.Random(4)
    drafter = drafter_of(name, layers=len(load(name).model.layers) if name == WINDOWED else None)
    play = Play(subject(name), drafter=drafter, depth=3, echo=True)
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    waiting = list(made.items())
    while waiting or len(group):
        if waiting and len(group) < 4:
            key, request = waiting.pop(0)
            play.admit(key, request, [texts[key]] if rng.random() < 0.5 else [])
        if len(group) > 2 and rng.random() < 0.15:
            group.leave([rng.choice(group.keys)], play.events.extend)
        if group._depth is not None:
            group._depth.most = rng.choice([0, 3, 3])
        play.step()
        if group._flight is None:
            for key in group.keys:
                covered = len(made[key].prompt) + len(play.tokens(key)) - 1
                assert drafter._own.rows.lengths[key] + len(drafter._own.owed[key]) == covered
                if rng.random() < 0.2:
                    check_companion(drafter, key, [*made[key].prompt, *play.tokens(key)])


def test_rows_outgrow_their_room_in_the_middle_of_a_draft_whatever_their_layers_see() -> None:
    """What a window no longer holds of a row that moves can't be taken back."""
    rng, room = random.Random(9), capacity_for(100)
    made = {
        key: dataclasses.replace(request, prompt=tuple(rng.randrange(VOCABULARY) for _ in range(room - 12 + i)))
        for i, (key, request) in enumerate(requests(6, VOCABULARY, length=30).items())
    }
    drafter = drafter_of(WINDOWED, selection=Selection.LIKELIEST)
    play = Play(subject(WINDOWED), drafter=drafter, depth=DEPTH)
    play.run(made, together=3, check=covers_what_was_delivered)
    for key, request in made.items():
        assert play.tokens(key) == alone(subject(WINDOWED), request)
    assert any(play.statistics(key).accepted < play.statistics(key).drafted for key in made)


def check_companion(drafter: ModelDrafter, key: Key, text: list[int]) -> None:
    """A captured companion gives the logits of a row that has just read the text, its last token left out."""
    companion = drafter.capture(key)
    assert (companion.length, companion.owed) == (len(text) - 1, [])
    ours, anew = Rows(drafter.composition), Rows(drafter.composition)
    commit(ours.prepare(join=[Joiner(key, companion.state, len(text))]))
    commit(anew.prepare(join=[Joiner(key, COLD, len(text))]))
    for token in text[:-1]:
        _logits(drafter.forward, anew, token)
    got, wanted = _logits(drafter.forward, ours, text[-1]), _logits(drafter.forward, anew, text[-1])
    assert mx.abs(got - wanted).max().item() <= 2e-3 * mx.abs(wanted).max().item()


def test_a_long_text_is_read_in_pieces_before_anything_is_proposed() -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(VOCABULARY) for _ in range(2 * CHUNK + 10)]
    request = Request(prompt=tuple(prompt), max_tokens=20, eos=frozenset())
    drafter = drafter_of(PLAIN)
    play = Play(subject(PLAIN), drafter=drafter, depth=2)
    play.admit(0, request)
    read = []
    while len(play.group):
        play.step()
        if 0 in drafter._own.rows:
            read.append(drafter._own.rows.lengths[0])
    assert read[:2] == [CHUNK, 2 * CHUNK]
    figures = play.statistics(0)
    assert figures.drafts.accepted == figures.drafts.drafted > 0


def test_a_draft_model_whose_state_cannot_be_cut_back_is_refused() -> None:
    family = load(RECURRENT)
    with pytest.raises(ValueError, match="can't be cut back"):
        ModelDrafter(family.forward, family.composition, 10)


def test_what_a_draft_takes_is_measured() -> None:
    drafter = drafter_of(PLAIN)
    assert drafter.seconds(1, 4) == 0.0
    play = Play(subject(PLAIN), drafter=drafter, depth=DEPTH)
    play.run(requests(2, VOCABULARY, length=12), together=2)
    assert 0 < drafter.seconds(2, 1) < drafter.seconds(2, 4) == 4 * drafter.seconds(2, 1)


def test_asking_draws_nothing() -> None:
    """A row's own sampler stays where it is, and so does its history."""
    made, _ = asked(PLAIN)
    request = made[3]
    assert request.sampling.penalised
    drafter = drafter_of(PLAIN)
    sampler = RowSampler(request.sampling, request.prompt, subject(PLAIN).vocabulary)
    assert sampler.history is not None
    before = sampler.history.counts.tolist()
    change = drafter.prepare(keep=(), join={0: drafter_companion(request)})
    commit(*change.prepared)
    change.commit()
    drafter.draft([Asked(0, request.prompt[-1], sampler, 4)], 4)
    assert (sampler.index, sampler.history.counts.tolist()) == (0, before)


def drafter_companion(request: Request) -> object:
    from mlxbcd.spec.drafter import Companion

    return Companion(COLD, list(request.prompt[:-1]))
