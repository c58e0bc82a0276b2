"""Owns what a loaded model's state is made of: the kind of every layer, and what rows of it may do together.

Inspected once at load, from the caches the zoo's model makes for itself and from one forward whose graph is built but
never evaluated. A family shares a batch only where the oracle over the zoo has shown that a batched row gets the logits
of that row alone; anything else is served one row at a time with the zoo's own caches, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model.forward import bind_attention
from mlxbcd.state import geometry
from mlxbcd.state.attention import AttentionLayout
from mlxbcd.state.geometry import Class
from mlxbcd.state.layout import Layout
from mlxbcd.state.nested import NestedLayout
from mlxbcd.state.recurrent import RecurrentLayout
from mlxbcd.state.replay import Recorder
from mlxbcd.state.schemes import Scheme
from mlxbcd.state.step import Segment, Step

_NO_ROLLBACK: Final[Mapping[str, str]] = {}
"""model_type → why a forward of that family can't be taken back in part although every layer has a layout."""

WIDEST_STEP: Final = 512
"""Tokens of the widest step of a row in preparation."""

_WRONG_IN_BATCH: Final[Mapping[str, str]] = {
    "minimax_m3_vl": "its sparse attention places queries by slot, which rows of different lengths do not share",
    "phi3small": "the zoo adds its mask to the scores as numbers, so a row sees what follows it",
    "plamo3": "the zoo gives its prompts a wider window than its cache keeps",
    "longcat_flash_ngram": "its state's shape depends on how many tokens a row has seen",
}
"""model_type → why rows of that family may not share a forward although every layer has a layout."""


@dataclass(frozen=True, slots=True)
class KvScheme:
    """How attention layers store rows from a length on.

    Attributes:
        start: a row is converted at its first planned end at or after this many tokens.
    """

    scheme: Scheme
    start: int


@dataclass(frozen=True, slots=True)
class Traits:
    """How a model reads its attention layers.

    Attributes:
        opaque: it hands keys and values straight to attention, so rows of several classes can run in one forward; else
            all rows of a collection share one class.
        grouped_mask: its scores have an axis for the query heads of a group, which a mask needs too.
        scheme: how long rows' keys and values are stored; None stores them as they come.
    """

    opaque: bool = True
    grouped_mask: bool = False
    scheme: Scheme | None = None


@dataclass(frozen=True, slots=True)
class Composition:
    """What the layers of one model hold.

    Attributes:
        kinds: the zoo's cache class of each layer.
        reason: why rows run alone; empty where they share a batch.
        traits: how the model reads its attention layers.
        recorder: records forwards that may be taken back, where some layer's state can't take tokens back by itself.
        rollback_reason: why a forward can't be taken back in part; empty where it can.
        kv: the scheme of long rows; None stores them as they come.
        kv_reason: why rows can't be stored quantised; empty where they can.
    """

    kinds: tuple[str, ...]
    make_stock: Callable[[], list[Any]]
    reason: str = ""
    traits: Traits = Traits()
    recorder: Recorder | None = None
    rollback_reason: str = ""
    kv: KvScheme | None = None
    kv_reason: str = ""

    @property
    def opaque(self) -> bool:
        """See `Traits.opaque`."""
        return self.traits.opaque

    @property
    def batches(self) -> bool:
        """Whether many rows can share one forward."""
        return not self.reason

    def layouts(self, widest: int) -> list[Layout]:
        """One empty layout per layer, for steps of at most `widest` tokens.

        Raises:
            ValueError: rows of this composition run alone.
        """
        if self.reason:
            raise ValueError(self.reason)
        return [_layout(cache, widest, self.traits) for cache in self.make_stock()]


def of_keys_and_values(layers: int) -> Composition:
    """What so many layers of full attention hold, apart from any model."""

    def make() -> list[Any]:
        from mlx_lm.models.cache import KVCache

        return [KVCache() for _ in range(layers)]

    return Composition(("KVCache",) * layers, make)


def inspect(model: nn.Module, model_type: str, kv: KvScheme | None = None) -> Composition:
    """Read a model's composition off the caches it makes for itself. Binds the attention seam, which its layouts need.

    Raises:
        ValueError: a KV scheme was asked for that this model can't run with.
    """
    from mlx_lm.models.cache import make_prompt_cache

    bind_attention(model)

    def make() -> list[Any]:
        return list(make_prompt_cache(model))

    stock = make()
    kinds = tuple(_kind(cache) for cache in stock)
    reason = _refusal(stock, model_type)
    if reason:
        return Composition(kinds, make, reason, kv_reason=reason, rollback_reason=reason)
    recorder = Recorder(model) if any("ArraysCache" in kind for kind in kinds) else None
    traits, reason = _traits(model, make)
    if reason:
        reason = f"its forward does not run over shared rows ({reason})"
        return Composition(kinds, make, reason, kv_reason=reason, rollback_reason=reason)
    kv_reason = ""
    if not traits.opaque:
        kv_reason = "the model computes with its keys and values itself"
    elif not any("KVCache" in kind.replace("RotatingKVCache", "") for kind in kinds):
        kv_reason = "no layer keeps keys and values of every position"
    elif kv is not None:
        traits = replace(traits, scheme=kv.scheme)
        kv_reason = _fault(model, [Class(geometry.SMALLEST, quantised=True)], make, traits)
    if kv is not None and kv_reason:
        raise ValueError(f"keys and values can't be quantised: {kv_reason}")
    rollback_reason = _NO_ROLLBACK.get(model_type, "")
    return Composition(kinds, make, "", traits, recorder, rollback_reason, kv, kv_reason)


def _kind(cache: Any) -> str:
    name = type(cache).__name__
    return f"{name}({', '.join(map(_kind, cache.caches))})" if name == "CacheList" else name


def _layout(cache: Any, widest: int, traits: Traits) -> Layout:
    opaque, grouped = traits.opaque, traits.grouped_mask
    match type(cache).__name__:
        case "KVCache":
            return AttentionLayout(scheme=traits.scheme, opaque=opaque, grouped_mask=grouped)
        case "RotatingKVCache":
            return AttentionLayout(window=cache.max_size, widest=widest, opaque=opaque, grouped_mask=grouped)
        case "ArraysCache":
            return RecurrentLayout(len(cache.cache))
        case "CacheList":
            return NestedLayout([_layout(inner, widest, traits) for inner in cache.caches])
    raise ValueError(f"no layout for {type(cache).__name__}")


def _refusal(stock: Sequence[Any], model_type: str) -> str:
    if model_type in _WRONG_IN_BATCH:
        return _WRONG_IN_BATCH[model_type]
    flat = [inner for cache in stock for inner in getattr(cache, "caches", (cache,))]
    known = {"KVCache", "RotatingKVCache", "ArraysCache"}
    foreign = sorted({type(cache).__name__ for cache in flat} - known)
    if foreign:
        return f"no batched layout for {', '.join(foreign)}"
    if any(getattr(cache, "keep", 0) for cache in flat):
        return "a sliding window that keeps its first tokens has no batched layout"
    return ""


def _traits(model: nn.Module, make: Callable[[], list[Any]]) -> tuple[Traits, str]:
    """How the model reads its attention layers, found by trying; and why nothing works, if nothing does."""
    small = Class(geometry.SMALLEST)
    if not _fault(model, [small, Class(2 * geometry.SMALLEST)], make, Traits()):
        return Traits(), ""
    fault = ""
    for grouped in (False, True):
        traits = Traits(opaque=False, grouped_mask=grouped)
        fault = _fault(model, [small], make, traits)
        if not fault:
            return traits, ""
    return Traits(opaque=False), fault


def _fault(model: nn.Module, classes: Sequence[Class], make: Callable[[], list[Any]], traits: Traits) -> str:
    """Why the model can't build its graph over ragged rows in these classes; empty if it can. Nothing is evaluated.

    Eleven rows: a number that divides no head count, so that an axis taken for another one does not go unnoticed.
    """
    cuts = [0, 11] if len(classes) == 1 else [0, 4, 11]
    segments = [Segment(a, b, group) for a, b, group in zip(cuts, cuts[1:], classes, strict=False)]
    step = Step(range(1, 12), 1, segments)
    caches = [_layout(cache, 1, traits).view(step) for cache in make()]
    try:
        logits = model(mx.zeros((11, 1), dtype=mx.int32), cache=caches)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        return str(error)
    return "" if logits.shape[:2] == (11, 1) else f"logits of shape {logits.shape} for 11 rows"
