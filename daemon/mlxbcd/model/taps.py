"""Owns taps: the hidden states behind single layers of an unmodified model, as its forwards compute them.

Drafters of some kinds read what a few layers of their target know, not only what the last one does. Each of these
layers' classes is swapped once (see `swap`), so that a forward that is run for its taps notes what the layer answers.
Any other forward of the model passes by, and so does what a layer is asked outside of forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.swap import swap


class Untappable(ValueError):
    """The hidden states that a drafter reads can't be had from this model."""


class Tapped(NamedTuple):
    """What one group's forward gave.

    Attributes:
        hidden: final hidden states [B, N, D].
        read: what a drafter reads: the tapped layers' answers side by side, [B, N, layers · D], in the order in which
            the layers were named; the final hidden states without any.
    """

    hidden: mx.array
    read: mx.array


class _Notes:
    """What layers answered in the forward that is being built. Their classes hold this, so it holds no model."""

    def __init__(self) -> None:
        self.answers: dict[int, list[Any]] | None = None

    def of(self, layer: int) -> Callable[..., Any]:
        """What calls of a layer pass through."""

        def call(plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
            answer = plain(module, *args, **kwargs)
            if self.answers is not None:
                self.answers.setdefault(layer, []).append(answer[0] if isinstance(answer, tuple) else answer)
            return answer

        return call


class Taps:
    """Taps of one model.

    Args:
        layers: indices of the tapped layers; without any, the final hidden states are read.

    Raises:
        Untappable: the model has no such layers, or its forward doesn't pass each of them once, from hidden states to
            hidden states.
    """

    def __init__(self, forward: Forward, layers: Sequence[int] = ()) -> None:
        self.layers = tuple(layers)
        self._forward = forward
        self._notes = _Notes()
        if not self.layers:
            return
        modules = list(forward.model.layers)
        if len(set(self.layers)) < len(self.layers) or not 0 <= min(self.layers) <= max(self.layers) < len(modules):
            raise Untappable(f"taps are different layers from 0 to {len(modules) - 1}, not {list(self.layers)}")
        plain = [(modules[layer], swap(modules[layer], self._notes.of(layer))) for layer in self.layers]
        try:
            self._try()
        except Untappable:
            for module, before in reversed(plain):
                module.__class__ = before
            raise

    def __repr__(self) -> str:
        return f"Taps({', '.join(map(str, self.layers)) or 'final hidden states'})"

    def run(self, groups: Sequence[Group]) -> list[Tapped]:
        """One forward for each group, as `Forward.run`. Lazy; nothing is kept here."""
        return [self._one(group) for group in groups]

    def _one(self, group: Group) -> Tapped:
        if not self.layers:
            hidden = self._forward.hidden(group.ids, group.caches)
            return Tapped(hidden, hidden)
        self._notes.answers = {}
        try:
            hidden = self._forward.hidden(group.ids, group.caches)
            answers = self._notes.answers
        finally:
            self._notes.answers = None
        read = []
        for layer in self.layers:
            seen = answers.get(layer, [])
            shape = getattr(seen[0], "shape", ()) if seen else ()
            if len(seen) != 1 or len(shape) != 3 or shape[:2] != group.ids.shape:
                what = f"answered {len(seen)} times" if len(seen) != 1 else f"answered something of shape {shape}"
                raise Untappable(f"layer {layer} can't be tapped: it {what} in one forward")
            read.append(seen[0])
        return Tapped(hidden, mx.concatenate(read, axis=-1))

    def _try(self) -> None:
        """Build the graph of a forward, which nobody evaluates."""
        from mlx_lm.models.cache import make_prompt_cache

        self._one(Group(mx.zeros((1, 2), dtype=mx.int32), make_prompt_cache(self._forward.model)))
