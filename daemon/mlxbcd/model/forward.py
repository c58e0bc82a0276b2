"""Owns the forward seam: an unmodified model of the zoo, split into trunk and head, with attention in our hands.

Three things are bound to one loaded model, all without editing or copying a model definition:

* **trunk and head are separate calls.** The class of the model's trunk (the module that maps ids to hidden states) is
  swapped for a subclass that can record its output or answer with a given one, so `hidden` stops before the vocabulary
  and `head` projects only the positions asked for, with whatever scaling or soft cap the model applies after it.
* **attention is one function.** The zoo's modules bind `scaled_dot_product_attention` by name; that name is rebound to
  `attend`, which hands the call to the layout that holds the keys (see `state`), and is the zoo's own function
  otherwise.
* **an iteration is a list of groups** (`Group`): `run` takes all that advance in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model import cpu, cuda

_TRUNKS = ("model", "transformer", "backbone")
_HEADS = {"lm_head", "as_linear", "output", "embed_out", "embed_tokens", "lm_head_gain"}


class HeldKeys:
    """Base of what a layout gives a model in place of its keys where attention must run layout by layout.

    A plain class, not a Protocol: the seam tests every attention call of every layer for it.
    """

    def attend(self, queries: mx.array, values: Any, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of queries [B, heads, N, D] over these keys and their values; [B, heads, N, D]."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that advance together in one forward.

    Attributes:
        ids: token ids [B, N], int32 or uint32; may be lazy.
        caches: one view per layer, as the model's ``cache`` argument.
    """

    ids: mx.array
    caches: Sequence[Any]


class Forward:
    """One loaded model behind its seams.

    Attributes:
        separate_head: False for the few families whose trunk includes the vocabulary projection; `hidden` then
            returns logits and `head` is the identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._trunk = _find_trunk(model)
        self.separate_head = self._trunk is not None
        if self._trunk is not None:
            _bind_trunk(self._trunk)
        bind_attention(model)
        self._on_cpu = mx.default_device().type == mx.DeviceType.cpu
        if self._on_cpu:
            cpu.bind(model)
        if cuda.available():
            cuda.bind(model)

    def __repr__(self) -> str:
        return f"Forward({type(self.model).__module__.rsplit('.', 1)[-1]}, separate_head={self.separate_head})"

    def hidden(self, ids: mx.array, caches: Sequence[Any]) -> mx.array:
        """Hidden states [B, N, D] of ids [B, N] after the final norm, advancing `caches` by N."""
        with cpu.computing() if self._on_cpu else nullcontext():
            logits = self.model(ids, cache=caches)
        # Where the trunk could be told apart, the head's graph was built but is never evaluated.
        return cast(mx.array, logits) if self._trunk is None else _seam(self._trunk).take()

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [B, N, vocab] of hidden states [B, N, D]."""
        if self._trunk is None:
            return hidden
        seam = _seam(self._trunk)
        seam.answer = hidden
        try:
            return cast(mx.array, self.model(mx.zeros(hidden.shape[:2], dtype=mx.int32), cache=None))
        finally:
            seam.answer = None

    def run(self, groups: Sequence[Group]) -> list[mx.array]:
        """Hidden states of every group, one forward each."""
        return [self.hidden(group.ids, group.caches) for group in groups]


class _Seam:
    """What passes through one trunk: a recorded output, or an answer to give instead of running."""

    __slots__ = ("answer", "recorded")

    def __init__(self) -> None:
        self.recorded: mx.array | None = None
        self.answer: mx.array | None = None

    def take(self) -> mx.array:
        """The output of the forward that has just run; not kept, since nothing may outlive its step."""
        recorded, self.recorded = self.recorded, None
        assert recorded is not None, "the model did not call its trunk"
        return recorded


_SEAM = "_mlxbc_seam"


def _seam(trunk: nn.Module) -> _Seam:
    return cast(_Seam, object.__getattribute__(trunk, _SEAM))


def _bind_trunk(trunk: nn.Module) -> None:
    plain = type(trunk)
    if hasattr(trunk, _SEAM):
        return

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seam = _seam(self)
        if seam.answer is not None:
            return seam.answer
        seam.recorded = plain.__call__(self, *args, **kwargs)
        return seam.recorded

    # A Module is a dict of parameters and children: set past its __setattr__ so the seam is neither.
    object.__setattr__(trunk, _SEAM, _Seam())
    trunk.__class__ = type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__})


def _find_trunk(model: nn.Module) -> nn.Module | None:
    """The module whose output the head projects, or None where the trunk can't be told from the head."""
    node: nn.Module = model
    while isinstance(inner := getattr(node, "language_model", None), nn.Module):
        node = inner
    for name in _TRUNKS:
        trunk = getattr(node, name, None)
        if isinstance(trunk, nn.Module) and hasattr(trunk, "layers") and _projects(node):
            return trunk
    return None


def _projects(node: nn.Module) -> bool:
    """Whether `node` itself holds the head, so that its trunk ends at hidden states."""
    return bool(set(type(node).__call__.__code__.co_names) & _HEADS)


_zoo_attention: Any = None


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """The zoo's `scaled_dot_product_attention`, unless a layout holds the keys.

    `cache` may be None where a layer shares another layer's keys.
    """
    if isinstance(keys, HeldKeys):
        return keys.attend(queries, values, scale, mask, sinks)
    if isinstance(keys, mx.array) and (out := cpu.attention(queries, keys, values, scale, mask, sinks)) is not None:
        return out
    return cast(mx.array, _zoo_attention(queries, keys, values, cache, scale, mask, sinks))


def bind_attention(model: nn.Module) -> int:
    """Rebind the attention function in every module that defines a class of `model`; the number of modules bound.

    Idempotent. The zoo's own module keeps its function, so other users of the zoo in this process see no change in
    results: a cache that is not a layout's view takes the old path.
    """
    global _zoo_attention
    from mlx_lm.models import base

    if _zoo_attention is None:
        _zoo_attention = base.scaled_dot_product_attention
    bound = 0
    for _, module in model.named_modules():
        for cls in type(module).__mro__:
            home = sys.modules.get(cls.__module__)
            if home is None or home is base:
                continue
            current = getattr(home, "scaled_dot_product_attention", None)
            if current is _zoo_attention:
                vars(home)["scaled_dot_product_attention"] = attend
                bound += 1
            elif current is attend:
                bound += 1
    return bound
