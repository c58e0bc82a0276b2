"""Quantised keys and values on the real model: close to plain ones, in a batch as alone, as small as they should be.

Ragged rows are prefilled in chunks, join one batch and are led along text they have not written themselves, a few
tokens per step, so every position gives logits to compare.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.model.forward import Forward
from mlxbcd.model.load import load, read_config
from mlxbcd.state.composition import Composition, KvScheme, inspect
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from mlxbcd.state.schemes import Quantised
from mlxbcd.text.tokenizer import Tokenizer
from oracle.prompts import ledger, module

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

Floats: TypeAlias = npt.NDArray[np.float32]
Logits: TypeAlias = Mapping[int, Floats]
"""Of each row, [tokens led along, vocabulary]."""

TRIMMED = 24
LENGTHS = pytest.mark.parametrize("length", [TRIMMED, pytest.param(200, marks=pytest.mark.slow)])
"""Tokens that each row is led along: a trimmed set, and the full one."""
LATE = 128
STARTS = pytest.mark.parametrize("start", [0, LATE])
"""Tokens from which a row is stored quantised: with the later one, plain and quantised rows share a batch."""
PROMPTS = (160, 124, 40, 5)
"""Tokens of the rows' prompts; the second passes the late start on its way."""
GROUP = 64
CHUNK = 64
STEP = 8

ALMOST_EQUAL = 1e-2
"""Largest error, relative to a position's largest logit, of two runs over equal states. It is 0 where a row's products
have the same bits alone and in a batch; elsewhere a value next to the border between two steps may round either way."""


class Subject:
    """The real model, rows of text for it, and what has been computed of them."""

    def __init__(self, directory: Path) -> None:
        self.forward = Forward(load(directory).model)
        self.model_type = str(read_config(directory)["model_type"])
        tokenizer = Tokenizer.load(directory)
        texts = ledger(40, 7), module(30), f"Once upon a time there was a harbour. {ledger(40, 9)}", module(20)[400:]
        self.texts = [tokenizer.encode(text) for text in texts]
        self._known: dict[tuple[KvScheme | None, int], Logits] = {}

    def composition(self, kv: KvScheme | None) -> Composition:
        return inspect(self.forward.model, self.model_type, kv=kv)

    def prefilled(self, composition: Composition, key: int) -> Rows:
        """A collection with one row that has processed its prompt."""
        rows = Rows(composition, widest=CHUNK)
        commit(rows.prepare(join=[Joiner(key, COLD, PROMPTS[key])]))
        for begin in range(0, PROMPTS[key], CHUNK):
            self.advance(rows, {key: self.texts[key][begin : min(begin + CHUNK, PROMPTS[key])]})
        return rows

    def batch(self, composition: Composition, keys: Iterable[int], room: int) -> Rows:
        """Rows that have joined one collection with their prompts, and will get `room` more tokens."""
        rows = Rows(composition, widest=STEP)
        for key in keys:
            alone = self.prefilled(composition, key)
            commit(rows.prepare(join=[Joiner(key, alone.read(key), PROMPTS[key] + room)]))
            mx.eval([layout.arrays() for layout in rows.layouts])
        return rows

    def advance(self, rows: Rows, tokens: Mapping[int, Sequence[int]], *, planned: bool = True) -> Logits:
        """One forward that gives every row the same number of tokens."""
        turn = rows.begin(len(next(iter(tokens.values()))), planned=planned)
        order = [key for key in rows.order if isinstance(key, int)]
        hidden = self.forward.hidden(mx.array([list(tokens[key]) for key in order]), turn.caches)
        turn.resolve()
        return dict(zip(order, np.array(self.forward.head(hidden)), strict=True))

    def led(self, kv: KvScheme | None, keys: Iterable[int], length: int) -> Logits:
        """What rows that run together give along the text behind their prompts."""
        keys = list(keys)
        rows = self.batch(self.composition(kv), keys, length)
        steps = [self.advance(rows, self.next_tokens(keys, at)) for at in range(0, length, STEP)]
        return {key: np.concatenate([step[key] for step in steps]) for key in keys}

    def all_led(self, kv: KvScheme | None, length: int) -> Logits:
        """`led` for all rows, computed once."""
        if (kv, length) not in self._known:
            self._known[kv, length] = self.led(kv, range(len(PROMPTS)), length)
        return self._known[kv, length]

    def next_tokens(self, keys: Iterable[int], at: int) -> dict[int, Sequence[int]]:
        """The step that begins `at` tokens behind the prompts."""
        return {key: self.texts[key][PROMPTS[key] + at : PROMPTS[key] + at + STEP] for key in keys}

    def peer_led(self, kv: KvScheme, key: int, length: int) -> Floats:
        """What one row gives over mlx-lm's caches and attention, quantised at the same ends.

        All the rest is ours: it rounds as it does for our rows, since the least difference may move a value across the
        border between two steps.
        """
        scheme = kv.scheme
        assert isinstance(scheme, Quantised)
        caches = self.composition(None).make_stock()
        ends = [*range(0, PROMPTS[key], CHUNK), *range(PROMPTS[key], PROMPTS[key] + length + 1, STEP)]
        out = []
        for begin, end in pairwise(ends):
            if begin >= max(kv.start, 1) and not hasattr(caches[0], "bits"):
                caches = [cache.to_quantized(group_size=scheme.group_size, bits=scheme.bits) for cache in caches]
            hidden = self.forward.hidden(mx.array([self.texts[key][begin:end]]), caches)
            mx.eval(hidden)
            if begin >= PROMPTS[key]:
                out.append(np.array(self.forward.head(hidden)[0]))
        return np.concatenate(out)


class Distance:
    """How far logits are from a reference, over all positions of all rows."""

    def __init__(self, ours: Logits, reference: Logits) -> None:
        self._pairs = [(ours[key], reference[key]) for key in reference]

    def __str__(self) -> str:
        return (
            f"{len(self._errors)} positions, top token agrees in {100 * self.agreement:.2f} %, "
            f"relative error at most {self.worst:.1e}, median {np.median(self._errors):.1e}"
        )

    @cached_property
    def _errors(self) -> Floats:
        return np.concatenate([np.abs(a - b).max(axis=-1) / np.abs(b).max(axis=-1) for a, b in self._pairs])

    @property
    def worst(self) -> float:
        """Of all positions, the largest error of a logit relative to the position's largest logit."""
        return float(self._errors.max())

    @property
    def agreement(self) -> float:
        """The share of positions whose top token is the same."""
        same = [a.argmax(axis=-1) == b.argmax(axis=-1) for a, b in self._pairs]
        return float(np.concatenate(same).mean())


@pytest.fixture(scope="module")
def subject(model_directory: Path) -> Subject:
    return Subject(model_directory)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    """Print a figure past pytest's capture."""

    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}")

    return show


@LENGTHS
@STARTS
@pytest.mark.parametrize(("bits", "error", "agreement"), [(8, 0.03, 0.98), (4, 1.0, 0.85)])
def test_logits_over_quantised_rows_are_close_to_those_over_plain_ones(
    bits: int, error: float, agreement: float, start: int, length: int, subject: Subject, show: Any
) -> None:
    quantised = subject.all_led(KvScheme(Quantised(bits, GROUP), start), length)
    distance = Distance(quantised, subject.all_led(None, length))
    show(f"{bits} bits from {start} tokens on: {distance}")
    assert distance.worst > 1e-5, "nothing was quantised"
    assert distance.worst <= error
    assert distance.agreement >= agreement


@LENGTHS
@STARTS
def test_a_quantised_row_in_a_batch_gives_what_it_gives_alone(start: int, length: int, subject: Subject) -> None:
    kv = KvScheme(Quantised(8, GROUP), start)
    alone = {key: subject.led(kv, [key], length)[key] for key in range(len(PROMPTS))}
    assert Distance(subject.all_led(kv, length), alone).worst <= ALMOST_EQUAL


@pytest.mark.parametrize("bits", [8, 4])
@STARTS
def test_a_quantised_row_gives_what_mlx_lms_quantised_cache_gives(bits: int, start: int, subject: Subject) -> None:
    kv, key = KvScheme(Quantised(bits, GROUP), start), 1
    peer = {key: subject.peer_led(kv, key, TRIMMED)}
    assert Distance(subject.all_led(kv, TRIMMED), peer).worst <= ALMOST_EQUAL


def test_rows_are_quantised_at_planned_ends_only(subject: Subject) -> None:
    keys = (0, 3)
    rows = subject.batch(subject.composition(KvScheme(Quantised(8, GROUP), 164)), keys, 4 * STEP)
    plain = subject.batch(subject.composition(None), keys, 4 * STEP)

    def step(at: int, *, planned: bool) -> float:
        tokens = subject.next_tokens(keys, at)
        ours = subject.advance(rows, tokens, planned=planned)
        return Distance(ours, subject.advance(plain, tokens)).worst

    def quantised() -> list[bool]:
        return [rows.place(key).group.quantised for key in keys]

    assert step(0, planned=True) == 0
    assert quantised() == [False, False], "at 160 tokens it was too early"
    assert step(STEP, planned=False) == 0
    assert quantised() == [False, False], "168 tokens, but this was not a planned end"
    assert [rows.reusable_from(key) for key in keys] == [0, 0]
    assert step(2 * STEP, planned=True) > 0
    assert quantised() == [True, False]
    assert [rows.reusable_from(key) for key in keys] == [176, 0]
    step(3 * STEP, planned=True)
    assert [rows.reusable_from(key) for key in keys] == [176, 0], "quantised once and for all"


def test_tokens_taken_back_from_quantised_rows_leave_no_trace(subject: Subject) -> None:
    kv, keys = KvScheme(Quantised(8, GROUP), LATE), range(len(PROMPTS))
    rows = subject.batch(subject.composition(kv), keys, 3 * STEP)
    subject.advance(rows, subject.next_tokens(keys, 0))
    turn = rows.begin(STEP, reversible=True)
    with turn.forward() as caches:
        mx.eval(subject.forward.hidden(mx.array([[7 * key + 99] * STEP for key in keys]), caches))
    turn.resolve([0] * len(PROMPTS))
    after = subject.advance(rows, subject.next_tokens(keys, STEP))
    untouched = subject.all_led(kv, TRIMMED)
    assert Distance(after, {key: untouched[key][STEP : 2 * STEP] for key in keys}).worst <= ALMOST_EQUAL


def test_quantised_rows_need_the_memory_of_their_bits_and_one_scale_and_bias_per_group(
    subject: Subject, show: Any
) -> None:
    def held(kv: KvScheme | None) -> tuple[int, int]:
        """Bytes that running rows say they hold, and bytes of memory they need."""
        before = _active()
        rows = subject.batch(subject.composition(kv), range(len(PROMPTS)), STEP)
        subject.advance(rows, subject.next_tokens(range(len(PROMPTS)), 0))
        return rows.nbytes, _active() - before

    plain, float32 = held(None), 4
    for bits in (8, 4):
        said, needed = held(KvScheme(Quantised(bits, GROUP), 0))
        expected = (GROUP * bits / 8 + 2 * float32) / (GROUP * float32)
        show(f"{bits} bits: {said / 1e6:.1f} MB for {plain[0] / 1e6:.1f} MB of plain rows, {expected:.4f} of it")
        assert said / plain[0] == pytest.approx(expected)
        assert needed / plain[1] == pytest.approx(expected, rel=0.02)


def _active() -> int:
    """Bytes of live arrays, with none waiting to be collected."""
    gc.collect()
    return mx.get_active_memory()
