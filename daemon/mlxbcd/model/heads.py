"""Owns multi-token-prediction heads: a layer that checkpoints of some families carry and the zoo drops at load.

Such a head reads the model's final hidden state of a token together with the token that follows it, and gives a hidden
state from which the model's own output layer tells the token after that. Read again with its own answer, it goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

Weights = dict[str, mx.array]


class Head(nn.Module):  # type: ignore[misc]  # MLX's modules have no types
    """One head.

    Args:
        block: the family's own decoder layer.
        width: of hidden states.
        scores: tokens that it has an output layer of its own for, a list of frequent ones; 0 leaves it to the model's.
    """

    def __init__(self, block: nn.Module, width: int, eps: float, scores: int = 0) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(width, eps=eps)
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(width, eps=eps)
        self.scores = scores
        if scores:
            self.output = nn.Linear(width, scores, bias=False)

    def __call__(self, hidden: mx.array, tokens: mx.array, cache: Any) -> mx.array:
        """Hidden states [B, N, D] of embedded tokens [B, N, D], each behind a hidden state [B, N, D]."""
        from mlx_lm.models.base import create_attention_mask

        both = mx.concatenate([self.hidden_norm(hidden), self.token_norm(tokens)], axis=-1)
        x = self.projection(both)
        return cast(mx.array, self.norm(self.block(x, create_attention_mask(x, cache), cache)))


@dataclass(frozen=True, slots=True)
class _Family:
    """Where a family keeps its first head.

    Attributes:
        prefix: of its weights in the checkpoint.
        names: parts of a head, by what the checkpoint calls them. All others belong to the block.
        block: name of the block's class in the family's module of the zoo.
    """

    prefix: str
    names: Mapping[str, str]
    block: str


_FAMILIES: Final[Mapping[str, _Family]] = {
    "mimo": _Family(
        "model.mtp_layers.0.",
        {
            "token_layernorm": "token_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "projection",
            "final_layernorm": "norm",
        },
        "TransformerBlock",
    ),
}
"""model_type → its heads. Others' are left out, as the zoo does."""


def extract(model_type: str, weights: Weights) -> Weights:
    """The weights of a checkpoint's first head, by the names of `Head`; none where the family is not known to have one,
    or the checkpoint doesn't, or packs it."""
    family = _FAMILIES.get(model_type)
    if family is None:
        return {}
    found: Weights = {}
    for name, array in weights.items():
        if name.startswith(family.prefix):
            part, _, leaf = name.removeprefix(family.prefix).partition(".")
            known = family.names.get(part)
            found[f"{known}.{leaf}" if known else f"block.{part}.{leaf}"] = array
    return {} if any(name.endswith(".scales") for name in found) else found


def make(model_type: str, model: nn.Module, weights: Weights) -> Head:
    """The head of a loaded model, evaluated, with floats of the type of its embeddings.

    Raises:
        ValueError: the weights are not those of a head.
    """
    family = _FAMILIES[model_type]
    home = sys.modules[type(model).__module__]
    block: Callable[[Any], nn.Module] = getattr(home, family.block)
    head = Head(block(model.args), model.args.hidden_size, model.args.rms_norm_eps)
    kind = embedding(model).weight.dtype
    head.load_weights([(name, array.astype(kind)) for name, array in weights.items()])
    head.eval()
    mx.eval([array for _, array in tree_flatten(head.parameters())])
    return head


def embedding(model: nn.Module) -> nn.Module:
    """What maps the model's token ids to vectors."""
    return model.model.embed_tokens
