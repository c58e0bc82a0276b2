"""Compiled decode gives what eager decode gives, and every function is traced once, whoever joins, leaves or grows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.methods.step import EagerSteps, StepBuilder
from mlxbcd.model.forward import Forward, Group
from mlxbcd.residency.build import Built, build
from mlxbcd.state.bucket import Bucket
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from oracle import coverage
from oracle.alone import relative_error
from oracle.crowd import Newcomer
from oracle.families import FAMILIES, VOCABULARY, load
from oracle.guesses import Guesses, mixed
from oracle.probes import PASS
from oracle.programs import CompiledPrograms, run_programs
from oracle.speculation import Play, Subject, alone, requests
from oracle.traced import CompiledCrowd
from tracing import needs_a_compiler, traced

pytestmark = needs_a_compiler

TABLE = coverage.read()


@pytest.mark.parametrize("name", ["llama", "exaone4", "deepseek_v3", "falcon_h1"])
def test_short_programs_through_traced_functions_give_each_row_what_it_gives_alone(name: str) -> None:
    """Full attention, windows, keys the model computes with itself, and recurrent layers."""
    with traced():
        run_programs(CompiledPrograms, name, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in FAMILIES if TABLE[name]["compiled"] == PASS])
def test_any_program_through_traced_functions_gives_each_row_what_it_gives_alone(name: str) -> None:
    with traced():
        run_programs(CompiledPrograms, name, 10)


def test_operations_may_be_fused_too() -> None:
    crowd = CompiledCrowd(load("llama"))
    with traced(fused=True):
        crowd.admit([Newcomer(0, 5), Newcomer(1, 13)])
        for _ in range(3):
            crowd.step()
    crowd.check_traces()
    assert crowd.compiled == 3


@pytest.mark.parametrize("name", ["llama", "exaone4"])
def test_rounds_through_traced_functions_draw_what_plain_decoding_draws(name: str) -> None:
    """Full attention, and windows, where a round's tokens go around a ring."""
    family = load(name)
    hidden = family.forward.hidden(mx.array([[1]]), family.composition.make_stock())
    subject = Subject(family.forward, family.composition, family.forward.head(hidden).shape[-1])
    made = requests(4, VOCABULARY, length=20)
    texts = {key: alone(subject, request) for key, request in made.items()}
    rounds = CompiledSteps(family.forward, always=True)
    play = Play(subject, drafter=Guesses(mixed(texts, VOCABULARY)), rounds=rounds)
    with traced():
        play.run(made, together=3)
    assert {key: play.tokens(key) for key in made} == texts
    assert len(rounds.traces) > 2
    assert set(rounds.traces) == {1}


@pytest.fixture(scope="module")
def built(model_directory: Path) -> Iterator[Built]:
    mx.disable_compile()
    made = build(model_directory, lambda done, total: None, lambda: False)
    yield made
    made.close()


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("steps", "fused"), [(18, False), pytest.param(200, True, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_the_real_model_gives_the_same_logits_compiled_and_eager(built: Built, steps: int, fused: bool) -> None:
    """Rows of texts of their own join, leave, and grow into a larger class, in two collections alike."""
    forward, rng = built.executor.forward, random.Random(steps)
    compiled = CompiledSteps(forward, always=True)
    sides: list[tuple[Rows, StepBuilder]] = [
        (Rows(built.executor.composition, widest=1), builder) for builder in (EagerSteps(forward), compiled)
    ]
    texts: dict[Key, list[int]] = {}
    shapes, worst = set(), 0.0
    for step in range(steps):
        rows, _ = sides[0]
        leaving = {key for key in rows.order if rng.random() < 0.03}
        if step % 6 == 0 and len(rows) < 4:
            texts[step] = [rng.randrange(100, 40_000) for _ in range(20 if step % 12 else 265)]
            state = prefilled(built, step, texts[step])
            for collection, _ in sides:
                keep = [key for key in collection.order if key not in leaving]
                joiner = Joiner(step, state.read(step), len(texts[step]) + 1)
                commit(collection.prepare(keep=keep, join=[joiner]))
        token = {key: rng.randrange(100, 40_000) for key in rows.order}
        logits = []
        for collection, builder in sides:
            turn = collection.begin(1)
            ids = mx.array([token[key] for key in collection.order])
            with traced(fused=fused):
                logits.append(builder.logits(turn, ids))
                mx.eval(logits[-1])
            shapes.add((Bucket.of(turn.step), tuple(array.shape for array in collection.arrays())))
            turn.resolve()
        assert compiled.off is None
        worst = max(worst, relative_error(logits[1], logits[0]))
    assert worst <= 1e-4
    assert compiled.traces == [1] * len(shapes)
    assert 1 < len(shapes) < steps / 2
    assert any(len(bucket.segments) > 1 for bucket, _ in shapes), "rows of two classes ran together"


def prefilled(built: Built, key: Key, text: list[int]) -> Rows:
    """A row that has processed a text, by itself."""
    rows = Rows(built.executor.composition)
    commit(rows.prepare(join=[Joiner(key, COLD, len(text))]))
    turn = rows.begin(len(text))
    forward: Forward = built.executor.forward
    forward.run([Group(mx.array([text]), turn.caches)])
    mx.eval(turn.arrays())
    turn.resolve()
    return rows
