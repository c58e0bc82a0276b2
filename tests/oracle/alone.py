"""Owns what a row gives alone: texts of one family, run through the zoo's own caches without any of ours."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxbcd.state.nested import Nest
from mlxbcd.state.recurrent import Recurrence
from mlxbcd.state.schemes import Parts, Quantised
from mlxbcd.state.store import Prefix
from oracle.families import VOCABULARY, Family, load

LENGTH: Final = 48
"""Tokens of a text: five windows and more."""
TEXTS: Final = 2

TOLERANCE: Final = 1e-3
"""Largest error, relative to the largest value of the row alone."""

ROUNDED_TOLERANCE: Final = 2e-3
"""The same for logits over rounded keys and values: where one lies next to the border between two steps, the batch may
round it to the other side."""

ONE_STEP: Final = 1e-2
"""The same for the rounded keys and values themselves: the step from one 8-bit value to the next."""


@dataclass(frozen=True)
class Conversion:
    """Keys and values are quantised when the text has `start` tokens, and stay so."""

    scheme: Quantised
    start: int


@dataclass
class Text:
    """A random token sequence and what the model makes of it alone.

    Attributes:
        logits: [LENGTH, vocabulary], from one forward, or one before and one after the conversion.
    """

    family: Family
    tokens: tuple[int, ...]
    conversion: Conversion | None = None
    logits: mx.array = field(init=False)
    _states: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logits, _ = self._run(LENGTH)
        assert mx.all(mx.isfinite(self.logits)).item(), f"{self.family.name}: alone it gives NaN or infinity"

    def caches(self, length: int) -> list[Any]:
        """The zoo's caches after the first `length` tokens."""
        if length not in self._states:
            _, self._states[length] = self._run(length)
        return self._states[length]

    def changed(self, position: int) -> Text:
        """The same text with another token at a position."""
        tokens = list(self.tokens)
        tokens[position] = (tokens[position] + 1) % VOCABULARY
        return Text(self.family, tuple(tokens))

    def check_logits(self, position: int, logits: mx.array) -> None:
        """Logits [n, vocabulary] of the inputs from `position` on are those of the text alone."""
        wanted = self.logits[position : position + logits.shape[0]]
        error = relative_error(logits, wanted)
        tolerance = TOLERANCE if self.conversion is None else ROUNDED_TOLERANCE
        assert error <= tolerance, f"{self.family.name}: logits at {position} are off by {error:.1e}"

    def check_state(self, length: int, layers: tuple[Any, ...]) -> None:
        """A row's state holds what the zoo's caches hold after the same tokens."""
        if not length:
            return
        caches = self.caches(length)
        tolerance = TOLERANCE if self.conversion is None else ONE_STEP
        assert len(layers) == len(caches)
        for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            error = _state_error(layer, cache, length)
            assert error <= tolerance, f"{self.family.name}: layer {i} after {length} tokens is off by {error:.1e}"

    def _run(self, length: int) -> tuple[mx.array, list[Any]]:
        model, caches = self.family.model, make_prompt_cache(self.family.model)
        cut = length if self.conversion is None else min(self.conversion.start, length)
        logits = model(mx.array([self.tokens[:cut]]), cache=caches)[0]
        if self.conversion is not None and cut < length:
            caches = [_rounded(cache, self.conversion.scheme) for cache in caches]
            logits = mx.concatenate([logits, model(mx.array([self.tokens[cut:length]]), cache=caches)[0]])
        mx.eval(logits)
        return logits, caches


@lru_cache(maxsize=4)
def texts(name: str) -> tuple[Text, ...]:
    """The texts of a family."""
    return tuple(Text(load(name), tokens) for tokens in _token_lists(name))


def rounded_texts(name: str, conversion: Conversion) -> tuple[Text, ...]:
    """The same texts with the zoo's caches rounding keys and values to what the scheme stores."""
    return tuple(Text(load(name), tokens, conversion) for tokens in _token_lists(name))


def _token_lists(name: str) -> list[tuple[int, ...]]:
    rng = random.Random(name)
    return [tuple(rng.randrange(VOCABULARY) for _ in range(LENGTH)) for _ in range(TEXTS)]


class Rounded(KVCache):
    """The zoo's plain cache, with every key and value rounded to what a scheme stores."""

    def __init__(self, plain: KVCache, scheme: Quantised) -> None:
        super().__init__()
        self.scheme = scheme
        if plain.keys is not None:
            self.update_and_fetch(plain.keys[:, :, : plain.offset], plain.values[:, :, : plain.offset])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (_dequantised(part, self.scheme) for part in _halves(self.scheme.encode(keys, values)))
        fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        return fetched


def _rounded(cache: Any, scheme: Quantised) -> Any:
    """A cache of the zoo that rounds, where it keeps all keys and values; else the cache itself."""
    match type(cache).__name__:
        case "KVCache":
            return Rounded(cache, scheme)
        case "CacheList":
            return type(cache)(*(_rounded(inner, scheme) for inner in cache.caches))
    return cache


def _halves(parts: Parts) -> tuple[Parts, Parts]:
    return parts[:3], parts[3:]


def _dequantised(half: Parts, scheme: Quantised) -> mx.array:
    packed, scales, biases = half
    return mx.dequantize(packed, scales, biases, group_size=scheme.group_size, bits=scheme.bits)


def relative_error(got: mx.array, wanted: mx.array) -> float:
    """Largest difference by the largest value wanted; NaN where either holds NaN."""
    assert got.shape == wanted.shape, f"{got.shape} is not {wanted.shape}"
    error: float = (mx.abs(got - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1e-6)).item()
    return error


def _state_error(layer: Any, cache: Any, length: int) -> float:
    match layer:
        case None:
            assert cache.keys is None, "a layer that the model writes has no state"
            return 0.0
        case Nest(states):
            return max(_state_error(state, inner, length) for state, inner in zip(states, cache.caches, strict=True))
        case Recurrence(slots):
            written = [(ours, whole) for ours, whole in zip(slots, cache.cache, strict=True) if whole is not None]
            return max((relative_error(_there(ours), whole) for ours, whole in written), default=0.0)
        case Prefix(start=start):
            theirs = [_newest(cache, whole, length - start) for whole in (cache.keys, cache.values)]
            pairs = zip(_keys_and_values(layer), theirs, strict=True)
            # What the zoo blanks is read by nobody.
            return max(relative_error(part, whole) for part, whole in pairs if mx.any(whole).item())
    raise AssertionError(f"no state of {type(cache).__name__} in {layer!r}")


def _there(array: mx.array | None) -> mx.array:
    assert array is not None, "a state that the zoo's cache holds is missing"
    return array


def _newest(cache: Any, whole: mx.array, n: int) -> mx.array:
    """The last `n` positions of what a cache of the zoo holds, in order."""
    ordered = cache._temporal_order(whole) if hasattr(cache, "max_size") else whole[:, :, : cache.offset]
    return ordered[:, :, ordered.shape[2] - n :]


def _keys_and_values(prefix: Prefix) -> list[mx.array]:
    scheme = prefix.scheme
    if isinstance(scheme, Quantised):
        return [_dequantised(half, scheme) for half in _halves(prefix.parts)]
    return list(prefix.parts)
