"""Owns the families under test: a tiny random float32 model for every architecture of the zoo that runs on a CPU.

Sliding windows have 8 positions, sparse attention picks 8 or fewer and heads are 32 wide where the family allows, so
that short texts wrap, select and quantise. What a model's own initialisation leaves constant (zero gates, convolutions,
sinks; unit norms) is made random: an oracle over a path that multiplies by zero proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward
from mlxbcd.state import geometry
from mlxbcd.state.composition import Composition, KvScheme, inspect

CONFIGS: Final[dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "zoo" / "configs.json").read_text(encoding="utf-8")
)
FAMILIES: Final = tuple(CONFIGS)

MISSING: Final = {
    "bitnet": "its layers exist only as Metal kernels",
    "muse_spark": "its layers exist only as Metal kernels",
    "olmo": "the zoo's module ends the process without a package that nothing else needs",
    "phi3small": "it adds a boolean mask to its scores, so tokens see later ones and no two ways to run it agree",
    "prism_hadamard_qwen35": "qwen3_5 with other weights; it takes no model without its packed 2-bit ones",
}
"""Modules of the zoo without a family here, and why."""

VOCABULARY: Final = 120
"""Token ids are below this; every family knows more."""

SMALLEST_CLASS: Final = 16
"""Capacity of the smallest class in these tests, so that rows of a few tokens already span several classes."""


@dataclass(frozen=True)
class Family:
    """One architecture's tiny model behind its seams."""

    name: str
    model: Any
    forward: Forward
    composition: Composition

    def __repr__(self) -> str:
        return f"Family({self.name})"

    @property
    def windows(self) -> list[int]:
        """Positions that sliding layers see, for each layer that slides."""
        return [cache.max_size for cache in flat(self.composition.make_stock()) if hasattr(cache, "max_size")]

    def quantised(self, kv: KvScheme) -> Composition:
        """The composition with a KV scheme.

        Raises:
            ValueError: the model can't run with it.
        """
        return inspect(self.model, zoo.module_name(CONFIGS[self.name]), kv=kv)


def flat(caches: Sequence[Any]) -> list[Any]:
    """The zoo's caches with nested ones taken apart."""
    return [inner for cache in caches for inner in flat(getattr(cache, "caches", ())) or [cache]]


@lru_cache(maxsize=4)
def load(name: str) -> Family:
    """A family's model, the same weights each time."""
    config = CONFIGS[name]
    model_class, args_class = zoo.model_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(config))
    model.update(tree_unflatten([(path, _varied(array)) for path, array in tree_flatten(model.parameters())]))
    model.eval()
    mx.eval(model.parameters())
    return Family(name, model, Forward(model), inspect(model, zoo.module_name(config)))


def _varied(array: mx.array) -> mx.array:
    """The array, with noise where it holds one value only."""
    if array.size < 2 or array.dtype != mx.float32 or not mx.all(array == array.flatten()[0]).item():
        return array
    return array + 0.2 * mx.random.normal(array.shape)


@contextmanager
def small_classes() -> Iterator[None]:
    """Inside, capacity classes start at `SMALLEST_CLASS`."""
    before = geometry.SMALLEST
    geometry.SMALLEST = SMALLEST_CLASS
    try:
        yield
    finally:
        geometry.SMALLEST = before
