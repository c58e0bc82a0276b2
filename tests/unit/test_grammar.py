"""Grammars: what may come next, when a text is complete, and what is said about one that can't be used."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from tiny_directory import VOCABULARY, make_tokenizer
from tokenizers import Tokenizer, decoders, models

from mlxbcd.errors import ServeError
from mlxbcd.sampling.grammar import Matcher, Vocabulary, Words, all_but, only
from mlxbcd.sampling.grammar_source import LONGEST_SOURCE, MOST_BEGINNINGS, Source, lark_string

BACKEND = make_tokenizer()
EOS = BACKEND.token_to_id("<|end|>")
TOKENS = Vocabulary(BACKEND.to_str(), BACKEND.get_vocab_size(), VOCABULARY, [EOS])


def allowed(words: Words) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def texts(matcher: Matcher) -> set[str]:
    return {BACKEND.id_to_token(token) for token in allowed(matcher.mask())}


def follow(source: Source, text: str = "") -> Matcher:
    matcher = TOKENS.compile(source).start()
    matcher.accept(*BACKEND.encode(text).ids)
    return matcher


def refusal(source: Source) -> ServeError:
    with pytest.raises(ServeError) as refused:
        TOKENS.compile(source)
    assert refused.value.code == "grammar_invalid"
    return refused.value


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (Source("regex", "[ab]{2}"), "ab", "abc"),
        (Source("grammar", 'start: "a" b+\nb: "b" | "c"'), "abcb", "ba"),
        (Source.of_choices(["yes", "no", 'né\x7f\n"\\']), 'né\x7f\n"\\', "maybe"),
        (Source.of_schema({"type": "array", "items": {"enum": [1, "é"]}}), '[1,"é"]', "[2]"),
        (Source.of_schema(True), '{"a": [null]}', "nil"),
    ],
)
def test_a_text_that_fits_is_accepted_and_another_is_a_fault(source: Source, good: str, bad: str) -> None:
    matcher = follow(source, good)
    assert not matcher.fault
    assert EOS in allowed(matcher.mask())
    assert follow(source, bad).fault


def test_what_may_come_next_is_exactly_what_the_grammar_has() -> None:
    matcher = follow(Source("regex", "(the|a)#"))
    assert texts(matcher) == {"t", "th", "the", "a"}
    matcher.accept(*BACKEND.encode("the").ids)
    assert texts(matcher) == {"#"}


def test_a_text_is_complete_once_nothing_can_follow() -> None:
    assert not follow(Source("regex", "ab"), "a").complete
    assert follow(Source("regex", "ab"), "ab").complete
    assert not follow(Source("regex", "a+"), "a").complete, "another could follow"
    assert follow(Source.of_schema({"type": "object"}), "{}").complete
    assert follow(Source("regex", "ab"), "ab").mask().any(), "an end token may always come"


def test_special_tokens_padding_and_ids_beyond_the_vocabulary_are_never_allowed() -> None:
    matcher = follow(Source("regex", "(.|\n)*"))
    mask = allowed(matcher.mask())
    assert EOS in mask
    assert BACKEND.token_to_id("<|user|>") not in mask
    assert mask < set(range(BACKEND.get_vocab_size()))


@pytest.mark.parametrize(
    "source", [Source.of_choices(["a<think>b", "a<|user|>"]), Source("regex", "a<think>b|a<..ser..")]
)
def test_a_text_that_looks_like_a_control_token_is_spelled(source: Source) -> None:
    matcher = follow(source, "a")
    assert texts(matcher) == {"<"}
    matcher.accept(*(BACKEND.token_to_id(character) for character in "<|user|>"))
    assert not matcher.fault
    assert matcher.complete


def test_a_grammar_may_name_control_tokens() -> None:
    thinking = Source("grammar", 'start: <think> "<think>" /<.h/ <|user|>  // <think>')
    matcher = TOKENS.compile(thinking).start()
    assert texts(matcher) == {"<think>"}
    matcher.accept(BACKEND.token_to_id("<think>"))
    assert texts(matcher) == {"<"}
    matcher.accept(*(BACKEND.token_to_id(character) for character in "<think><xh"))
    assert texts(matcher) == {"<|user|>"}
    assert refusal(Source("grammar", "start: <nobody>")).data


def test_json_may_be_indented_but_not_drift_off_into_white_space() -> None:
    schema = Source.of_schema({"type": "array", "items": {"type": "integer"}})
    for good in ("[1,2]", "[1, 2]", "[\n    1,\n    2\n]", "[ 1 ]", "[\r\n\t1]"):
        assert follow(schema, good).complete, good
    for bad in ("[  ", "[\n\n", "[ \n", "[\n" + " " * 41):
        assert follow(schema, bad).fault, bad
    own = Source.of_schema({"type": "array", "x-guidance": {"whitespace_pattern": " {3}"}})
    assert follow(own, "[   ]").complete
    assert follow(own, "[ ]").fault


def test_tokens_can_be_taken_back() -> None:
    matcher = follow(Source("regex", "ab[cd]e"), "a")
    before = texts(matcher)
    matcher.accept(*BACKEND.encode("bde").ids)
    assert matcher.complete
    matcher.retract(3)
    assert texts(matcher) == before
    matcher.accept(*BACKEND.encode("bc").ids)
    assert texts(matcher) == {"e"}


def test_matchers_of_one_grammar_do_not_meet() -> None:
    grammar = TOKENS.compile(Source("regex", "ab|cd"))
    first, second = grammar.start(), grammar.start()
    first.accept(*BACKEND.encode("a").ids)
    third = first.copy()
    third.accept(*BACKEND.encode("b").ids)
    assert (texts(first), texts(second), third.complete) == ({"b"}, {"a", "c"}, True)


def test_forced_tokens_are_those_without_a_choice() -> None:
    assert BACKEND.decode(follow(Source.of_choices(["abcx", "abcy"])).forced()) == "abc"
    assert follow(Source.of_choices(["a", "b"])).forced() == []


def test_a_list_of_choices_may_be_as_long_as_the_wire_lets_it_be() -> None:
    """And a choice that begins another, or is nothing at all, is one like the others."""
    choices = ["", *(str(number) for number in range(9_999))]
    grammar = TOKENS.compile(Source.of_choices(choices))
    for choice in ("", "7", "77", "9998"):
        matcher = grammar.start()
        matcher.accept(*BACKEND.encode(choice).ids)
        assert not matcher.fault
        assert EOS in allowed(matcher.mask()), choice
        assert matcher.complete == (len(choice) == 4)
    matcher = grammar.start()
    matcher.accept(*BACKEND.encode("9999").ids)
    assert matcher.fault


def test_every_choice_of_the_longest_list_can_be_taken_after_all_others() -> None:
    """What a lexer has visited for one request it keeps for the next."""
    chance = Random(1)
    alone = MOST_BEGINNINGS // 80
    choices = [f"{number:03}" + "".join(chance.choices("abc# ", k=76)) for number in range(alone)]
    grammar = TOKENS.compile(Source.of_choices(choices))
    for choice in choices:
        matcher = grammar.start()
        tokens = BACKEND.encode(choice).ids
        for done in range(0, len(tokens), 20):
            matcher.mask()
            matcher.accept(*tokens[done : done + 20])
        assert matcher.complete, matcher


def test_a_list_with_more_to_tell_apart_is_refused() -> None:
    half = "a" * (MOST_BEGINNINGS // 2)
    TOKENS.compile(Source.of_choices([half + "b" * 19_999, half + "c", half, half]))
    message = refusal(Source.of_choices([half + "b" * 20_000, half + "c"])).message
    assert "have 40001 bytes" in message
    assert "40000 are the most: give fewer" in message
    assert refusal(Source.of_choices(["é" * 20_001])).message.startswith("the choices have 40002 bytes")


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"type": "strin"}, "#"),
        ({"type": "object", "properties": {"a": {"type": "object", "properties": {"b/c": {"type": "x"}}}}}, None),
        ({"type": "array", "items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "#/items/anyOf/1"),
        ({"$ref": "#/$defs/node", "$defs": {"node": {"properties": {"next": {"type": "x"}}}}}, None),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"pattern": "(?=a)"}}}, "#/$defs/n"),
        ({"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "x"}]}}, "$ref": "#/$defs/n"}, "#/$defs/n/anyOf/1"),
        ({"enum": []}, "#"),
        ([1], "#"),
    ],
)
def test_a_schema_is_refused_with_the_place(schema: Any, at: str | None) -> None:
    places = {
        "b/c": "#/properties/a/properties/b~1c",
        "node": "#/$defs/node/properties/next",
    }
    expected = at or next(place for key, place in places.items() if key in json.dumps(schema))
    error = refusal(Source.of_schema(schema))
    assert error.data == {"at": expected}
    assert expected in error.message


@pytest.mark.parametrize(
    ("source", "place"),
    [
        (Source("grammar", 'start: "a"\n  | nobody'), {"line": 2, "column": 5}),
        (Source("grammar", "start"), {"line": 1, "column": 1}),
        (Source("regex", "ab(c"), {"column": 3}),
        (Source("regex", "a(?=b)"), {"column": 2}),
        (Source("grammar", ""), {}),
    ],
)
def test_a_grammar_or_a_regex_is_refused_with_the_place(source: Source, place: dict[str, int]) -> None:
    error = refusal(source)
    if place.keys() == {"line", "column"}:
        assert error.data["line"] in (place["line"], place["line"] - 1)
        assert f"line {error.data['line']}, column {error.data['column']}" in error.message
    else:
        assert error.data == place
    assert "can't be used" in error.message


def test_what_is_too_long_or_no_json_is_refused() -> None:
    assert str(LONGEST_SOURCE) in refusal(Source("regex", "a" * (LONGEST_SOURCE + 1))).message
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, object()):
        with pytest.raises(ServeError, match="no JSON value"):
            Source.of_schema(value)


def test_messages_are_short_whatever_was_sent() -> None:
    assert len(refusal(Source("grammar", f"start: {'x' * 50_000}")).message) < 600
    assert len(refusal(Source.of_schema({"type": "y" * 50_000})).message) < 1000
    assert len(refusal(Source.of_schema({"properties": {"z" * 50_000: {"type": 1}}})).message) < 1000


def test_a_grammar_too_large_to_follow_is_a_fault_and_not_an_exception() -> None:
    schema = {"type": "array", "items": {"anyOf": [{"const": f"{i:04}" * 40} for i in range(400)]}}
    matcher = follow(Source.of_schema(schema))
    matcher.mask()
    matcher.accept(*BACKEND.encode("nope").ids)
    assert len(matcher.fault) <= 200
    assert allowed(matcher.mask()) == {EOS}


def test_a_tokenizer_that_cannot_be_followed_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    for tokenizer, ends in ((words.to_str(), [1]), (BACKEND.to_str(), [])):
        with pytest.raises(ServeError, match="can't follow a grammar") as refused:
            Vocabulary(tokenizer, 2, 2, ends)
        assert refused.value.code == "bad_request"


def test_masks_by_hand() -> None:
    assert allowed(only(37, 70)) == {37}
    assert allowed(all_but([3, 40, 999], 70)) >= set(range(70)) - {3, 40}
    assert not allowed(all_but([3, 40, 999], 70)) & {3, 40}
    assert lark_string('a"\x7f\n') == '"a\\"\\u007f\\n"'
