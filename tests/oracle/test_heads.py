"""Multi-token prediction: a head of a checkpoint drafts; whatever it says tokens stay, and its state is right."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlxbcd.cache.service import PrefixCache
from mlxbcd.engine.runner import Leaving
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.autoregressive import Row
from mlxbcd.methods.events import Drawn, Prefilled, Speculated
from mlxbcd.methods.speculative import SpeculativeGroup
from mlxbcd.model import heads
from mlxbcd.model.load import load as load_model
from mlxbcd.plan.request import Caching, Keep, Request, Sampling
from mlxbcd.residency import build as build_module
from mlxbcd.residency.build import Built, build
from mlxbcd.spec.drafter import LOOKUP, READ_OF_PROMPT, Asked, Selection
from mlxbcd.spec.heads import HeadDrafter
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import Rows
from oracle.families import CONFIGS, VOCABULARY, load
from oracle.speculation import Play, Subject, alone, requests
from oracle.test_speculative import covers_what_was_delivered

CONFIG = CONFIGS["mimo"]
WIDTH = CONFIG["hidden_size"]
DEPTH = 3


def write_checkpoint(directory: Path, head: dict[str, mx.array], **zeroed: bool) -> Path:
    """A checkpoint of the family as its makers write it: the zoo's names, and the head's."""
    parameters = dict(tree_flatten(load("mimo").model.parameters()))
    if zeroed:
        parameters = {name: mx.zeros_like(array) if _mixes(name) else array for name, array in parameters.items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), parameters | head)
    return directory


def _mixes(name: str) -> bool:
    """Whether a weight lets a layer add anything to what it is given."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def random_head() -> dict[str, mx.array]:
    layer = dict(tree_flatten(load("mimo").model.model.layers[0].parameters()))
    mx.random.seed(7)
    parts: dict[str, Any] = tree_map(lambda array: mx.random.normal(array.shape) * 0.2, layer)
    parts["input_proj.weight"] = mx.random.normal((WIDTH, 2 * WIDTH)) * 0.2
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        parts[f"{norm}.weight"] = mx.ones(WIDTH)
    return {f"model.mtp_layers.0.{name}": array for name, array in parts.items()}


def knowing_head() -> dict[str, mx.array]:
    """For a model whose layers add nothing, so that each token follows from the one before it: a head that passes on
    the token it is given."""
    head = random_head()
    for name, array in head.items():
        if _mixes(name):
            head[name] = mx.zeros_like(array)
    head["model.mtp_layers.0.input_proj.weight"] = mx.concatenate([mx.zeros((WIDTH, WIDTH)), mx.eye(WIDTH)], axis=1)
    head["model.mtp_layers.0.final_layernorm.weight"] = load("mimo").model.model.norm.weight
    return head


@lru_cache(maxsize=2)
def built(directory: Path) -> Built:
    return build(directory, lambda done, total: None, lambda: False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("heads")
    write_checkpoint(store / "random", random_head())
    write_checkpoint(store / "knowing", knowing_head(), layers=True)
    write_checkpoint(store / "none", {})
    return store


def subject_of(model: Built) -> Subject:
    executor = model.executor
    return Subject(executor.forward, executor.composition, executor.vocab_size)


def drafter_of(model: Built) -> HeadDrafter:
    """A drafter like the executor's own, without rows."""
    executor = model.executor
    assert isinstance(executor.drafter, HeadDrafter)
    return HeadDrafter(executor.forward, executor.drafter.head, executor.vocab_size)


def test_a_checkpoints_head_is_read_before_the_zoo_drops_it(store: Path) -> None:
    model = built(store / "random")
    assert model.drafters == (LOOKUP, "mtp")
    drafter = model.executor.drafter
    assert isinstance(drafter, HeadDrafter)
    read = dict(tree_flatten(drafter.head.parameters()))
    for name, array in random_head().items():
        part, _, leaf = name.removeprefix("model.mtp_layers.0.").partition(".")
        ours = {
            "input_proj": "projection",
            "token_layernorm": "token_norm",
            "hidden_layernorm": "hidden_norm",
            "final_layernorm": "norm",
        }
        assert mx.array_equal(read.pop(f"{ours.get(part, f'block.{part}')}.{leaf}"), array).item()
    assert read == {}


def test_a_checkpoint_without_a_head_has_no_such_drafter(store: Path) -> None:
    model = build(store / "none", lambda done, total: None, lambda: False)
    assert model.drafters == (LOOKUP,)
    assert load_model(store / "none").head == {}


def test_packed_and_foreign_heads_are_left_out() -> None:
    head = random_head()
    assert heads.extract("llama", head) == {}
    assert heads.extract("mimo", head | {"model.mtp_layers.0.input_proj.scales": mx.zeros(1)}) == {}


def test_a_head_that_does_not_fit_is_left_out_and_the_model_runs(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = random_head()
    del head["model.mtp_layers.0.input_proj.weight"]
    model = build(write_checkpoint(store / "broken", head), lambda done, total: None, lambda: False)
    assert model.drafters == (LOOKUP,)
    assert "does not fit" in caplog.text


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["random", "knowing"])
def test_tokens_are_the_same_with_a_head_as_without(store: Path, kind: str, batch: int) -> None:
    model = built(store / kind)
    made = requests(6, VOCABULARY, length=16)
    texts = {key: alone(subject_of(model), request) for key, request in made.items()}
    play = Play(subject_of(model), drafter=drafter_of(model), depth=DEPTH)
    play.run(made, together=batch, check=covers_what_was_delivered)
    assert {key: play.tokens(key) for key in made} == texts
    figures = [play.statistics(key).drafts for key in made]
    assert all(each.drafted for each in figures)
    if kind == "knowing":
        assert all(each.accepted == each.drafted for each in figures), "it knows every next token"


@pytest.mark.parametrize("selection", Selection)
def test_a_head_that_scores_listed_tokens_drafts_these_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch, selection: Selection
) -> None:
    """It knows every next token: a draft is right up to the first one that isn't listed."""
    model = built(store / "knowing")
    listed = random.Random(9).sample(range(VOCABULARY), VOCABULARY * 3 // 4)
    drafter = listing_drafter(model, listed, selection)
    made = requests(6, VOCABULARY, length=24)
    texts = {key: alone(subject_of(model), request) for key, request in made.items()}
    play = Play(subject_of(model), drafter=drafter, depth=DEPTH)
    draft, right = HeadDrafter.draft, 0

    def watched(self: HeadDrafter, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        nonlocal right
        drafts = draft(self, rows, depth)
        for row, proposals in zip(rows, drafts, strict=True):
            assert set(proposals) <= set(listed)
            sampling = made[row.key].sampling
            own_rules = bool(sampling.temperature) or sampling.penalised
            if sampling.top_k or sampling.top_p < 1.0 or (own_rules and selection is Selection.LIKELIEST):
                # A filter may keep others among the listed ones, and the likeliest is not what such a row draws.
                continue
            known = list(takewhile(lambda token: token in listed, texts[row.key][len(play.tokens(row.key)) :]))
            assert proposals[: len(known)] == known[: len(proposals)]
            right += min(len(known), len(proposals))
        return drafts

    monkeypatch.setattr(HeadDrafter, "draft", watched)
    play.run(made, together=4, check=covers_what_was_delivered)
    assert {key: play.tokens(key) for key in made} == texts
    assert right > 10


def listing_drafter(model: Built, listed: Sequence[int], selection: Selection = Selection.REQUEST) -> HeadDrafter:
    """With a head like the executor's, whose output layer is the model's own cut to some tokens."""
    forward = model.executor.forward
    head = heads.make("mimo", forward.model, heads.extract("mimo", knowing_head()))
    # What each unit vector scores is a column of the model's output layer.
    columns = forward.head(mx.eye(WIDTH)[None])[0]
    head.scores = len(listed)
    head.output = nn.Linear(WIDTH, len(listed), bias=False)
    head.output.weight = columns.T[mx.array(listed)]
    return HeadDrafter(forward, head, model.executor.vocab_size, selection=selection, listed=listed)


def test_a_list_that_is_not_the_heads_is_refused(store: Path) -> None:
    model = built(store / "knowing")
    head = listing_drafter(model, [1, 2, 3]).head
    with pytest.raises(ValueError, match="scores 3 listed tokens, and the list names 2"):
        HeadDrafter(model.executor.forward, head, model.executor.vocab_size, listed=[1, 2])


def test_a_heads_state_is_what_reading_all_of_a_text_anew_gives(store: Path) -> None:
    """Plain steps, rounds, joins and leaves: entries are true hidden states with the tokens behind them, no others."""
    model = built(store / "random")
    made = requests(5, VOCABULARY, length=20)
    drafter = drafter_of(model)
    play = Play(subject_of(model), drafter=drafter, depth=DEPTH, echo=True)
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    rng, checked = random.Random(6), 0
    waiting = list(made.items())
    while waiting or len(group):
        if waiting and len(group) < 3:
            play.admit(*waiting.pop(0))
        if len(group) > 2 and rng.random() < 0.1:
            group.leave([rng.choice(group.keys)], play.events.extend)
        assert group._depth is not None
        group._depth.most = rng.choice([0, DEPTH])
        play.step()
        if group._flight is None:
            for key in group.keys:
                text = [*made[key].prompt, *play.tokens(key)]
                assert drafter._own.rows.lengths[key] + len(drafter._own.owed[key].tokens) == len(text) - 1
                checked += check_entries(model, drafter, key, text)
    assert checked > 10


def check_entries(model: Built, drafter: HeadDrafter, key: Key, text: list[int]) -> int:
    entries = drafter._own.rows.lengths[key]
    if not entries:
        return 0
    forward = model.executor.forward
    hidden = forward.hidden(mx.array([text[:entries]]), model.executor.composition.make_stock())
    embedded = heads.embedding(forward.model)(mx.array([text[1 : entries + 1]]))
    (stock,) = drafter._own.rows.composition.make_stock()
    drafter.head(hidden, embedded, stock)
    (ours,) = drafter._own.rows.extract(key).layers
    for got, wanted in zip(ours.parts, (stock.keys, stock.values), strict=True):
        assert mx.allclose(got, wanted[:, :, :entries], atol=2e-3).item()
    return 1


def test_the_executor_gives_a_head_the_end_of_each_prompt(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody has measured what verifying costs, so that drafts are made however busy this machine is.
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {})
    model = build(store / "knowing", lambda done, total: None, lambda: False)
    executor = model.executor
    told: list[Any] = []
    rng = random.Random(8)
    for key, length in (("a", 40), ("b", 3)):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        request = Request(
            prompt=prompt,
            max_tokens=30,
            eos=frozenset(),
            sampling=Sampling(temperature=1.0, seed=3),
            drafts=frozenset({"mtp"}),
        )
        for begin in range(0, length, 16):
            width = min(16, length - begin)
            piece = Piece(key, width, ends=begin + width == length)
            executor.iterate(Iteration(True, piece), [(key, request)] if not begin else (), (), told.extend)
    while executor.iterate(Iteration(True, None), (), (), told.extend).running:
        pass
    executor.iterate(Iteration(False, None), (), [Leaving("a")], told.extend)
    for key in ("a", "b"):
        assert sum(isinstance(event, Drawn) and event.key == key for event in told) == 30
        figures = [event for event in told if isinstance(event, Speculated) and event.key == key][-1].statistics
        assert figures.drafts.accepted == figures.drafts.drafted > 10


def test_a_heads_entries_are_kept_and_go_on_in_the_next_turn(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "verify_curve", lambda *model: {})
    model = build(store / "random", lambda done, total: None, lambda: False)
    executor, drafter = model.executor, model.executor.drafter
    assert isinstance(drafter, HeadDrafter)
    assert model.companions is not None
    assert not model.companions.trimmable
    cache = PrefixCache(1 << 30)
    space = executor.reuse.space = cache.space("model", trimmable=True)
    space.companions = cache.space("head", trimmable=False)
    rng = random.Random(10)
    told: list[Any] = []
    # Of a prompt that long a head reads everything.
    text = [rng.randrange(VOCABULARY) for _ in range(READ_OF_PROMPT)]
    for turn in ("first", "second", "third"):
        request = Request(
            prompt=tuple(text),
            max_tokens=20,
            eos=frozenset(),
            drafts=frozenset({"mtp"}),
            caching=Caching(read=True, keep=Keep.RAM),
        )
        executor.iterate(Iteration(True, None), [(turn, request)], (), told.extend)
        (begin,) = [event.position for event in told if isinstance(event, Prefilled) and event.key == turn]
        assert (begin > READ_OF_PROMPT) == (turn != "first")
        executor.iterate(Iteration(True, Piece(turn, len(text) - begin, ends=True)), (), (), told.extend)
        checked = 0
        while executor.iterate(Iteration(True, None), (), (), told.extend).running:
            drawn = [event.sample.token for event in told if isinstance(event, Drawn) and event.key == turn]
            if turn in drafter._own.rows and executor._group.flying == 0:
                row = [*text, *drawn]
                assert drafter._own.rows.lengths[turn] + len(drafter._own.owed[turn].tokens) == len(row) - 1
                checked += check_entries(model, drafter, turn, row)
        assert checked
        drawn = [event.sample.token for event in told if isinstance(event, Drawn) and event.key == turn]
        assert drawn == alone(subject_of(model), request)
        text = [*text, *drawn, *(rng.randrange(VOCABULARY) for _ in range(9))]
    cache.close()
    assert cache.leases == 0


@pytest.mark.parametrize("ago", [0, 1, 3])
@pytest.mark.parametrize("most", [0, DEPTH], ids=["plain", "rounds"])
def test_what_a_head_keeps_of_a_row_that_was_stopped_is_of_the_tokens_it_says(store: Path, most: int, ago: int) -> None:
    """Its text ended some samples ago, and steps behind them may have been under way."""
    model = built(store / "random")
    made = requests(6, VOCABULARY, length=20)
    drafter = drafter_of(model)
    play = Play(subject_of(model), drafter=drafter, depth=DEPTH)
    group = play.group
    assert isinstance(group, SpeculativeGroup)
    assert group._depth is not None
    kept: list[int] = []

    def ended(row: Row, rows: Rows) -> None:
        text = row.sequence
        state = drafter.held(row.key, min(len(text), rows.lengths[row.key]))
        if state is None:
            return
        companion = drafter.revived(state, text[: state.length], None)
        assert companion.length == state.length <= len(text)
        assert companion.hidden is not None
        known = companion.hidden.shape[1]
        hidden = model.executor.forward.hidden(
            mx.array([text[: state.length]]), model.executor.composition.make_stock()
        )
        assert mx.allclose(companion.hidden, hidden[:, -known:], atol=2e-3).item()
        kept.append(known)

    group._ended = ended
    for key, request in made.items():
        play.admit(key, request)
        group._depth.most = DEPTH
        while len(play.tokens(key)) < 6:
            play.step()
        group._depth.most = most
        for _ in range(2):
            play.step()
        group.leave([key], play.events.extend, {key: len(play.tokens(key)) - ago})
    assert kept or ago == 3
