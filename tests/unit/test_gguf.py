"""GGUF import: the same weights and tokens come out that went in, or an error says what could not be taken."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf_writer as tiny
import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q8_0, Encoded, blocks, gguf, metadata, plain, tensors, write
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from mlxbcd.errors import ServeError
from mlxbcd.model.gguf import import_gguf
from mlxbcd.model.load import load

RANDOM = np.random.default_rng(7)


def imported(path: Path, data: bytes) -> Path:
    out = path / "out"
    import_gguf(write(path / "in.gguf", data), out)
    return out


def parameters(directory: Path) -> dict[str, mx.array]:
    return dict(tree_flatten(load(directory).model.parameters()))


def refused(path: Path, data: bytes) -> str:
    """The message; nothing may have been left behind."""
    with pytest.raises(ServeError) as caught:
        imported(path, data)
    assert caught.value.code == "load_failed"
    assert caught.value.message.startswith("in.gguf")
    assert [entry.name for entry in path.iterdir()] == ["in.gguf"]
    return caught.value.message


def packed_model(kind: int) -> tuple[dict[str, Encoded], dict[str, np.ndarray[Any, Any]]]:
    """The tiny model with random blocks of `kind`, and what its matrices mean, computed in float64."""
    encoded: dict[str, Encoded] = {}
    meaning: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in tiny.weights().items():
        if array.ndim == 1:
            encoded[tiny.gguf_name(name)], meaning[name] = plain(array), array
            continue
        rows, groups = array.shape[0], array.shape[1] // 32
        scales = RANDOM.uniform(0.001, 0.1, (rows, groups)).astype(np.float16)
        offsets = RANDOM.uniform(-1, 1, (rows, groups)).astype(np.float16)
        low, high = (-128, 128) if kind == Q8_0 else (0, 16)
        elements = RANDOM.integers(low, high, (rows, groups, 32))
        value = elements - 8 if kind == Q4_0 else elements
        exact = value * scales.astype(np.float64)[..., None]
        if kind == Q4_1:
            exact += offsets.astype(np.float64)[..., None]
        meaning[name] = exact.reshape(rows, -1)
        scales, offsets, elements = (tiny.interleaved(name, part) for part in (scales, offsets, elements))
        encoded[tiny.gguf_name(name)] = blocks(scales, offsets, elements, kind)
    return encoded, meaning


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_quantised_blocks_keep_their_exact_values(tmp_path: Path, kind: int) -> None:
    encoded, meaning = packed_model(kind)
    out = imported(tmp_path, gguf(metadata(), encoded))
    got = parameters(out)
    assert got.keys() == meaning.keys()
    for name, exact in meaning.items():
        wanted = exact.astype(np.float16) if exact.ndim == 1 else exact
        np.testing.assert_array_equal(np.array(got[name]), wanted.astype(np.float32), err_msg=name)
    stored = mx.load(str(out / "model.safetensors"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {mx.uint32, mx.float16}
    bits = 8 if kind == Q8_0 else 4
    assert json.loads((out / "config.json").read_text())["quantization"] == {
        "group_size": 32,
        "bits": bits,
        "mode": "affine",
    }


def test_tensors_of_another_width_than_most_are_configured_by_name(tmp_path: Path) -> None:
    encoded, meaning = packed_model(Q4_1)
    wide, wide_meaning = packed_model(Q8_0)
    encoded["token_embd.weight"] = wide["token_embd.weight"]
    out = imported(tmp_path, gguf(metadata(), encoded))
    assert json.loads((out / "config.json").read_text())["quantization"]["model.embed_tokens"]["bits"] == 8
    got = parameters(out)
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(np.array(got[name]), wide_meaning[name].astype(np.float32))
    name = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(np.array(got[name]), meaning[name].astype(np.float32))


def test_a_float32_file_comes_out_bit_for_bit(tmp_path: Path) -> None:
    got = parameters(imported(tmp_path, gguf(metadata(), tensors())))
    for name, array in tiny.weights().items():
        np.testing.assert_array_equal(np.array(got[name]), array, err_msg=name)


@pytest.mark.parametrize(("kind", "dtype"), [(F16, mx.float16), (BF16, mx.bfloat16)])
def test_norms_are_cast_to_the_type_of_the_matrices(tmp_path: Path, kind: int, dtype: mx.Dtype) -> None:
    out = imported(tmp_path, gguf(metadata(), tensors(kind)))
    stored = mx.load(str(out / "model.safetensors"))
    assert isinstance(stored, dict)
    assert {array.dtype for array in stored.values()} == {dtype}
    norm = mx.array(tiny.weights()["model.norm.weight"]).astype(dtype)
    assert mx.array_equal(stored["model.norm.weight"], norm).item()
    assert "quantization" not in json.loads((out / "config.json").read_text())


def test_the_config_says_what_the_file_says(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    out = imported(tmp_path, gguf(metadata(**changes), tensors()))
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tiny.VOCABULARY),
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 2,
    }
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0
    text = json.loads((out / "tokenizer_config.json").read_text())
    assert text["chat_template"] == tiny.TEMPLATE
    assert (text["bos_token"], text["eos_token"], text["pad_token"]) == ("<|start|>", "<|end|>", "<pad>")
    assert text["model_max_length"] == 256


def test_a_file_without_an_output_tensor_ties_its_embeddings(tmp_path: Path) -> None:
    out = imported(tmp_path, gguf(metadata(), tensors(skip=["lm_head.weight"])))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in parameters(out)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    out = imported(tmp_path_factory.mktemp("gguf"), gguf(metadata(), tensors()))
    return Tokenizer.from_file(str(out / "tokenizer.json"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        ("hello world", ["hello", "Ġw", "o", "r", "l", "d"]),
        ("12", ["1", "2"]),  # there is a merge for it, but digits stand alone
        ("a12", ["a", "1", "2"]),
        ("<|start|>hello<|end|>", ["<|start|>", "hello", "<|end|>"]),
        ("he<tool>ll", ["he", "<tool>", "ll"]),
        ("é", ["Ã", "©"]),
    ],
)
def test_text_is_split_as_the_file_wants_it(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens
    assert tokenizer.encode(text).ids == [tiny.VOCABULARY.index(token) for token in tokens]


def test_without_the_rule_for_digits_their_merges_apply(tmp_path: Path) -> None:
    out = imported(tmp_path, gguf(metadata(tokenizer__ggml__pre="gpt-2"), tensors()))
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("12").tokens == ["12"]


def test_only_control_tokens_are_left_out_of_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>he<tool>ll<|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>ll"


def test_a_file_that_begins_texts_with_a_token_gets_it(tmp_path: Path) -> None:
    out = imported(tmp_path, gguf(metadata(tokenizer__ggml__add_bos_token=True), tensors()))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("he").tokens == ["<|start|>", "he"]
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]
    assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is True


@given(text=st.text(max_size=60))
def test_any_text_survives_its_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"general__architecture": None}, "architecture None"),
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__rope__scaling__type": "linear"}, "llama.rope.scaling.factor"),
        ({"llama__rope__dimension_count": 8}, "only a part of each head"),
        ({"llama__attention__value_length": 8}, "another width"),
        ({"llama__attention__head_count": None}, "llama.attention.head_count"),
        ({"llama__attention__head_count": np.array([4, 4])}, "llama.attention.head_count"),
        ({"llama__attention__head_count": 0}, "is damaged"),
        ({"llama__attention__head_count_kv": 3}, "is damaged"),
        ({"llama__block_count": 3}, "lacks the tensor 'blk.2.attn_q.weight'"),
        ({"llama__block_count": 2**31}, "is damaged"),
        ({"llama__block_count": 1}, "'blk.1.attn_k.weight'"),
        ({"llama__feed_forward_length": 64}, "has shape"),
        ({"llama__context_length": None}, "llama.context_length"),
        ({"llama__attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
        ({"llama__rope__freq_base": float("inf")}, "rope.freq_base"),
        ({"llama__rope__freq_base": float("nan")}, "rope.freq_base"),
        ({"tokenizer__ggml__model": "llama"}, "kind 'llama'"),
        ({"tokenizer__ggml__pre": "qwen2"}, "rule 'qwen2'"),
        ({"tokenizer__ggml__pre": None}, "rule None"),
        ({"tokenizer__ggml__tokens": None}, "no vocabulary"),
        ({"tokenizer__ggml__tokens": [*tiny.VOCABULARY[:-1], "he"]}, "twice"),
        ({"tokenizer__ggml__token_type": tiny.TYPES[:-1]}, "a type for each token"),
        ({"tokenizer__ggml__token_type": None}, "a type for each token"),
        ({"tokenizer__ggml__merges": None}, "no merges"),
        ({"tokenizer__ggml__merges": ["h o"]}, "the merge 'h o'"),
        ({"tokenizer__ggml__merges": ["he"]}, "the merge 'he'"),
        ({"tokenizer__ggml__eos_token_id": None}, "end-of-text"),
        ({"tokenizer__ggml__eos_token_id": len(tiny.VOCABULARY)}, "its eos token"),
        ({"general__alignment": 12}, "alignment"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, gguf(metadata(**changes), tensors()))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blk.0.attn_q.weight", Encoded(Q4_K, (64, 64), bytes(64 * 36)), "is encoded as Q4_K"),
        ("blk.0.attn_q.weight", Encoded(99, (64, 64), bytes(64 * 36)), "is encoded as type 99"),
        ("blk.0.attn_q.weight", Encoded(Q8_0, (64, 48), bytes(64 * 51)), "cannot be Q8_0"),
        ("blk.0.attn_q.weight", Encoded(F32, (64, 0), b""), "is damaged"),
        ("blk.0.attn_q.weight", Encoded(F32, (1, 1, 1, 1, 64), bytes(256)), "5 dimensions"),
        ("output_norm.weight", Encoded(Q8_0, (64,), bytes(68)), "the norm"),
        ("output.weight", plain(np.zeros((3, 64))), "'output.weight' has shape"),
        ("rope_freqs.weight", plain(np.ones(8)), "'rope_freqs.weight'"),
        ("blk.0.attn_q.bias", plain(np.ones(64)), "'blk.0.attn_q.bias'"),
    ],
)
def test_tensors_that_are_not_understood_are_named(tmp_path: Path, name: str, tensor: Encoded, message: str) -> None:
    assert message in refused(tmp_path, gguf(metadata(), tensors() | {name: tensor}))


def test_a_scale_that_would_not_fit_is_refused_rather_than_rounded(tmp_path: Path) -> None:
    encoded, _ = packed_model(Q8_0)
    rows = np.zeros((64, 2))
    encoded["blk.0.attn_q.weight"] = blocks(rows + 60000, rows, np.ones((64, 2, 32)), Q8_0)
    assert "float16" in refused(tmp_path, gguf(metadata(), encoded))


def test_a_norm_that_would_not_fit_is_refused_rather_than_rounded(tmp_path: Path) -> None:
    encoded = tensors(F16) | {"output_norm.weight": plain(np.full(64, 1e6))}
    assert "float16" in refused(tmp_path, gguf(metadata(), encoded))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "array of type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ1s", 3, 0, 1, 1, b"a", 8, 1, b"\xff"), "UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q1sIB", 1, b"a", 0, 0) * 2, "twice"),
    ],
)
def test_a_damaged_head_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    assert message in refused(tmp_path, data)


WHOLE = gguf(metadata(), tensors(F16))


@given(length=st.integers(0, len(WHOLE) - 1))
@settings(max_examples=60)
def test_a_file_cut_anywhere_is_refused_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    refused(tmp_path_factory.mktemp("cut"), WHOLE[:length])


@given(position=st.integers(0, 6000), value=st.integers(0, 255))
@settings(max_examples=100)
def test_a_damaged_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    data = bytearray(WHOLE)
    data[position] = value
    path = tmp_path_factory.mktemp("flip")
    try:
        out = imported(path, bytes(data))
    except ServeError:
        assert not (path / "out").exists()
    else:
        assert (out / "model.safetensors").is_file()


def test_something_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), ("none", "cannot be opened"), (".", "not a regular file")):
        with pytest.raises(ServeError, match=message):
            import_gguf(tmp_path / name, tmp_path / "out")


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    out = imported(tmp_path, WHOLE)
    (out / "config.json").write_text("mine")
    import_gguf(tmp_path / "in.gguf", out)
    assert (out / "config.json").read_text() == "mine"


def test_of_two_imports_at_once_the_first_to_finish_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.gguf", WHOLE)
    rename = Path.rename

    def late(partial: Path, out: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        import_gguf(source, out)
        (out / "first").touch()
        return rename(partial, out)

    monkeypatch.setattr(Path, "rename", late)
    import_gguf(source, tmp_path / "out")
    assert (tmp_path / "out" / "first").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in.gguf", "out"]


@pytest.mark.model
def test_the_embedded_model_is_the_import_that_was_compared_with_mlx_bit_for_bit(model_directory: Path) -> None:
    with (model_directory / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Compared once with what mx.load reads from the file, tensor by tensor.
    assert digest == "c02143334ed01ff109ddaada11000af60ec06987aa9bf7f79a816c18001c3b03"
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    assert tokenizer.encode("In 2024").tokens == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1


@pytest.mark.model
def test_the_embedded_model_knows_the_capital_of_france(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    model = load(model_directory).model
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>").ids
    ids = tokenizer.encode(prompt).ids + answer
    # Each token of the answer is the likeliest after all before it: greedy decoding in one forward.
    likeliest = mx.argmax(model(mx.array([ids]))[0], axis=-1)
    assert np.array(likeliest)[-len(answer) - 1 : -1].tolist() == answer
