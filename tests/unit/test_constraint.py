"""What rules out tokens of a row: a grammar for what is said, and a budget for what is thought."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grammar import BACKEND, EOS, TOKENS, VOCABULARY, allowed

from mlxbcd.sampling.constraint import Reasoning, RowConstraint
from mlxbcd.sampling.grammar_source import Source

OPEN, CLOSE = (BACKEND.token_to_id(marker) for marker in ("<think>", "</think>"))
A, B = BACKEND.encode("ab").ids
GRAMMAR = TOKENS.compile(Source("regex", "ab?"))


def constraint(
    *, grammar: bool = False, thinks: bool = True, budget: int | None = None, inside: bool = False
) -> RowConstraint:
    reasoning = Reasoning(OPEN, CLOSE, budget) if thinks else None
    return RowConstraint(VOCABULARY, [EOS], GRAMMAR.start() if grammar else None, reasoning, inside=inside)


def permits(row: RowConstraint) -> set[int] | None:
    words = row.mask()
    return None if words is None else allowed(words) & set(range(VOCABULARY))


def test_a_grammar_holds_from_the_first_token_where_nothing_is_thought() -> None:
    row = constraint(grammar=True, thinks=False)
    assert permits(row) == {A, BACKEND.encode("ab").ids[0]}
    row.accept(A)
    assert permits(row) == {B, EOS}
    assert not row.complete
    row.accept(B)
    assert row.complete


def test_reasoning_may_come_first_under_a_grammar_and_only_first() -> None:
    row = constraint(grammar=True)
    assert permits(row) == {A, OPEN}
    row.accept(OPEN)
    assert permits(row) == set(range(VOCABULARY)) - {EOS}, "what has been asked for is still to come"
    row.accept(B, B, OPEN, CLOSE)
    assert permits(row) == {A}
    row.accept(A, B)
    assert row.complete


def test_a_prompt_that_opened_reasoning_puts_the_grammar_off() -> None:
    row = constraint(grammar=True, inside=True)
    row.accept(A, B)
    assert not row.complete
    row.accept(CLOSE)
    assert permits(row) == {A}


def test_the_closing_marker_is_forced_once_the_budget_is_spent() -> None:
    row = constraint(budget=2, inside=True)
    assert permits(row) is None
    row.accept(A, A)
    assert permits(row) == {CLOSE}
    row.accept(CLOSE)
    assert permits(row) is None
    row.accept(B, OPEN)
    assert permits(row) == {CLOSE}, "a further block has nothing left"


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert permits(constraint(budget=0, inside=True)) == {CLOSE}
    row = constraint(budget=0)
    assert permits(row) is None
    row.accept(OPEN)
    assert permits(row) == {CLOSE}


def test_what_the_grammar_refuses_is_a_fault() -> None:
    row = constraint(grammar=True, thinks=False)
    row.accept(B)
    assert row.fault
    assert not row.complete


def test_a_copy_goes_its_own_way() -> None:
    row = constraint(grammar=True, inside=True, budget=5)
    row.accept(A, CLOSE, A)
    twin = row.copy()
    twin.accept(B)
    assert twin.complete
    assert permits(row) == {B, EOS}


def test_no_more_is_taken_back_than_is_known() -> None:
    row = constraint(budget=5)
    row.accept(A)
    with pytest.raises(ValueError, match="take back 1"):
        row.retract(2)


steps = st.lists(st.sampled_from([A, B, OPEN, CLOSE]), max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    grammar=st.booleans(),
    thinks=st.booleans(),
    inside=st.booleans(),
    budget=st.none() | st.integers(0, 4),
    before=steps,
    after=steps,
)
def test_taking_tokens_back_leaves_no_trace(
    grammar: bool, thinks: bool, inside: bool, budget: int | None, before: list[int], after: list[int]
) -> None:
    row = constraint(grammar=grammar, thinks=thinks, budget=budget, inside=inside and thinks)
    follow(row, before)
    known = permits(row), row.complete
    went = follow(row, after)
    row.retract(went)
    assert (permits(row), row.complete) == known


@settings(max_examples=150, deadline=None, derandomize=True)
@given(grammar=st.booleans(), inside=st.booleans(), budget=st.none() | st.integers(0, 4), tokens=steps)
def test_a_draw_that_is_foreseen_is_free(grammar: bool, inside: bool, budget: int | None, tokens: list[int]) -> None:
    row = constraint(grammar=grammar, budget=budget, inside=inside)
    for token in tokens:
        foreseen = row.foresees
        if not follow(row, [token]):
            break
        if foreseen:
            assert permits(row) is None


def follow(row: RowConstraint, tokens: Iterable[int]) -> int:
    """Accept what is allowed of them, up to the first that isn't; how many that were."""
    count = 0
    for token in tokens:
        free = permits(row)
        if row.complete or (free is not None and token not in free):
            break
        row.accept(token)
        count += 1
    return count


@pytest.mark.parametrize(
    "source",
    [
        Source.of_schema({"type": "object", "properties": {"the": {"enum": ["in a", "in b"]}}, "required": ["the"]}),
        Source.of_choices(["the inn", "the ##", "the <think>x"]),
        Source("grammar", 'start: "the " <think> "a" | "in"'),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_forced_tokens_are_those_that_the_masks_leave(source: Source, seed: int) -> None:
    chance = random.Random(seed)
    row = RowConstraint(VOCABULARY, [EOS], TOKENS.compile(source).start(), None)
    forced_ever = False
    for _ in range(60):
        if row.complete:
            break
        for token in row.forced():
            forced_ever = True
            assert permits(row) == {token}
            row.accept(token)
        free = permits(row)
        if not row.complete and free:
            token = chance.choice(sorted(free))
            if token == EOS:
                break
            row.accept(token)
    assert forced_ever or source.kind == "grammar", "one of its two texts has no choice to force"
    assert not row.fault


def test_what_is_forced_around_reasoning() -> None:
    row = constraint(budget=1, inside=True, grammar=True)
    assert row.forced() == []
    row.accept(A)
    assert row.forced() == [CLOSE]
    assert constraint(grammar=True).forced() == [], "reasoning may come first"
    assert constraint().forced() == []
