"""Owns what a loaded model's state is made of: the kind of every layer, and what rows of it may do together.

Inspected once at load, from the caches the zoo's model makes for itself and from one forward whose graph is built but
never evaluated. A family shares a batch only where the oracle over the zoo has shown that a batched row gets the logits
of that row alone; anything else is served one row at a time with the zoo's own caches, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

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
class Composition:
    """What the layers of one model hold.

    Attributes:
        kinds: the zoo's cache class of each layer.
        reason: why rows run alone; empty where they share a batch.
        opaque: the model hands keys and values straight to attention, so rows of several classes can run in one
            forward; else all rows of a collection share one class.
        recorder: records forwards that may be taken back, where some layer's state can't take tokens back by itself.
        rollback_reason: why a forward can't be taken back in part; empty where it can.
        kv: the scheme of long rows; None stores them as they come.
        kv_reason: why rows can't be stored quantised; empty where they can.
    """

    kinds: tuple[str, ...]
    make_stock: Callable[[], list[Any]]
    reason: str = ""
    opaque: bool = True
    recorder: Recorder | None = None
    rollback_reason: str = ""
    kv: KvScheme | None = None
    kv_reason: str = ""

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
        scheme = self.kv.scheme if self.kv is not None else None
        return [_layout(cache, widest, scheme, self.opaque) for cache in self.make_stock()]


def inspect(model: nn.Module, model_type: str, kv: KvScheme | None = None) -> Composition:
    """Read a model's composition off the caches it makes for itself.

    Raises:
        ValueError: a KV scheme was asked for that this model can't run with.
    """
    from mlx_lm.models.cache import make_prompt_cache

    def make() -> list[Any]:
        return list(make_prompt_cache(model))

    stock = make()
    kinds = tuple(_kind(cache) for cache in stock)
    reason = _refusal(stock, model_type)
    if reason:
        return Composition(kinds, make, reason, kv_reason=reason, rollback_reason=reason)
    recorder = Recorder(model) if any("ArraysCache" in kind for kind in kinds) else None
    plain = Class(geometry.SMALLEST)
    opaque = not _fault(model, [plain, Class(2 * geometry.SMALLEST)], make, None, opaque=True)
    if not opaque and (fault := _fault(model, [plain], make, None, opaque=False)):
        reason = f"its forward does not run over shared rows ({fault})"
        return Composition(kinds, make, reason, kv_reason=reason, rollback_reason=reason)
    kv_reason = ""
    if not opaque:
        kv_reason = "the model computes with its keys and values itself"
    elif not any("KVCache" in kind.replace("RotatingKVCache", "") for kind in kinds):
        kv_reason = "no layer keeps keys and values of every position"
    elif kv is not None:
        kv_reason = _fault(model, [Class(geometry.SMALLEST, quantised=True)], make, kv.scheme, opaque=True)
    if kv is not None and kv_reason:
        raise ValueError(f"keys and values can't be quantised: {kv_reason}")
    rollback_reason = _NO_ROLLBACK.get(model_type, "")
    return Composition(kinds, make, "", opaque, recorder, rollback_reason, kv, kv_reason)


def _kind(cache: Any) -> str:
    name = type(cache).__name__
    return f"{name}({', '.join(map(_kind, cache.caches))})" if name == "CacheList" else name


def _layout(cache: Any, widest: int, scheme: Scheme | None, opaque: bool) -> Layout:
    match type(cache).__name__:
        case "KVCache":
            return AttentionLayout(scheme=scheme, opaque=opaque)
        case "RotatingKVCache":
            return AttentionLayout(window=cache.max_size, widest=widest, opaque=opaque)
        case "ArraysCache":
            return RecurrentLayout(len(cache.cache))
        case "CacheList":
            return NestedLayout([_layout(inner, widest, scheme, opaque) for inner in cache.caches])
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


def _fault(
    model: nn.Module,
    classes: Sequence[Class],
    make: Callable[[], list[Any]],
    scheme: Scheme | None,
    *,
    opaque: bool,
) -> str:
    """Why the model can't build its graph over two ragged rows in these classes; empty if it can. Nothing is
    evaluated."""
    ends = [2] if len(classes) == 1 else [1, 2]
    begins = [0, *ends[:-1]]
    segments = [Segment(begin, end, group) for begin, end, group in zip(begins, ends, classes, strict=True)]
    step = Step([1, 2], 1, segments)
    caches = [_layout(cache, 1, scheme, opaque).view(step) for cache in make()]
    try:
        model(mx.zeros((2, 1), dtype=mx.int32), cache=caches)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        return str(error)
    return ""
