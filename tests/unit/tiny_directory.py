"""Owns writing a tiny model directory: random weights, a byte-level tokenizer, a chat template with reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import LLAMA, make_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS: Final = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
MARKERS: Final = ("<think>", "</think>")
MERGES: Final = ("# #", "## #", "t h", "th e", "Ġ the", "i n", "Ġ a")
VOCABULARY: Final = 288
"""Width of the logits; a little more than the tokenizer has."""
CONTEXT: Final = 400
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking %}<think>{% endif %}"
)
EOS: Final = "<|end|>"
CONFIG: Final = LLAMA | {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False}


def make_tokenizer() -> Tokenizer:
    """Every byte is a token, some words are, and reasoning has markers."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    return backend


def write_text(directory: Path, **generation: Any) -> None:
    """The tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"eos_token": EOS, "chat_template": TEMPLATE})
    write_json(directory / "generation_config.json", generation)


def write_model(directory: Path, seed: int = 0, **generation: Any) -> Path:
    """A whole model directory; `generation` is its generation_config.json."""
    write_text(directory, **generation)
    write_json(directory / "config.json", CONFIG)
    parameters = dict(tree_flatten(make_model(CONFIG, seed).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), parameters)
    return directory


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
