"""The exactness rule forgives near ties, a few of them, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.agreement import MARGIN, Scores, Tally

VOCABULARY = 7
Row = npt.NDArray[np.float64]


def toy_scores(seed: int, history: Sequence[int]) -> Row:
    """What a toy model gives each token after `history`: about one position in six is a near tie."""
    chance = random.Random(f"{seed} {list(history)}")
    scores = np.array(chance.sample(range(VOCABULARY), VOCABULARY), dtype=np.float64)
    if chance.random() < 1 / 6:
        best, second = np.argsort(-scores)[:2]
        scores[second] = scores[best] - chance.uniform(0.1, 0.8) * MARGIN
    return scores


def along(seed: int, tokens: Sequence[int]) -> Scores:
    return lambda: np.array([toy_scores(seed, tokens[:i]) for i in range(len(tokens))])


def drawn(seed: int, length: int, *, second_at_ties: bool = False) -> list[int]:
    """The model's own tokens, or those of one that decides every near tie the other way."""
    tokens: list[int] = []
    for _ in range(length):
        scores = toy_scores(seed, tokens)
        best, second = (int(token) for token in np.argsort(-scores)[:2])
        tie = scores[best] - scores[second] < MARGIN
        tokens.append(second if tie and second_at_ties else best)
    return tokens


def unasked() -> Row:
    raise AssertionError("equal tokens need no scores")


SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS, length=st.integers(1, 30))
def test_equal_tokens_agree_whatever_the_scores(seed: int, length: int) -> None:
    tally = Tally()
    tally.compare("same", drawn(seed, length), drawn(seed, length), unasked)
    assert (tally.positions, tally.near_ties) == (length, [])
    tally.check()


@given(seed=SEEDS, length=st.integers(1, 30))
def test_tokens_that_part_only_at_near_ties_agree_and_each_is_counted(seed: int, length: int) -> None:
    ours = drawn(seed, length, second_at_ties=True)
    tally, forced = Tally(), Tally()
    tally.compare("ties", ours, drawn(seed, length), along(seed, ours))
    forced.compare_forced("ties", ours, along(seed, ours))
    parted = [i for i, token in enumerate(ours) if token != int(np.argmax(toy_scores(seed, ours[:i])))]
    assert [tie.index for tie in tally.near_ties] == [tie.index for tie in forced.near_ties] == parted
    assert tally.positions == forced.positions == length


@given(seed=SEEDS, length=st.integers(1, 30), data=st.data())
def test_a_token_that_the_reference_had_decided_against_is_found_wherever_it_is(
    seed: int, length: int, data: st.DataObject
) -> None:
    ours = drawn(seed, length, second_at_ties=data.draw(st.booleans()))
    index = data.draw(st.integers(0, length - 1))
    scores = toy_scores(seed, ours[:index])
    ours[index] = int(np.argsort(-scores)[2])
    with pytest.raises(AssertionError, match=rf"not a near tie: wrong\[{index}\]"):
        Tally().compare("wrong", ours, drawn(seed, length), along(seed, ours))
    with pytest.raises(AssertionError, match=rf"not a near tie: wrong\[{index}\]"):
        Tally().compare_forced("wrong", ours, along(seed, ours))


def test_where_tokens_first_part_the_scores_must_be_near_for_both_of_them() -> None:
    # The free-running reference drew token 1, and its scores along our tokens say that this is nonsense.
    with pytest.raises(AssertionError, match="not a near tie"):
        Tally().compare("free", [0], [1], lambda: np.array([[5.0, 1.0]]))


def test_a_token_that_a_filter_rules_out_is_never_a_near_tie() -> None:
    with pytest.raises(AssertionError, match="inf apart"):
        Tally().compare_forced("filtered", [1], lambda: np.array([[5.0, -np.inf]]))


@pytest.mark.parametrize("length", [3, 5])
def test_an_output_of_another_length_does_not_agree(length: int) -> None:
    with pytest.raises(AssertionError, match=f"{length} tokens, the reference drew 4"):
        Tally().compare("length", [1, 2, 3, 4, 5][:length], [1, 2, 3, 4], unasked)


def test_one_exemption_in_two_hundred_positions_is_allowed_and_one_more_is_not() -> None:
    def tie() -> np.ndarray:
        return np.array([[1.0, 1.0 - MARGIN / 2]])

    tally = Tally()
    tally.compare("plain", [0] * 199, [0] * 199, unasked)
    tally.compare_forced("tie", [1], tie)
    tally.check()
    assert str(tally) == "1 of 200 positions exempted as near ties (0.50 %)\n  tie[0]: 1 for 0, 5.0e-04 apart"
    both = Tally()
    both.add(tally)
    both.compare_forced("another", [1], tie)
    with pytest.raises(AssertionError, match="too many exemptions: 2 of 201"):
        both.check()


def test_comparing_nothing_shows_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing was compared"):
        Tally().check()
