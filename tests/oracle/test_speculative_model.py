"""Speculation on the real model: the same tokens with it as without, by the exactness rule, alone and in a crowd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward
from mlxbcd.model.load import load, read_config
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.spec.draft_model import ModelDrafter
from mlxbcd.state.composition import inspect
from mlxbcd.state.geometry import Key
from mlxbcd.text.tokenizer import Tokenizer
from oracle.agreement import Tally
from oracle.prompts import ledger, module
from oracle.speculation import Play, Subject, alone

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

DEPTH = 3
LENGTHS = pytest.mark.parametrize("length", [16, pytest.param(64, marks=pytest.mark.slow)])
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=11),
    Sampling(repetition_penalty=1.1),
    Sampling(top_k=1, temperature=1.0),
)


@pytest.fixture(scope="module")
def subject(model_directory: Path) -> Subject:
    model = load(model_directory).model
    forward = Forward(model)
    composition = inspect(model, str(read_config(model_directory)["model_type"]))
    return Subject(forward, composition, model.args.vocab_size)


@pytest.fixture(scope="module")
def prompts(model_directory: Path) -> list[list[int]]:
    """Texts that go on as they began: a ledger, code, and a list."""
    tokenizer = Tokenizer.load(model_directory)
    texts = ledger(3, 7), module(2), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,", "red green blue red green blue red green"
    return [tokenizer.encode(text)[:90] for text in texts]


def asked(prompts: Sequence[Sequence[int]], length: int) -> dict[Key, Request]:
    pairs = zip(prompts, SAMPLINGS, strict=True)
    return {
        key: Request(prompt=tuple(prompt), max_tokens=length, eos=frozenset(), sampling=sampling)
        for key, (prompt, sampling) in enumerate(pairs)
    }


def scores(subject: Subject, request: Request, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    from oracle.teacher import score

    text, begin = [*request.prompt, *tokens], len(request.prompt)
    logits = np.array(subject.forward.model(mx.array([text[:-1]]))[0, begin - 1 :], dtype=np.float64)
    return np.array([score(row, request.sampling, text[: begin + n], n) for n, row in enumerate(logits)])


def compare(subject: Subject, play: Play, made: dict[Key, Request]) -> None:
    tally = Tally()
    for key, request in made.items():
        tokens = play.tokens(key)
        tally.compare(f"{key}", tokens, alone(subject, request), partial(scores, subject, request, tokens))
    assert len(tally.near_ties) <= 1, tally


@LENGTHS
def test_rows_that_copy_draw_what_they_draw_without_it(subject: Subject, prompts: list[list[int]], length: int) -> None:
    made = asked(prompts, length)
    play = Play(subject, echo=True)
    play.run(made, together=4)
    compare(subject, play, made)
    assert sum(play.statistics(key).accepted for key in made) > length / 2


@LENGTHS
def test_the_model_drafting_for_itself_gives_depth_and_one_tokens_a_forward(
    subject: Subject, prompts: list[list[int]], length: int
) -> None:
    drafter = ModelDrafter(subject.forward, subject.composition, subject.vocabulary)
    made = {key: replace(request, sampling=Sampling()) for key, request in asked(prompts[2:3] * 4, length).items()}
    play = Play(subject, drafter=drafter, depth=DEPTH)
    play.run({0: made[0]}, together=1)
    compare(subject, play, {0: made[0]})
    figures = play.statistics(0)
    assert figures.drafts.accepted == figures.drafts.drafted
    assert figures.forwards == -(-figures.generated // (DEPTH + 1))


def test_its_first_layers_draft_for_it(subject: Subject, prompts: list[list[int]], model_directory: Path) -> None:
    whole = subject.forward.model
    config = read_config(model_directory) | {"num_hidden_layers": 20}
    model_class, args_class = zoo.model_classes(config)
    first = model_class(args_class.from_dict(config))
    for part, shared in (("embed_tokens", whole.model.embed_tokens), ("norm", whole.model.norm)):
        setattr(first.model, part, shared)
    first.model.layers = whole.model.layers[:20]
    first.eval()
    drafter = ModelDrafter(Forward(first), inspect(first, str(config["model_type"])), subject.vocabulary)
    made = {0: asked(prompts, 16)[0]}
    play = Play(subject, drafter=drafter, depth=DEPTH)
    play.run(made, together=1)
    compare(subject, play, made)
    assert play.statistics(0).drafted > 0
