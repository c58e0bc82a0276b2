"""Owns rebuilding a byte-level BPE tokenizer from a GGUF file's own vocabulary, merges and token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mlxbcd.model.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: special tokens, and added tokens that are text."""
_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Pre-tokenizers that split digits one by one before GPT-2's pattern."""
_PLAIN: Final = frozenset({"gpt-2", "olmo", "mpt", "jais"})
"""Pre-tokenizers that are GPT-2's pattern alone."""
_ROLES: Final[Mapping[str, str]] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def tokens(file: GGUFFile) -> list[str]:
    """The vocabulary in order of its ids.

    Raises:
        ServeError: `load_failed` where there is none.
    """
    found = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(found, list) or not found:
        file.fail("holds no vocabulary")
    return found


def build(file: GGUFFile) -> Tokenizer:
    """The tokenizer, whose ids equal those the file was made with.

    Raises:
        ServeError: `load_failed` for a tokenizer of another kind, or one that is damaged.
    """
    metadata = file.metadata
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        file.fail(f"has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') can be imported")
    if split not in _SINGLE_DIGITS | _PLAIN:
        file.fail(f"splits text by the rule {split!r}, which is not known; its tokens would come out wrong")
    vocabulary = tokens(file)
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or types.shape != (len(vocabulary),):
        file.fail("lacks a type for each token of its vocabulary")
    if len(set(vocabulary)) != len(vocabulary):
        file.fail("is damaged: a token appears twice in its vocabulary")

    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, _merges(file)))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)
    if split in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    else:
        tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [vocabulary[i] for i in np.flatnonzero(types == wanted)]
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    if _adds_bos(file):
        bos = token_ids(file)["bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{vocabulary[bos]} $A", special_tokens=[(vocabulary[bos], bos)]
        )
    return tokenizer


def token_ids(file: GGUFFile) -> dict[str, int]:
    """The ids of the special roles as a Hugging Face config names them; `eos_token_id` is always there."""
    roles = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    found = {name: number for role, name in roles.items() if (number := _role(file, role)) is not None}
    if "eos_token_id" not in found:
        file.fail("names no end-of-text token")
    return found


def settings(file: GGUFFile, context: int) -> dict[str, Any]:
    """The tokenizer_config.json, with the chat template where the file has one."""
    vocabulary = tokens(file)
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(file),
        "add_prefix_space": bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False)),
    }
    for role, name in _ROLES.items():
        number = _role(file, role)
        if number is not None:
            found[name] = vocabulary[number]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        found["chat_template"] = template
    return found


def _adds_bos(file: GGUFFile) -> bool:
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)) and _role(file, "bos") is not None


def _role(file: GGUFFile, role: str) -> int | None:
    number = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(tokens(file)):
        file.fail(f"is damaged: its {role} token is {number!r}")
    return number


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        file.fail("holds no merges for its vocabulary")
    known = set(tokens(file))
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, separator, right = merge.partition(" ")
        if not separator or not {left, right, left + right} <= known:
            file.fail(f"is damaged: the merge {merge!r} is not of its vocabulary")
        pairs.append((left, right))
    return pairs
