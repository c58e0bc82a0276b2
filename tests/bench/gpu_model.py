"""Owns the models of the GPU benchmark: random weights in the shape of real ones, and rows that have read a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama

from mlxbcd.model.forward import Forward, Group
from mlxbcd.state.composition import WIDEST_STEP, Composition, inspect
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, commit

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
"""Name → configuration; `tiny` only shows that the script runs."""


@dataclass(frozen=True)
class Model:
    """One model on both sides, with the same arrays.

    Attributes:
        weights: bytes that a decode step reads of it: all but the table of embeddings.
    """

    name: str
    forward: Forward
    composition: Composition
    twin: Any
    vocab_size: int
    weights: int


def make(shape: str, bits: int | None) -> Model:
    """A model with random weights, bf16 or quantised."""
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **SHAPES[shape]}
    mx.random.seed(0)

    def empty() -> Any:
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.set_dtype(mx.bfloat16)
        if bits is not None:
            nn.quantize(model, group_size=64, bits=bits)
        model.eval()
        return model

    def randomised(path: str, array: mx.array) -> mx.array:
        if array.ndim == 1:
            return mx.ones(array.shape, mx.bfloat16)
        if array.dtype == mx.uint32:
            halves = [mx.random.randint(0, 1 << 16, array.shape, mx.uint32) for _ in range(2)]
            return halves[0] | (halves[1] << 16)
        if path.endswith(("scales", "biases")):
            # Values 0 … 15 become −7.5 … 7.5 times 0.004.
            return mx.full(array.shape, 0.004 if path.endswith("scales") else -0.03, mx.bfloat16)
        return (mx.random.normal(array.shape) * 0.02).astype(mx.bfloat16)

    model, twin = empty(), empty()
    model.update(tree_map_with_path(randomised, model.parameters()))
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    twin.update(model.parameters())
    weights = sum(array.nbytes for path, array in tree_flatten(model.parameters()) if "embed_tokens" not in path)
    name = "bf16" if bits is None else f"{bits}bit"
    forward = Forward(model)
    return Model(name, forward, inspect(model, "llama"), twin, config["vocab_size"], weights)


def prefilled(model: Model, key: Key, prompt: Sequence[int]) -> Rows:
    """One row that has processed all of a prompt but its last token."""
    rows = Rows(model.composition)
    commit(rows.prepare(join=[Joiner(key, COLD, len(prompt))]))
    for begin in range(0, len(prompt) - 1, WIDEST_STEP):
        piece = prompt[begin : min(begin + WIDEST_STEP, len(prompt) - 1)]
        turn = rows.begin(len(piece))
        model.forward.run([Group(mx.array([piece], dtype=mx.int32), turn.caches)])
        mx.eval(turn.arrays())
        turn.resolve()
    return rows


_STRIDE = 7919
_LOUD = 400.0
"""The embeddings' new standard deviation is about 8; what 32 layers of random weights add to them, about as much."""


def follower(model: Model, token: int) -> int:
    """What a model that was `made_sure` says behind a token."""
    return (token + _STRIDE) % model.vocab_size


def make_sure(model: Model) -> None:
    """Let what follows a token be certain: the head becomes the table of embeddings, moved on by some rows, and the
    embeddings outweigh what the layers add to them. Sizes and types stay as they are.

    Random weights give near ties, at which two kinds of forward draw different tokens: then nobody could say beforehand
    what a row is going to draw.
    """
    inner = model.forward.model
    table = inner.model.embed_tokens
    for name, array in table.parameters().items():
        inner.lm_head[name] = mx.roll(array, _STRIDE, axis=0)
        if name != "weight" or array.dtype != mx.uint32:
            table[name] = array * _LOUD
    mx.eval(inner.lm_head.parameters(), table.parameters())
