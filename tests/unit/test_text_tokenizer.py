"""The tokenizer: ids as transformers makes them, and what a model directory says about ending, hiding and sampling."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from mlxbcd.errors import ServeError
from mlxbcd.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "What is the capital of France? Paris, of course.",
    "def f(x):\n    return x + 1\n",
    "한국어 문장과 😀 emoji, ünïcödé, 中文",
]
TEXTS = ["", " ", "the fox", "  two  spaces\n\n", "한국어 👩‍👩‍👧 é", "<s>the<e>", "<think>the</think> fox", "x<|pad|>y"]


def byte_level() -> Backend:
    """A trained byte-level BPE with a BOS post-processor; `<e>` is special and `<think>` isn't."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<e>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "<e>",
    "clean_up_tokenization_spaces": False,
}


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model directory: keyword arguments are files by stem; None leaves a file out."""

    def write(backend: Backend | None = None, **files: Any) -> Path:
        (backend or byte_level()).save(str(tmp_path / "tokenizer.json"))
        for stem, content in ({"tokenizer_config": SETTINGS} | files).items():
            if content is not None:
                (tmp_path / f"{stem}.json").write_text(json.dumps(content))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def auto_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer


# ---------------------------------------------------------------------------------------------- text to ids


def test_ids_equal_those_of_transformers(directory: Callable[..., Path], auto_tokenizer: Any) -> None:
    path = directory()
    ours, theirs = Tokenizer.load(path), auto_tokenizer.from_pretrained(str(path))
    for text in TEXTS:
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False), text
        if not text.startswith("<s>"):
            assert ours.encode(text) == theirs.encode(text), text


def test_a_raw_prompt_begins_with_one_bos_whether_or_not_it_is_written_out(
    directory: Callable[..., Path],
) -> None:
    tokenizer = Tokenizer.load(directory())
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("the fox")[0] == 0
    assert tokenizer.encode("<s>the fox") == tokenizer.encode("the fox")
    assert 0 not in tokenizer.encode("the fox", special=False)


def test_truncation_and_padding_left_over_from_training_are_ignored(directory: Callable[..., Path]) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9, pad_id=1, pad_token="<e>")
    text = "the quick brown fox " * 3
    expected = byte_level().encode(text).ids
    assert len(expected) > 9
    assert Tokenizer.load(directory(backend)).encode(text) == expected


def test_a_lone_surrogate_is_refused_in_words(directory: Callable[..., Path]) -> None:
    with pytest.raises(ServeError, match="surrogate") as caught:
        Tokenizer.load(directory()).encode("a\ud800b")
    assert caught.value.code == "bad_request"


def test_encoding_a_long_text_leaves_the_interpreter_to_other_threads(
    directory: Callable[..., Path],
) -> None:
    tokenizer = Tokenizer.load(directory())
    text = "the quick brown fox jumps over the lazy dog. " * 10_000
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    # A thread that can't take the interpreter gets one turn at most.
    assert turns > 5


# ---------------------------------------------------------------------------------------------- ids to text


def test_output_hides_special_tokens_but_shows_the_reasoning_markers(
    directory: Callable[..., Path],
) -> None:
    tokenizer = Tokenizer.load(directory())
    ids = tokenizer.encode("<s><think>the</think> fox<e>", special=False)
    assert tokenizer.reasoning == ("<think>", "</think>")
    assert tokenizer.decode(ids) == "<think>the</think> fox"


def test_reasoning_markers_show_even_where_the_vocabulary_calls_them_special(
    directory: Callable[..., Path],
) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer.load(directory(backend))
    assert tokenizer.decode(tokenizer.encode("<think>a</think>")) == "<think>a</think>"


def test_half_a_pair_of_markers_is_no_reasoning(directory: Callable[..., Path]) -> None:
    backend = Backend.from_str(byte_level().to_str().replace("</think>", "<thunk>"))
    assert Tokenizer.load(directory(backend)).reasoning is None


def test_decoding_what_was_encoded_gives_the_text_back(directory: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(directory())
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_outside_the_vocabulary_have_no_text(directory: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(directory())
    fox = tokenizer.encode(" fox", special=False)
    assert tokenizer.decode([tokenizer.vocab_size + 7, *fox, 2**31 - 1]) == " fox"
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.piece(tokenizer.vocab_size - 1) is not None


def test_token_texts_keep_their_leading_space_and_name_special_tokens(
    directory: Callable[..., Path],
) -> None:
    tokenizer = Tokenizer.load(directory())
    ids = tokenizer.encode("the lazy dog", special=False)
    assert "".join(map(tokenizer.token_text, ids)) == "the lazy dog"
    assert tokenizer.token_text(1) == "<e>"


def test_token_texts_of_a_sentencepiece_vocabulary_keep_their_leading_space(
    directory: Callable[..., Path],
) -> None:
    vocab = {piece: index for index, piece in enumerate(["<unk>", "<s>", "<e>", "▁", "a", "▁a", "<0xE2>"])}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer.load(directory(backend))
    assert tokenizer.decode([5, 5]) == "a a"
    assert tokenizer.token_text(5) == " a"
    assert tokenizer.token_text(6) == "\ufffd"


# --------------------------------------------------------------------------------- what the directory says


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, {1, 7, 9}),
        ({"eos_token_id": 7}, {}, {1, 7}),
        ({}, {"eos_token_id": [8, 9]}, {1, 8, 9}),
        ({"eos_token_id": None}, {"eos_token_id": 8}, {1, 8}),
        (None, {"text_config": {"eos_token_id": 6}}, {1, 6}),
        (None, {"eos_token_id": 5, "text_config": {"eos_token_id": 6}}, {1, 5}),
        (None, None, {1}),
        ({"eos_token_id": True}, {"eos_token_id": "8"}, {1}),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_any_and_the_tokenizer_itself(
    directory: Callable[..., Path], generation: Any, config: Any, expected: set[int]
) -> None:
    tokenizer = Tokenizer.load(directory(generation_config=generation, config=config))
    assert tokenizer.eos_ids == expected
    assert tokenizer.decode(sorted(expected)) == ""


def test_end_tokens_equal_those_of_mlx_lm(directory: Callable[..., Path]) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    path = directory(generation_config={"eos_token_id": [5, 6]}, config={"eos_token_id": 4, "model_type": "llama"})
    config = utils.load_config(path)
    theirs = utils.load_tokenizer(path, eos_token_ids=config["eos_token_id"])
    assert Tokenizer.load(path).eos_ids == theirs.eos_token_ids


def test_a_model_without_any_end_token_just_has_none(directory: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.load(directory(tokenizer_config=None))
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.bos_id is None


def test_special_tokens_may_be_written_as_objects_or_in_the_legacy_map(
    directory: Callable[..., Path],
) -> None:
    path = directory(
        tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}},
        special_tokens_map={"eos_token": {"content": "<e>"}, "pad_token": None},
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<e>"}
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1})


def test_a_token_that_only_the_settings_call_special_is_special(directory: Callable[..., Path]) -> None:
    settings = SETTINGS | {"additional_special_tokens": ["<think>"], "pad_token": "<|nowhere|>"}
    backend = byte_level()
    [think] = backend.encode("<think>", add_special_tokens=False).ids
    tokenizer = Tokenizer.load(
        directory(Backend.from_str(backend.to_str().replace("</think>", "<turn>")), tokenizer_config=settings)
    )
    assert think in tokenizer.hidden
    assert tokenizer.encode("<|nowhere|>", special=False)[0] < tokenizer.vocab_size == backend.get_vocab_size()


def test_added_tokens_that_only_the_settings_know_get_the_id_they_have_there(
    directory: Callable[..., Path], auto_tokenizer: Any
) -> None:
    size = byte_level().get_vocab_size()
    added = {str(size): {"content": "<call>", "special": False, "normalized": False}}
    path = directory(tokenizer_config=SETTINGS | {"added_tokens_decoder": added})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("a<call>b", special=False)[1] == size
    theirs = auto_tokenizer.from_pretrained(str(path))
    assert tokenizer.encode("a<call>b") == theirs.encode("a<call>b")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0},
        ),
        ({"temperature": 1, "repetition_penalty": 1.1}, {"temperature": 1.0, "repetition_penalty": 1.1}),
        ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"temperature": None, "top_k": 50.0}, {"top_k": 50}),
        ({"temperature": "hot", "top_p": 0, "top_k": -1, "min_p": 2, "repetition_penalty": True}, {}),
        (None, {}),
    ],
)
def test_sampling_defaults_are_what_the_authors_sample_with(
    directory: Callable[..., Path], generation: Any, expected: dict[str, float]
) -> None:
    assert Tokenizer.load(directory(generation_config=generation)).generation_defaults == expected


def test_a_template_file_wins_over_the_settings_and_the_settings_over_the_legacy_file(
    directory: Callable[..., Path],
) -> None:
    path = directory(chat_template={"chat_template": "legacy"})
    assert Tokenizer.load(path).chat_template == "legacy"
    path = directory(tokenizer_config=SETTINGS | {"chat_template": "settings"})
    assert Tokenizer.load(path).chat_template == "settings"
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(path).chat_template == "file"


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "D"),
        ([{"name": "rag", "template": "R"}], "R"),
        ({"default": "D", "tool_use": "T"}, "D"),
        ([{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}], None),
        ([], None),
        (None, None),
    ],
)
def test_of_several_named_templates_the_default_is_taken(
    directory: Callable[..., Path], declared: Any, expected: str | None
) -> None:
    path = directory(tokenizer_config=SETTINGS | {"chat_template": declared})
    assert Tokenizer.load(path).chat_template == expected


# ------------------------------------------------------------------------------------------ broken or unusual


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_broken_file_is_named(directory: Callable[..., Path], name: str, content: str) -> None:
    path = directory()
    (path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ServeError, match=name.replace(".", r"\.")) as caught:
        Tokenizer.load(path)
    assert caught.value.code == "load_failed"


def test_a_model_without_tokenizer_json_is_converted(directory: Callable[..., Path]) -> None:
    pytest.importorskip("transformers")
    path = directory(tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}, config={"model_type": "gpt2"})
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    expected = Tokenizer.load(path)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    text = "the quick brown 한국어"
    assert Tokenizer.load(path).encode(text, special=False) == expected.encode(text, special=False)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}},
        {"bos_token": "\ud800"},
        {"additional_special_tokens": ["\ud800"]},
    ],
)
def test_tokens_that_no_vocabulary_can_have_fail_to_load(
    directory: Callable[..., Path], config: dict[str, object]
) -> None:
    with pytest.raises(ServeError, match="odd tokens") as caught:
        Tokenizer.load(directory(tokenizer_config=config))
    assert caught.value.code == "load_failed"


def test_a_model_that_needs_its_own_code_is_refused_without_running_it(
    directory: Callable[..., Path],
) -> None:
    path = directory(tokenizer_config={"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}})
    (path / "tokenizer.json").unlink()
    (path / "code.py").write_text("raise SystemExit('the code has run')")
    with pytest.raises(ServeError, match="never run") as caught:
        Tokenizer.load(path)
    assert caught.value.code == "load_failed"


def test_a_directory_without_any_vocabulary_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ServeError, match=r"no tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code == "load_failed"
