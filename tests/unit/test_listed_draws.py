"""Draws over logits of listed tokens are those over a vocabulary in which every other token is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import mlx.core as mx
import numpy as np
import pytest
from test_grammar import EOS, TOKENS, VOCABULARY
from test_sampling_sampler import PROMPT, SETTINGS, VOCAB, random_logits

from mlxbcd.plan.request import Sampling
from mlxbcd.sampling.constraint import RowConstraint
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.sampling.sampler import RowSampler, Samplers
from mlxbcd.spec.drafter import Selection, token_list

rng = np.random.default_rng(4)
LISTS = {
    "one": [7],
    "the first": range(50),
    "the last": range(VOCAB - 33, VOCAB),
    "frequent ones, in no order": rng.permutation(VOCAB)[:600].tolist(),
    "all, backwards": range(VOCAB - 1, -1, -1),
}
"""Fewer tokens than a top_k, or a request's own, and more."""


def masked(logits: mx.array, ids: Sequence[int]) -> mx.array:
    """The same logits with all but some tokens' at −inf."""
    possible = np.zeros(logits.shape[-1], dtype=bool)
    possible[list(ids)] = True
    return mx.where(mx.array(possible), logits, -mx.inf)


@pytest.mark.parametrize("selection", Selection)
@pytest.mark.parametrize("name", LISTS)
def test_rows_of_all_kinds_draw_as_if_nothing_else_were_possible(name: str, selection: Selection) -> None:
    listed = token_list(LISTS[name], VOCAB)
    rows = [RowSampler(Sampling(seed=row, **each), PROMPT, VOCAB) for row, each in enumerate(SETTINGS)]
    twins = [row.supposing(())[0] for row in rows]
    ours, whole = Samplers(rows, listed), Samplers(twins)
    for index in range(4):
        logits = mx.array(random_logits(index, len(rows)))
        drawn = selection.draw(logits[:, listed], ours)
        assert drawn.dtype == mx.uint32
        assert drawn.tolist() == selection.draw(masked(logits, LISTS[name]), whole).tolist()
        assert set(drawn.tolist()) <= set(LISTS[name])
    if selection is Selection.REQUEST:
        assert [row.index for row in rows] == [4] * len(rows)
        for row, twin in zip(rows, twins, strict=True):
            if row.history is not None and twin.history is not None:
                assert mx.array_equal(row.history.counts, twin.history.counts).item(), "tokens, not columns, count"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_rules_out_is_ruled_out_of_the_list(temperature: float) -> None:
    source = Source.of_choices(["yes", "no", "never"])
    constraint = RowConstraint(VOCABULARY, [EOS], TOKENS.compile(source).start())
    row = RowSampler(Sampling(temperature=temperature, seed=1), (1,), VOCABULARY, constraint=constraint)
    words = constraint.mask()
    assert words is not None
    allowed = [token for token in range(VOCABULARY) if words[token // 32] >> (token % 32) & 1]
    assert 0 < len(allowed) < VOCABULARY - 1
    ids = [*range(0, VOCABULARY, 2), *[token for token in allowed if token % 2]][::-1]
    twin = copy(row)
    logits = mx.array(np.random.default_rng(0).normal(0, 3, (1, VOCABULARY)).astype(np.float32))
    (token,) = Samplers([row], token_list(ids, VOCABULARY)).draw(logits[:, mx.array(ids)]).tokens.tolist()
    assert token in allowed
    assert [token] == Samplers([twin]).draw(masked(logits, ids)).tokens.tolist()


def test_a_draw_over_a_list_reports_no_log_probabilities() -> None:
    """They are the target's business: what is drawn here is only a guess."""
    row = RowSampler(Sampling(logprobs=True, top_logprobs=2), PROMPT, VOCAB)
    draw = Samplers([row], token_list([3, 9], VOCAB)).draw(mx.array([[1.0, 2.0]]))
    assert (draw.tokens.tolist(), draw.logprobs) == ([9], None)


def test_logits_of_another_width_than_the_list_are_refused() -> None:
    samplers = Samplers([RowSampler(Sampling(), PROMPT, VOCAB)], token_list([3, 9], VOCAB))
    with pytest.raises(ValueError, match="of whose vocabulary 2 tokens are scored"):
        samplers.draw(mx.zeros((1, VOCAB)))


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [VOCAB]])
def test_a_list_that_names_no_set_of_tokens_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="each once, from 0 to 2499"):
        token_list(ids, VOCAB)
