"""Reasoning and text."""

from __future__ import annotations

import pytest

from mlxbcd.text.channels import ChannelSplitter, opens_inside

MARKERS = ("<think>", "</think>")


def split(*parts: str, inside: bool = False, first: bool = False) -> list[tuple[str, str]]:
    splitter = ChannelSplitter(MARKERS, inside=inside, first=first)
    return [piece for part in parts for piece in splitter.push(part)] + splitter.finish()


def test_text_between_the_markers_is_reasoning_and_the_markers_do_not_show() -> None:
    assert split("<think>hm</think>yes") == [("reasoning", "hm"), ("text", "yes")]


def test_a_marker_may_come_in_pieces() -> None:
    assert split("<th", "ink", ">", "hm<", "/think>yes") == [("reasoning", "hm"), ("text", "yes")]


def test_white_space_right_after_a_marker_is_dropped_and_all_other_kept() -> None:
    assert split("<think>", "\n", " a\n b\n", "</think>", "\n\n", "yes \n") == [
        ("reasoning", "a\n b\n"),
        ("text", "yes \n"),
    ]


def test_an_output_without_markers_keeps_its_leading_white_space() -> None:
    assert split("\n hello") == [("text", "\n hello")]


def test_a_prompt_that_opened_the_block_makes_the_first_words_reasoning() -> None:
    assert split("\nhm", "</think>", "yes", inside=True) == [("reasoning", "hm"), ("text", "yes")]


def test_reasoning_that_is_cut_off_stays_reasoning() -> None:
    assert split("<think>hm</thi") == [("reasoning", "hm"), ("reasoning", "</thi")]


def test_a_marker_that_changes_nothing_does_not_show_either() -> None:
    assert split("a</think>b") == [("text", "ab")]
    assert split("<think>again", inside=True) == [("reasoning", "again")]


def test_reasoning_may_come_back() -> None:
    assert split("<think>a</think>b<think>c</think>d") == [
        ("reasoning", "a"),
        ("text", "b"),
        ("reasoning", "c"),
        ("text", "d"),
    ]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|><think>\n", True),
        ("<|assistant|><think>", True),
        ("<|assistant|><think>\n\n</think>\n\n", False),
        ("what does <think> mean?<|assistant|>\n", False),
        ("", False),
    ],
)
def test_a_prompt_opens_reasoning_only_by_ending_with_the_marker(prompt: str, expected: bool) -> None:
    assert opens_inside(prompt, MARKERS) is expected
    assert opens_inside(prompt, None) is False


def test_a_stream_without_markers_cannot_begin_inside() -> None:
    with pytest.raises(ValueError, match="without markers"):
        ChannelSplitter(None, inside=True)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ('{"a": "<think>b</think>"}', False, [("text", '{"a": "<think>b</think>"}')]),
        ("</think> a", False, [("text", "</think> a")]),
        ("<think>\n a</think>\n <think>b</think>", False, [("reasoning", "a"), ("text", "\n <think>b</think>")]),
        ("a</think>  b</think>", True, [("reasoning", "a"), ("text", "  b</think>")]),
        ("<thin", False, [("text", "<thin")]),
        ("", False, []),
    ],
)
def test_reasoning_that_can_only_come_first_leaves_the_rest_to_the_letter(
    text: str, inside: bool, expected: list[tuple[str, str]]
) -> None:
    for cut in range(len(text) + 1):
        parts = split(text[:cut], text[cut:], inside=inside, first=True)
        joined = [(channel, "".join(text for other, text in parts if other == channel)) for channel, _ in expected]
        assert joined == expected
        assert sum(len(text) for _, text in parts) == sum(len(text) for _, text in expected)
