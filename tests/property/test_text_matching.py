"""Stop strings and channels against plain searches of the whole text, however the text is cut up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.text.channels import ChannelSplitter
from mlxbcd.text.stops import StopMatcher

# Few letters, so that strings overlap, repeat and contain each other.
LETTERS = "ab#"
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
texts = st.text(LETTERS, max_size=40)
MARKERS = ("<think>", "</think>")
marked_texts = st.lists(
    st.sampled_from([*MARKERS, "<", "</", "think", ">", " ", "\n", "a", "b", "<think", "</think"]), max_size=14
).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def first_complete_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=texts, stops=stop_lists, places=st.lists(st.integers(0, 100), max_size=6))
@settings(max_examples=500, deadline=None)
def test_text_ends_before_the_first_complete_stop_string(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    sent, hit = "", None
    for part in cut(text, places):
        safe, hit = matcher.push(part)
        sent += safe
        if hit:
            break
    assert (sent + matcher.finish(), hit) == first_complete_stop(text, stops)


@given(text=texts, stops=stop_lists)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent, hit = matcher.push(text)
    if hit is None:
        held = max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)
        assert sent == text[: len(text) - held]
        assert matcher.finish() == text[len(text) - held :]


def split_whole(text: str, inside: bool) -> list[tuple[str, str]]:
    """Channels of a whole text by splitting it at each marker."""
    channel, parts, after_marker = ("reasoning" if inside else "text"), [], inside
    while True:
        places = [(text.index(marker), marker) for marker in MARKERS if marker in text]
        place, marker = min(places, default=(len(text), ""))
        piece = text[:place]
        parts.append((channel, piece.lstrip() if after_marker else piece))
        if not marker:
            break
        channel, after_marker = ("reasoning" if marker == MARKERS[0] else "text"), True
        text = text[place + len(marker) :]
    return merged(parts)


def merged(parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []
    for channel, text in parts:
        if text and result and result[-1][0] == channel:
            result[-1] = (channel, result[-1][1] + text)
        elif text:
            result.append((channel, text))
    return result


@given(text=marked_texts, inside=st.booleans(), places=st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=500, deadline=None)
def test_channels_are_the_same_however_the_text_is_cut(text: str, inside: bool, places: list[int]) -> None:
    splitter = ChannelSplitter(MARKERS, inside=inside)
    parts: list[tuple[str, str]] = []
    for part in cut(text, places):
        parts += splitter.push(part)
    parts += splitter.finish()
    assert all(piece for _, piece in parts)
    assert merged(parts) == split_whole(text, inside)


@given(text=marked_texts, places=st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=200, deadline=None)
def test_without_markers_everything_is_text_as_it_came(text: str, places: list[int]) -> None:
    splitter = ChannelSplitter(None, inside=False)
    parts = [part for piece in cut(text, places) for part in splitter.push(piece)]
    assert "".join(piece for _, piece in parts) == text
    assert all(channel == "text" for channel, _ in parts)
    assert splitter.finish() == []
