"""Stop strings across token boundaries."""

from __future__ import annotations

import pytest

from mlxbcd.text.stops import StopMatcher


def outcome(stops: list[str], *parts: str) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    sent, hit = "", None
    for part in parts:
        safe, hit = matcher.push(part)
        sent += safe
    return sent + matcher.finish(), hit


@pytest.mark.parametrize(
    "parts",
    [("x", "#", "##", "y"), ("x#", "##y"), ("x###y",), ("x##", "#", "y"), ("x", "####"), ("x", "#", "#", "#z", "w")],
)
def test_a_stop_string_is_found_wherever_the_tokens_begin(parts: tuple[str, ...]) -> None:
    assert outcome(["###"], *parts) == ("x", "###")


def test_the_beginning_of_a_stop_string_is_sent_once_it_goes_on_otherwise() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("a##") == ("a", None)
    assert matcher.push("b") == ("##b", None)


def test_what_is_held_back_is_released_at_the_end() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("done\n\nUse") == ("done", None)
    assert matcher.finish() == "\n\nUse"


def test_nothing_comes_out_after_a_hit() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == ("a ", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["c", "abcd"], "abcd", ("ab", "c")),  # complete first, though the other began earlier
        (["bc", "abc"], "abc", ("", "abc")),  # complete together: the longest
        (["b", "ab"], "xab", ("x", "ab")),
        (["aab"], "aaab", ("a", "aab")),  # the search goes on inside a failed attempt
        (["abab", "bab"], "xbabab", ("x", "bab")),
        (["é", "😀"], "x😀é", ("x", "😀")),
        ([], "anything", ("anything", None)),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert outcome(stops, text) == expected
    assert outcome(stops, *text) == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["a", ""])


def test_text_that_nearly_matches_all_the_time_flows_and_still_ends() -> None:
    stop = "a" * 1000 + "b"
    matcher = StopMatcher([stop])
    assert sum(len(matcher.push("a")[0]) for _ in range(20_000)) == 20_000 - 1000
    assert matcher.push("b") == ("", stop)
