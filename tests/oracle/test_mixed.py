"""Mixed equals separate: groups whose tokens share one packed forward get what each gets in a forward of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from mlxbcd.engine.packing import PackingRanges
from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.load import load as load_model
from mlxbcd.model.load import read_config
from mlxbcd.model.packed import Packer
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.state import packing
from mlxbcd.state.composition import Composition, KvScheme, inspect
from mlxbcd.state.rows import COLD, Joiner, Rows, Turn, commit
from mlxbcd.state.schemes import Quantised
from mlxbcd.text.tokenizer import Tokenizer
from oracle import coverage
from oracle.alone import TOLERANCE, Conversion, relative_error, rounded_texts
from oracle.crowd import WIDEST, Newcomer
from oracle.families import FAMILIES, load
from oracle.inprocess import alone, engine, together
from oracle.mixed import MixedCrowd, packing_of
from oracle.probes import PASS
from oracle.programs import MixedPrograms, run_programs
from oracle.prompts import ledger, module

TABLE = coverage.read()
PACKING = [name for name in FAMILIES if TABLE[name]["packs"] == PASS]
EIGHT_BITS = Conversion(Quantised(bits=8, group_size=32), start=8)


@pytest.mark.parametrize("name", ["exaone4", "gemma2", "falcon_h1", "gpt2"])
def test_short_programs_with_packed_forwards_give_each_row_what_it_gives_alone(name: str) -> None:
    """Sliding windows, keys the model computes with, two kinds of state in one layer, and tokens packed as rows."""
    run_programs(MixedPrograms, name, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PACKING)
def test_any_program_with_packed_forwards_gives_each_row_what_it_gives_alone(name: str) -> None:
    run_programs(MixedPrograms, name, 20)


@pytest.mark.parametrize("name", ["llama", "exaone4", "deepseek_v3"])
def test_a_verified_window_that_ran_packed_is_taken_back_row_by_row(name: str) -> None:
    crowd = mixed(name)
    crowd.admit([Newcomer(0, 5), Newcomer(1, 13), Newcomer(1, 7)])
    prompt = crowd.prompt(Newcomer(0, 21, 9))
    for piece, kept in ((7, [0, 2, 4]), (9, [3, 1, 1]), (5, [4, 4, 0])):
        crowd.step_beside([prompt], [piece], WIDEST, kept)
    crowd.step(WIDEST)
    crowd.check_states()


def test_quantised_rows_run_packed_beside_a_plain_prompt() -> None:
    family = load("llama")
    composition = family.quantised(KvScheme(EIGHT_BITS.scheme, EIGHT_BITS.start))
    crowd = mixed("llama", composition, EIGHT_BITS)
    crowd.admit([Newcomer(0, 21)], widths=[8, 5])
    crowd.admit([Newcomer(1, 13)], widths=[8, 5])
    crowd.admit_beside(Newcomer(0, 21), [8, 1, 7, 5])
    crowd.step()
    crowd.check_states()


def mixed(name: str, composition: Composition | None = None, conversion: Conversion | None = None) -> MixedCrowd:
    """An empty crowd of a family that packs."""
    packer = packing_of(name).packer
    assert packer is not None
    return MixedCrowd(load(name), packer, composition, rounded_texts(name, conversion) if conversion else None)


class Real:
    """The real model with two copies of the same rows in decode and of the same prompt beside them."""

    def __init__(self, directory: Path) -> None:
        self.forward = Forward(load_model(directory).model)
        self.composition = inspect(self.forward.model, str(read_config(directory)["model_type"]))
        found = packing.inspect(self.forward, self.composition)
        assert found.packer is not None, found
        self.packer: Packer = found.packer
        tokenizer = Tokenizer.load(directory)
        self.texts = [tokenizer.encode(text) for text in (ledger(20, 7), module(20), module(9), ledger(9, 3))]

    def decoding(self, lengths: Sequence[int]) -> Rows:
        """Rows that have processed that much of the first texts."""
        rows = Rows(self.composition, widest=WIDEST)
        for key, length in enumerate(lengths):
            prompt = self.beginning(key)
            (turn,), _ = self.run([(prompt, length)], packed=False)
            turn.resolve()
            commit(rows.prepare(join=[Joiner(key, prompt.read(key), length + 1)]))
        return rows

    def beginning(self, key: int) -> Rows:
        """A row of a text that has processed nothing."""
        rows = Rows(self.composition)
        commit(rows.prepare(join=[Joiner(key, COLD, 1)]))
        return rows

    def run(self, collections: Sequence[tuple[Rows, int]], *, packed: bool) -> tuple[list[Turn], list[mx.array]]:
        """One turn of each collection, and their logits."""
        turns = [rows.begin(width) for rows, width in collections]
        groups = [
            Group(mx.array([self.texts[int(str(key))][rows.lengths[key] :][:width] for key in rows.order]), turn.caches)
            for (rows, width), turn in zip(collections, turns, strict=True)
        ]
        hidden = self.packer.run(groups) if packed else self.forward.run(groups)
        logits = [self.forward.head(each) for each in hidden]
        mx.eval(logits, [turn.arrays() for turn in turns])
        return turns, logits


class Always(PackingRanges):
    """Packs whatever it can, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = 0

    def choose(self, riding: int, total: int, expected_s: float, budget_s: float) -> bool:
        return True

    def saw(self, riding: int, total: int, seconds: float, expected_s: float, *, packed: bool) -> None:
        self.packed += packed


@pytest.mark.model
@pytest.mark.timeout(900)
async def test_a_real_models_requests_that_arrive_while_others_decode_draw_what_they_draw_alone(
    model_directory: Path,
) -> None:
    tokenizer = Tokenizer.load(model_directory)
    prompts = [tokenizer.encode(text)[:24] for text in (ledger(9, 7), module(9), ledger(9, 3))]
    requests = [
        Request(prompt=tuple(ids), max_tokens=6, eos=frozenset(), sampling=Sampling(temperature=i % 2, seed=i))
        for i, ids in enumerate(prompts)
    ]
    async with engine(model_directory) as running:
        wanted = [await alone(running, request) for request in requests]
        running.policy = replace(running.policy, planned_chunk=16)
        running.packing = always = Always()
        tokens, _ = await together(running, requests, 6, one_at_a_time=True)
    assert always.packed >= 4
    assert tokens == wanted


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lengths", [(12, 5, 3), pytest.param((300, 190, 4), marks=pytest.mark.slow)])
def test_a_real_models_rows_decode_packed_with_a_prompt_as_they_do_without(
    model_directory: Path, lengths: tuple[int, ...]
) -> None:
    real = Real(model_directory)
    sides = {packed: (real.decoding(lengths), real.beginning(3)) for packed in (True, False)}
    for width, piece in ((1, 9), (WIDEST, 5), (1, 1)):
        logits = {}
        for packed, (decoding, prompt) in sides.items():
            turns, logits[packed] = real.run([(decoding, width), (prompt, piece)], packed=packed)
            for turn in turns:
                turn.resolve()
        for ours, wanted in zip(logits[True], logits[False], strict=True):
            assert relative_error(ours, wanted) < TOLERANCE
