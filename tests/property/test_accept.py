"""Acceptance: what is delivered is what the target draws by itself, whatever was proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.spec.accept import Accepted, accept

TOKENS = st.integers(0, 3)
EOS = 3


def never(i: int) -> bool:
    return False


def drawn_alone(samples: Sequence[int], ends: Callable[[int], bool]) -> list[int]:
    """The tokens of a row that takes one sample at a time."""
    taken: list[int] = []
    for i, sample in enumerate(samples):
        taken.append(sample)
        if ends(i):
            break
    return taken


@given(st.lists(TOKENS, min_size=1, max_size=40), st.data())
def test_a_text_comes_out_the_same_in_windows_of_any_proposals(text: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(text)), "budget")
    complete = data.draw(st.none() | st.integers(0, len(text) - 1), "where the grammar ends")

    def ends(index: int) -> bool:
        return text[index] == EOS or index + 1 >= budget or index == complete

    out: list[int] = []
    ended = False
    while not ended:
        at = len(out)
        proposals = data.draw(st.lists(TOKENS, max_size=min(8, budget - at)), "proposals")
        # What the target draws behind a wrong proposal depends on it: anything may stand there.
        wrong = next((i for i, token in enumerate(proposals) if text[at + i : at + i + 1] != [token]), len(proposals))
        samples = text[at : at + wrong + 1]
        samples += data.draw(st.lists(TOKENS, min_size=len(proposals) + 1, max_size=12), "behind")
        verdict = accept(proposals, samples, lambda i, at=at: ends(at + i))
        out += samples[: verdict.emitted]
        assert verdict.emitted >= 1
        assert proposals[: verdict.accepted] == samples[: verdict.accepted]
        assert verdict.emitted - verdict.accepted in (0, 1)
        ended = verdict.ended
    assert out == drawn_alone(text, ends)


@given(st.lists(TOKENS, max_size=8), st.lists(TOKENS, min_size=9, max_size=12))
def test_each_delivered_sample_is_asked_about_once_and_in_order(proposals: list[int], samples: list[int]) -> None:
    asked: list[int] = []

    def ends(i: int) -> bool:
        asked.append(i)
        return samples[i] == EOS

    verdict = accept(proposals, samples, ends)
    assert asked == list(range(verdict.emitted)), "nothing behind the first mismatch is ever seen"


@given(st.lists(TOKENS, max_size=8))
def test_a_full_match_earns_one_token_more(proposals: list[int]) -> None:
    assert accept(proposals, [*proposals, 1], never) == Accepted(len(proposals) + 1, len(proposals), ended=False)


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_the_first_mismatch_is_the_correction(proposals: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(proposals) - 1))
    samples = [*proposals, 0]
    samples[at] = proposals[at] + 1
    assert accept(proposals, samples, never) == Accepted(at + 1, at, ended=False)


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_a_row_that_ends_inside_its_window_keeps_nothing_behind(proposals: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(proposals) - 1))
    verdict = accept(proposals, [*proposals, 0], lambda i: i == at)
    assert verdict == Accepted(at + 1, at + 1, ended=True)


def test_a_position_without_a_sample_is_a_fault() -> None:
    with pytest.raises(ValueError, match="need a sample more"):
        accept([1, 2], [1, 2], never)
