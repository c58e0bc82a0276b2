"""Packed forwards: weights are read once, no state is copied, failures leave nothing behind; why some don't pack."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from test_composition import NESTED, RECURRENT, SOFT_CAPPED
from test_rows_memory import peak_above_active
from tiny import CONFIGS, LLAMA, make_model

from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.packed import Packer
from mlxbcd.model.parts import Parts, Unpackable
from mlxbcd.state import composition, packing
from mlxbcd.state.composition import Composition
from mlxbcd.state.packing import NotPacked
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, Turn, commit
from mlxbcd.state.schemes import Plain
from mlxbcd.state.store import Prefix

LAYERS: Final = LLAMA["num_hidden_layers"]


class Subject:
    """A model behind its seams that packs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.model = make_model(config)
        self.forward = Forward(self.model)
        self.composition: Composition = composition.inspect(self.model, config["model_type"])
        found = packing.inspect(self.forward, self.composition)
        assert found.packer is not None, found
        self.packer: Packer = found.packer

    def rows(self, lengths: Sequence[int], widest: int = 16) -> Rows:
        """A collection of rows that have processed that many tokens."""
        rows = Rows(self.composition, widest=widest)
        for key, length in enumerate(lengths):
            alone = Rows(self.composition, widest=64)
            commit(alone.prepare(join=[Joiner(key, COLD, length + 1)]))
            if length:
                turn = alone.begin(length)
                mx.eval(self.forward.hidden(ids(key, 0, length), turn.caches), turn.arrays())
                turn.resolve()
            commit(rows.prepare(join=[Joiner(key, alone.read(key), length + 1)]))
        return rows

    def groups(self, collections: Sequence[Rows], widths: Sequence[int]) -> tuple[list[Turn], list[Group]]:
        """One turn of each collection."""
        turns = [rows.begin(width) for rows, width in zip(collections, widths, strict=True)]
        groups = []
        for turn in turns:
            tokens = [ids(row, start, turn.step.width) for row, start in enumerate(turn.step.starts)]
            groups.append(Group(mx.concatenate(tokens), turn.caches))
        return turns, groups


def ids(row: int, start: int, width: int) -> mx.array:
    return mx.array([[1 + (7 * row + 3 * (start + n)) % 60 for n in range(width)]])


@pytest.fixture(scope="module")
def llama() -> Subject:
    return Subject(LLAMA)


@pytest.mark.parametrize("config", [LLAMA, CONFIGS["qwen3"], SOFT_CAPPED, RECURRENT, NESTED])
def test_any_number_of_groups_of_any_shape_get_what_each_gets_alone(config: dict[str, Any]) -> None:
    subject = Subject(config)
    lengths, widths = [[3, 9, 5], [0], [17], [2, 2]], [1, 7, 1, 4]
    answers = []
    for run in (subject.forward.run, subject.packer.run):
        collections = [subject.rows(own) for own in lengths]
        _, groups = subject.groups(collections, widths)
        answers.append(run(groups))
        mx.eval(answers[-1])
    for separate, packed in zip(*answers, strict=True):
        assert packed.shape == separate.shape
        assert mx.allclose(packed, separate, rtol=1e-4, atol=1e-4).item()


def test_a_single_group_may_run_packed(llama: Subject) -> None:
    _, alone = llama.groups([llama.rows([4, 6])], [1])
    _, packed = llama.groups([llama.rows([4, 6])], [1])
    (wanted,), (got,) = llama.forward.run(alone), llama.packer.run(packed)
    assert mx.allclose(got, wanted, rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("config", [LLAMA, SOFT_CAPPED, RECURRENT], ids=["together", "in turn", "recurrent"])
def test_every_matrix_is_read_once(config: dict[str, Any], tmp_path: Path) -> None:
    """Counted in the graph: how many products take each projection; all but those inside a recurrence."""
    subject = Subject(config)
    matrices = {
        path.replace(".", "_"): array
        for path, array in tree_flatten(subject.model.parameters())
        if re.search(r"proj\.weight$", path) and not re.search(r"\.(x|dt)_proj\.", path)
    }

    def readers(packed: bool) -> dict[str, int]:
        _, groups = subject.groups([subject.rows([3, 9]), subject.rows([5])], [1, 6])
        hidden = subject.packer.run(groups) if packed else subject.forward.run(groups)
        return readers_of(matrices, hidden, tmp_path / "graph.dot")

    assert set(readers(packed=False).values()) == {2}
    assert set(readers(packed=True).values()) == {1}


def readers_of(arrays: dict[str, mx.array], outputs: list[mx.array], path: Path) -> dict[str, int]:
    """How many operations of the outputs' graph take each array."""
    mx.export_to_dot(str(path), *outputs, **arrays)
    graph = path.read_text()
    return {name: graph.count(f'"{name}" -> ') for name in arrays}


def test_a_packed_step_copies_no_keys_and_values(llama: Subject) -> None:
    decoding, prompt = filled(llama, dict.fromkeys(range(8), 4096)), filled(llama, {8: 4096})
    step_packed(llama, decoding, prompt)
    held = decoding.nbytes + prompt.nbytes
    assert peak_above_active(lambda: step_packed(llama, decoding, prompt)) <= 0.05 * held


def test_a_view_that_somebody_holds_makes_it_copy_so_the_measure_can_fail(llama: Subject) -> None:
    decoding, prompt = filled(llama, dict.fromkeys(range(8), 4096)), filled(llama, {8: 4096})
    step_packed(llama, decoding, prompt)
    view = decoding.layouts[0].arrays()[0][:1, :, :1]
    mx.eval(view)
    assert peak_above_active(lambda: step_packed(llama, decoding, prompt)) > 0.2 * decoding.nbytes / LAYERS


def filled(subject: Subject, lengths: dict[int, int]) -> Rows:
    """Rows with random keys and values, evaluated."""
    rows = Rows(subject.composition, widest=16)
    heads, dim = LLAMA["num_attention_heads"], LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    for key, length in lengths.items():
        parts = [(mx.random.normal((1, heads, length, dim)),) * 2 for _ in range(LAYERS)]
        state = RowState(length, tuple(Prefix(part, 0, Plain()) for part in parts))
        mx.eval(state.arrays)
        commit(rows.prepare(join=[Joiner(key, state, length + 64)]))
    mx.eval([layout.arrays() for layout in rows.layouts])
    return rows


def step_packed(subject: Subject, decoding: Rows, prompt: Rows) -> None:
    turns, groups = subject.groups([decoding, prompt], [1, 8])
    mx.eval(subject.packer.run(groups), [turn.arrays() for turn in turns])
    for turn in turns:
        turn.resolve()


class Broken:
    """A layer's view whose memory has run out."""

    @property
    def offset(self) -> int:
        raise RuntimeError("out of memory")


def test_a_failed_forward_leaves_the_model_as_it_was(llama: Subject) -> None:
    _, groups = llama.groups([llama.rows([3, 9]), llama.rows([5])], [1, 6])
    broken = dataclasses.replace(groups[1], caches=[*groups[1].caches[:-1], Broken()])
    with pytest.raises(RuntimeError, match="out of memory"):
        llama.packer.run([groups[0], broken])
    test_a_single_group_may_run_packed(llama)


def test_turns_of_a_packed_forward_are_resolved_each_by_itself(llama: Subject) -> None:
    decoding, prompt = llama.rows([3, 9]), llama.rows([5])
    turns, groups = llama.groups([decoding, prompt], [4, 6])
    mx.eval(llama.packer.run(groups))
    turns[1].resolve()
    turns[0].resolve([1, 3])
    assert decoding.lengths == {0: 4, 1: 12}
    assert prompt.lengths == {0: 11}


def test_a_turn_that_recurrent_layers_may_take_back_is_refused() -> None:
    subject = Subject(RECURRENT)
    _, groups = subject.groups([subject.rows([5])], [6])
    turn = subject.rows([3, 9]).begin(2, reversible=True)
    with turn.forward() as caches, pytest.raises(ValueError, match="taken back"):
        subject.packer.run([Group(mx.zeros((2, 2), dtype=mx.int32), caches), *groups])


def test_separate_forwards_of_a_model_that_packs_compute_the_same_bits_as_before() -> None:
    def answer(forward: Forward, composed: Composition) -> mx.array:
        rows = Rows(composed)
        commit(rows.prepare(join=[Joiner(0, COLD, 9)]))
        return forward.hidden(ids(0, 0, 9), rows.begin(9).caches)

    model = make_model(LLAMA)
    forward, composed = Forward(model), composition.inspect(model, "llama")
    before = answer(forward, composed)
    mx.eval(before)
    assert packing.inspect(forward, composed).packer is not None
    assert mx.array_equal(answer(forward, composed), before).item()


@pytest.mark.parametrize("config", [LLAMA, SOFT_CAPPED, RECURRENT], ids=["together", "in turn", "recurrent"])
def test_a_model_that_packs_goes_as_soon_as_nobody_uses_it(config: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        subject = Subject(config)
        turns, groups = subject.groups([subject.rows([3, 9]), subject.rows([5])], [1, 6])
        mx.eval(subject.packer.run(groups))
        for turn in turns:
            turn.resolve()
        weights = [weakref.ref(module) for _, module in subject.model.named_modules()]
        del subject, turns, turn, groups
        assert [ref for ref in weights if ref() is not None] == []
    finally:
        gc.enable()


def test_rows_that_run_alone_never_pack() -> None:
    model = make_model(LLAMA)
    composed = dataclasses.replace(composition.inspect(model, "llama"), reason="told to")
    found = packing.inspect(Forward(model), composed)
    assert (found.packer, found.reason, found.detail) == (None, NotPacked.ALONE, "told to")


class Blending(nn.Module):
    """A feed-forward layer that looks at the other tokens of its forward, as no model that decodes can."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def __call__(self, x: mx.array) -> mx.array:
        return self.plain(x) + x.mean(axis=1, keepdims=True)


def test_a_model_whose_packed_layers_answer_something_else_is_refused() -> None:
    model = make_model(LLAMA)
    for layer in model.layers:
        layer.mlp = Blending(layer.mlp)
    found = packing.inspect(Forward(model), composition.inspect(model, "llama"))
    assert found.reason is NotPacked.DIFFERENT
    assert found.packer is None


class Peeking(nn.Module):
    """A trunk that reads the keys it has written."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.layers = plain.layers

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        hidden = self.plain(inputs, cache, input_embeddings)
        return hidden + 0 * cache[0].keys[0, 0, 0, 0]


def test_a_model_that_looks_into_its_caches_is_refused() -> None:
    model = make_model(LLAMA)
    composed = composition.inspect(model, "llama")
    model.model = Peeking(model.model)
    found = packing.inspect(Forward(model), composed)
    assert found.reason is NotPacked.ENTANGLED
    assert "keys" in found.detail


def test_what_belongs_to_several_groups_answers_nobody_else() -> None:
    parts = Parts([1, None])
    for look in (bool, len, list, lambda it: it == "causal", lambda it: it[0], lambda it: hasattr(it, "dtype")):
        with pytest.raises(Unpackable):
            look(parts)
    with pytest.raises((TypeError, ValueError)):
        mx.zeros(3) + parts
