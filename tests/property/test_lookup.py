"""The suffix index finds what a search of the whole text would, and an echo proposes what stands there."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from mlxbcd.spec.echo import BELIEVED, PLACES, Echo, Origin, place_of
from mlxbcd.spec.lookup import SHORTEST, SuffixIndex
from mlxbcd.spec.rates import Rates

TEXTS = st.lists(st.integers(0, 3), max_size=60)
LETTERS = st.lists(st.integers(-1, 3), max_size=60)


def agreement(text: list[int], position: int, recent: list[int]) -> int:
    """Tokens before a position that agree with the end of another text, none of them a separator."""
    n = 0
    while n < min(position, len(recent)) and text[position - n - 1] == recent[-n - 1] >= 0:
        n += 1
    return n


@given(LETTERS, TEXTS)
def test_what_is_found_agrees_and_has_something_behind_it(text: list[int], recent: list[int]) -> None:
    index = SuffixIndex(text)
    match = index.find(recent)
    if match is not None:
        assert match.length >= SHORTEST
        assert match.length == min(agreement(text, match.position, recent), 48)
        assert text[match.position] >= 0


@given(LETTERS, TEXTS)
def test_something_is_found_wherever_there_is_something(text: list[int], recent: list[int]) -> None:
    # The newest places only are compared; with few letters and a short text most are among them.
    found = SuffixIndex(text).find(recent)
    places = [p for p in range(len(text)) if text[p] >= 0 and agreement(text, p, recent) >= SHORTEST]
    if places and len(places) <= 6 and text.count(-1) == 0:
        assert found is not None
        assert found.length == max(agreement(text, p, recent) for p in places)
    if not places:
        assert found is None


@given(TEXTS)
def test_a_text_grown_token_by_token_is_the_same_index(text: list[int]) -> None:
    grown = SuffixIndex()
    for token in text:
        grown.append(token)
    whole = SuffixIndex(text)
    assert (grown.text, grown.find(text)) == (whole.text, whole.find(text))


def test_a_loop_goes_on() -> None:
    index = SuffixIndex([9, 1, 2, 3, 1, 2, 3])
    match = index.find(index.text)
    assert match is not None
    assert index.follow(match.position, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_what_follows_ends_with_its_source() -> None:
    assert SuffixIndex([1, 2, 3, 4, -1, 5, 6]).follow(2, 9) == [3, 4]


@given(TEXTS, TEXTS, st.lists(TEXTS, max_size=2), st.booleans())
def test_an_echo_never_proposes_what_is_not_known(
    prompt: list[int], output: list[int], sources: list[list[int]], own: bool
) -> None:
    echo = Echo(prompt, sources, own=own)
    known = {token for source in sources for token in source} | (set(prompt) if own else set())
    for token in output:
        proposals = echo.propose(5)
        assert len(proposals) == len(echo.chances(len(proposals))) <= 5
        assert set(proposals) <= known
        assert all(0 < chance < 1 for chance in echo.chances(len(proposals)))
        echo.observe(token)
        known |= {token} if own else set()


@given(st.lists(st.integers(0, 1000), min_size=30, max_size=60, unique=True), st.data())
def test_a_copy_with_one_change_is_found_again_soon(source: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(15, len(source) - 8))
    new = data.draw(st.lists(st.integers(2000, 3000), max_size=3))
    out = data.draw(st.integers(0, 3))
    assume(new or out)
    copy = [*source[:at], *new, *source[at + out :]]
    echo = Echo([], [source])
    wrong = 0
    for i, token in enumerate(copy):
        if i >= SHORTEST:
            wrong += echo.propose(1) != [token]
        echo.observe(token)
    # The change itself, and at most what it takes to see how the original goes on.
    assert wrong <= len(new) + SHORTEST


def test_spans_of_another_text_are_told_apart_by_their_rates() -> None:
    rates = {origin: Rates(PLACES, BELIEVED, keeps=0.9) for origin in Origin}
    source = list(range(100, 160))
    echo = Echo(list(range(20)) * 2, [source], rates=rates)
    for token in source:
        echo.observe(token)
    assert echo.span is None, "the source has ended"
    assert rates[Origin.SOURCE].at(place_of(8, None)) > BELIEVED.at(place_of(8, None))


def test_a_settled_echo_opens_again_where_a_run_matches() -> None:
    echo = Echo([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert echo.propose(2) == [4, 5]
    echo.settle()
    assert echo.propose(2) == []
    echo.observe(4)
    assert echo.propose(2) == [5, 6]
