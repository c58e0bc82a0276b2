"""Incremental detokenisation: whatever the tokenizer and the ids, the parts add up to the full decode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from mlxbcd.text.decoding import DecoderKind
from mlxbcd.text.detokenizer import Detokenizer
from mlxbcd.text.metadata import TextMetadata
from mlxbcd.text.tokenizer import Tokenizer

TRICKY = [
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇫🇷",
    "한국어 조합 \u1112\u1161\u11ab",
    "e\u0301 a\u0308\u0323 combining",
    "\ufffd a real replacement \ufffd\ufffd",
    "  spaces\n\n\ttabs ",
    "中文 العربية עברית ไทย བོད",
]
METADATA = TextMetadata(
    tokenizer={"bos_token": "<s>", "eos_token": "</s>"}, config={}, generation={}, chat_template=None
)
PIECES = [
    *("▁", "▁▁", "▁the", "▁The", "the", "e", "s", ",", ".", "▁,", "\n", "\ufffd", "한", "é", "\u0301", "😀", "\u200d"),
    *("##ing", "##", "ing</w>", "</w>", "a</w>", "don", "'", "t", "Ġx", "Ċ", "Ã", "©", "<0xZZ>", "▁<0x41>"),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def with_pieces(decoder: Any) -> Tokenizer:
    """A vocabulary of awkward pieces, all single bytes among them, under a decoder."""
    vocab = {piece: index for index, piece in enumerate(["<unk>", "<s>", "</s>", *PIECES, *BYTES])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, METADATA)


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text for text in TRICKY for _ in range(3)], trainer)
    # An added token's characters are outside the byte alphabet; another's are inside and no UTF-8.
    backend.add_tokens([AddedToken("<日本>", normalized=False), AddedToken("né", normalized=False)])
    return Tokenizer(backend, METADATA)


def sentencepiece(*steps: Any) -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])


KINDS: dict[str, Any] = {
    "byte-level": byte_level,
    "sentencepiece, stripped": lambda: with_pieces(sentencepiece(decoders.Strip(" ", 1, 0))),
    "sentencepiece": lambda: with_pieces(sentencepiece()),
    "replaced after fusing": lambda: with_pieces(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")])
    ),
    "metaspace": lambda: with_pieces(decoders.Metaspace()),
    "metaspace with bytes": lambda: with_pieces(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    ),
    "wordpiece": lambda: with_pieces(decoders.WordPiece()),
    "end of word": lambda: with_pieces(decoders.BPEDecoder()),
    "no decoder": lambda: with_pieces(None),
    "byte-level, stripped": lambda: with_pieces(decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])),
    "metaspace, stripped": lambda: with_pieces(
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    ),
    "far replacement": lambda: with_pieces(decoders.Sequence([decoders.Fuse(), decoders.Replace("▁the", "X")])),
}
WHOLE = {"byte-level, stripped", "metaspace, stripped", "far replacement"}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, some outside the vocabulary, with runs of the bytes of real characters among them."""
    single = st.integers(0, tokenizer.vocab_size + 3).map(lambda index: [index])
    run = st.text(min_size=1, max_size=3).map(lambda text: byte_ids(tokenizer, text.encode("utf-8", "replace")))
    cut = st.tuples(run, st.integers(0, 4)).map(lambda pair: pair[0][: pair[1]])
    return st.lists(single | run | cut, max_size=30).map(lambda parts: [index for part in parts for index in part])


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_piece = {tokenizer.piece(index): index for index in range(tokenizer.vocab_size)}
    if tokenizer.decoding.kind is DecoderKind.BYTES:
        by_bytes = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
        return [by_bytes[bytes([byte])] for byte in data]
    return [by_piece[BYTES[byte]] for byte in data]


def parts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_parts_add_up_to_the_full_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(tokenizer))
    assert "".join(parts_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece, stripped", "wordpiece"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_resumed_stream_goes_on_with_exactly_the_rest(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(ids_of(tokenizer))
    known = data.draw(st.integers(0, len(ids)))
    before = "".join(parts_of(tokenizer, ids)[:known])
    stream = Detokenizer(tokenizer)
    assert stream.prime(ids[:known]) == before
    rest = "".join(map(stream.push, ids[known:])) + stream.finish()
    assert before + rest == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_streams_that_take_turns_do_not_mix(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = [data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))]
    turns = data.draw(st.permutations([0] * len(ids[0]) + [1] * len(ids[1])))
    streams, texts, feeds = [Detokenizer(tokenizer), Detokenizer(tokenizer)], ["", ""], [iter(ids[0]), iter(ids[1])]
    for turn in turns:
        texts[turn] += streams[turn].push(next(feeds[turn]))
    assert [text + stream.finish() for text, stream in zip(texts, streams, strict=True)] == [
        tokenizer.decode(ids[0]),
        tokenizer.decode(ids[1]),
    ]


@given(text=st.sampled_from(TRICKY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_text_comes_back_unchanged_and_no_character_is_sent_in_halves(text: str) -> None:
    tokenizer = tokenizer_of("byte-level")
    if any(marker in text for marker in ("<s>", "</s>")):
        return
    parts = parts_of(tokenizer, tokenizer.encode(text, special=False))
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


def test_only_decoders_whose_text_is_not_local_hold_everything_back() -> None:
    kinds = {kind: tokenizer_of(kind).decoding.kind for kind in KINDS}
    assert {kind for kind, found in kinds.items() if found is DecoderKind.WHOLE} == WHOLE
    assert kinds["byte-level"] is DecoderKind.BYTES


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WHOLE))
def test_a_word_is_sent_as_soon_as_its_token_is_there(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream = Detokenizer(tokenizer)
    [word] = [i for i in range(tokenizer.vocab_size) if tokenizer.piece(i) == ("e" if kind == "byte-level" else "the")]
    assert stream.push(word).strip() in ("the", "e")
    assert all(stream.push(word) for _ in range(3))


def test_a_character_in_byte_pieces_is_held_until_the_run_ends_and_bad_runs_are_as_in_a_full_decode() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    [word] = [index for index in range(tokenizer.vocab_size) if tokenizer.piece(index) == "the"]
    smile = byte_ids(tokenizer, "😀".encode())
    assert parts_of(tokenizer, [*smile, word]) == ["", "", "", "", "😀the", ""]
    assert parts_of(tokenizer, [*smile, *smile[:2]])[-1] == "\ufffd" * 6 == tokenizer.decode([*smile, *smile[:2]])


def test_incomplete_utf8_at_the_end_is_one_replacement_character() -> None:
    tokenizer = tokenizer_of("byte-level")
    assert parts_of(tokenizer, byte_ids(tokenizer, "a😀".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_the_reasoning_markers_survive_and_end_tokens_do_not() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = tokenizer.encode("<think></think></s>", special=False)
    assert "".join(parts_of(tokenizer, ids)) == "<think></think>"


def test_a_token_costs_the_same_however_long_the_stream_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("sentencepiece, stripped")
    decoded: list[int] = []
    full = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or full(ids))
    word, byte = tokenizer.encode("the", special=False)[0], byte_ids(tokenizer, b"\xe2")[0]
    stream = Detokenizer(tokenizer)
    for _ in range(200):
        stream.push(word)
    assert max(decoded) <= 2
    decoded.clear()
    # A run of bytes of any length is decoded once, when it ends.
    for _ in range(200):
        stream.push(byte)
    assert not decoded
    stream.push(word)
    assert sorted(decoded)[-1] == 202
    assert len(decoded) == 2


def test_repr_tells_what_is_held() -> None:
    tokenizer = tokenizer_of("byte-level")
    stream = Detokenizer(tokenizer)
    for first, _ in pairwise(byte_ids(tokenizer, "é".encode())):
        stream.push(first)
    assert "b'\\xc3'" in repr(stream)
