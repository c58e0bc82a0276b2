"""Compiled steps: which are, which aren't and why, and that tokens don't tell."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from tiny import LLAMA, VOCABULARY, make_model, make_request, oracle, parts

from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.methods.events import Drawn, Event
from mlxbcd.methods.step import Off
from mlxbcd.model.forward import Forward, Group
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler, sample
from mlxbcd.state.alone import AloneRow
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from tracing import needs_a_compiler, traced

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 12, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": ((3, 2.0),), "presence_penalty": 0.5},
    {"logprobs": True, "top_logprobs": 3},
]


@pytest.fixture(autouse=True)
def _tracing() -> Iterator[None]:
    forward, _ = parts("llama")
    assert forward
    with traced():
        yield


class Bench:
    """A group whose steps are compiled wherever they can be, and the tokens of its rows."""

    def __init__(self, ahead: Ahead, steps: CompiledSteps, name: str = "llama") -> None:
        self.forward, self.composition = parts(name)
        self.steps = steps
        self.group = DecodeGroup(self.forward, Rows(self.composition, widest=1), ahead, steps)
        self.tokens: dict[Key, list[int]] = {}
        self.offs: list[Off | None] = []

    def join(self, key: Key, request: Request) -> None:
        state = Rows(self.composition)
        commit(state.prepare(join=[Joiner(key, COLD, len(request.prompt))]))
        turn = state.begin(len(request.prompt))
        (hidden,) = self.forward.run([Group(mx.array([request.prompt]), turn.caches)])
        row = Row(key, request, RowSampler(request.sampling, request.prompt, VOCABULARY))
        (drawn,) = sample(self.forward.head(hidden[:, -1:])[:, -1], [row.sampler]).read()
        turn.resolve()
        self.tokens[key] = []
        self.emit([row.take(drawn)])
        if not row.ended:
            self.group.settle(self.emit)
            self.group.join(row, Joiner(key, state.read(key), len(request.prompt) + 1))

    def step(self) -> None:
        self.group.step(self.emit)
        self.offs.append(self.steps.off)

    def emit(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, Drawn)
            self.tokens[event.key].append(event.sample.token)


@needs_a_compiler
@pytest.mark.parametrize("ahead", Ahead)
def test_rows_that_join_and_leave_draw_what_each_draws_alone_and_every_function_is_traced_once(ahead: Ahead) -> None:
    rng = random.Random(5)
    bench = Bench(ahead, CompiledSteps(parts("llama")[0], always=True))
    requests: dict[Key, Request] = {}
    gone: set[Key] = set()
    for step in range(60):
        if step % 3 == 0 and len(bench.group) < 5:
            settings = SETTINGS[len(requests) % len(SETTINGS)] | {"seed": step}
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 5, 20, 268]))]
            requests[step] = make_request(prompt, rng.randint(2, 14), **settings)
            bench.join(step, requests[step])
        if step % 11 == 10 and len(bench.group):
            leaving = rng.choice(bench.group.keys)
            bench.group.leave([leaving], bench.emit)
            gone.add(leaving)
        bench.step()
    while len(bench.group):
        bench.step()
    assert len(requests) > 12
    for key, request in requests.items():
        whole = oracle(request)
        assert bench.tokens[key] == (whole[: len(bench.tokens[key])] if key in gone else whole), key
    assert set(bench.steps.traces) == {1}
    assert bench.offs.count(None) >= 60


@needs_a_compiler
def test_a_group_that_was_discarded_is_not_held() -> None:
    bench = Bench(Ahead.BUILD, CompiledSteps(parts("llama")[0], always=True))
    bench.join(0, make_request([1, 2, 3], 40))
    for _ in range(4):
        bench.step()
    assert bench.steps.off is None
    state = bench.group._state
    assert isinstance(state, Rows)
    arrays = [weakref.ref(layout) for layout in state.layouts]
    held = weakref.ref(state)
    del state
    bench.group.discard()
    gc.collect()
    assert held() is None
    assert not any(layout() for layout in arrays)
    bench.join(1, make_request([1, 2, 3], 40))
    for _ in range(4):
        bench.step()
    assert set(bench.steps.traces) == {1}, "another collection of the same shape needs no other function"


@needs_a_compiler
def test_functions_that_nobody_used_for_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbcd.methods.compiled._MOST", 2)
    bench = Bench(Ahead.BUILD, CompiledSteps(parts("llama")[0], always=True))
    for key in range(4):
        bench.join(key, make_request([1, 2, 3], 40))
        bench.step()
        bench.step()
    assert len(bench.steps.traces) == 2


@needs_a_compiler
@pytest.mark.parametrize("faster", [True, False])
def test_steps_are_compiled_where_that_was_measured_to_be_faster(faster: bool) -> None:
    now = [0.0]
    steps = CompiledSteps(parts("llama")[0], clock=lambda: now[0])
    bench = Bench(Ahead.BUILD, steps)
    bench.join(0, make_request([1, 2, 3], 1000))
    for _ in range(80):
        bench.step()
        now[0] += 0.8 if (steps.off is None) == faster else 1.0
    assert bench.offs[0] is Off.NEW
    assert {Off.TRIAL, None} <= set(bench.offs)
    assert set(bench.offs[-10:]) == {None if faster else Off.SLOWER}


def test_a_step_over_a_cold_row_is_eager() -> None:
    forward, composition = parts("llama")
    rows = Rows(composition)
    commit(rows.prepare(join=[Joiner(0, COLD, 4)]))
    steps = CompiledSteps(forward, always=True)
    steps.logits(rows.begin(1), mx.array([1]))
    assert steps.off is Off.COLD


def test_a_row_that_runs_alone_is_stepped_eagerly() -> None:
    forward, composition = parts("llama")
    steps = CompiledSteps(forward, always=True)
    steps.logits(AloneRow(composition, 0).begin(1), mx.array([1]))
    assert steps.off is Off.ALONE


class Peeking(Forward):
    """A forward that looks at its hidden states while it runs."""

    def hidden(self, ids: mx.array, caches: Any) -> mx.array:
        hidden = super().hidden(ids, caches)
        mx.eval(hidden)
        return hidden


class Growing(Forward):
    """A forward after which the keys have another type."""

    def hidden(self, ids: mx.array, caches: Any) -> mx.array:
        hidden = super().hidden(ids, caches)
        caches[0].keys = caches[0].keys.astype(mx.float16).astype(mx.float32)[:, :, :-1]
        return hidden


@needs_a_compiler
@pytest.mark.parametrize(("kind", "off"), [(Peeking, Off.UNTRACEABLE), (Growing, Off.UNFIXED)])
def test_a_model_that_cannot_be_traced_is_stepped_eagerly(kind: type[Forward], off: Off) -> None:
    model = make_model(LLAMA)
    composition = inspect(model, "llama")
    rows = run(Forward(model), composition)
    forward = kind(model)
    steps = CompiledSteps(forward, always=True)
    turn = rows.begin(1)
    before = [array.shape for array in rows.arrays()]
    with traced():
        # What is traced fails; then the same is built eagerly, which for the second kind breaks its state.
        logits = steps.logits(turn, mx.array([5]))
    assert steps.off is off
    if kind is Peeking:
        assert [array.shape for array in rows.arrays()] == before
        mx.eval(logits)
        again = run(Forward(model), composition)
        turn = again.begin(1)
        (hidden,) = forward.run([Group(mx.array([[5]]), turn.caches)])
        assert mx.array_equal(logits, forward.head(hidden)[:, -1])


def run(forward: Forward, composition: Composition) -> Rows:
    """One row that has processed three tokens."""
    rows = Rows(composition)
    commit(rows.prepare(join=[Joiner(0, COLD, 8)]))
    turn = rows.begin(3)
    forward.run([Group(mx.array([[1, 2, 3]]), turn.caches)])
    mx.eval(turn.arrays())
    turn.resolve()
    return rows


@needs_a_compiler
@pytest.mark.parametrize(("kind", "off"), [(Forward, None), (Peeking, Off.UNTRACEABLE)])
def test_whether_a_model_can_be_traced_is_known_without_running_it(
    kind: type[Forward], off: Off | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(LLAMA)
    forward = kind(model)
    composition = inspect(model, "llama")
    with traced():
        if kind is Forward:
            monkeypatch.setattr(mx, "async_eval", None)
        assert CompiledSteps(forward).refusal(composition) is off
