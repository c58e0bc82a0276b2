"""Owns packed forwards: the tokens of several groups in one pass through an unmodified model, so that its weights are
read once, while each group keeps the geometry that it has alone.

The trunk sees all tokens as one row of T: embeddings, norms, feed-forward layers and experts don't care whose they are.
A *mixer*, the innermost module that works with a layer's cache, keeps groups apart in one of two ways:

* **together**, where it hands its keys and values straight to attention: it runs once over T rows of one token, each
  with its own position, and only the write and attention itself go group by group (`PackedKeys`);
* **in turn** otherwise: it runs once per group, over the group's tokens [B, N], its own view and its own mask, so that
  whatever it computes with keys or a recurrent state is what it computes alone. The projections at its edges still run
  once for all groups (`Mixing`).

Which modules are mixers, and how they can run, is found by trying (`Packer.discover`), and in the same forward that
nothing else looks at what only one group can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.parts import Form, PackedView, Parts, Unpackable
from mlxbcd.model.swap import swap

_POSITION_WISE: Final = (nn.Linear, nn.QuantizedLinear, nn.RMSNorm, nn.LayerNorm)
"""Modules whose answer at a position depends on that position alone."""


class Mixing:
    """One call of a mixer whose groups take turns, in which the projections at its edges run once.

    A position-wise module that is given the mixer's own input, or what another one made of it, computes all tokens and
    answers each group with its part. One whose answer is the mixer's result is computed again over the inputs of all
    groups: MLX is lazy, so what it answered group by group is never evaluated.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        # By identity. What is compared is held as well, so that no other array can get its identity meanwhile.
        self._parts: dict[int, tuple[mx.array, list[mx.array]]] = {}
        self._whole_of: dict[int, tuple[mx.array, int]] = {}
        self._answers: dict[tuple[int, int], list[Any]] = {}
        self._edges: dict[int, tuple[mx.array, Callable[..., Any], nn.Module, mx.array]] = {}

    def part(self, value: Any, group: int) -> Any:
        """What one group gets of an argument.

        Raises:
            Unpackable: see `Form.argument`.
        """
        if isinstance(value, Parts):
            return value.parts[group]
        if isinstance(value, mx.array) and value.ndim:
            return self._divided(value, self._form.argument)[group]
        if isinstance(value, tuple | list):
            return type(value)(self.part(item, group) for item in value)
        return value

    def project(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a position-wise module inside the mixer."""
        if len(args) != 1 or kwargs:
            return plain(module, *args, **kwargs)
        (given,) = args
        known = self._whole_of.get(id(given))
        if known is None:
            answer = plain(module, given)
            self._edges[id(answer)] = answer, plain, module, given
            return answer
        whole, group = known
        key = id(module), id(whole)
        if key not in self._answers:
            answer = plain(module, whole)
            # Some projections are several in one.
            several = answer if isinstance(answer, list | tuple) else [answer]
            divided = [self._divided(each, self._form.split) for each in several]
            self._answers[key] = (
                [list(parts) for parts in zip(*divided, strict=True)] if several is answer else divided[0]
            )
        return self._answers[key][group]

    def join(self, results: Sequence[Any]) -> Any:
        """The mixer's result: what holds one value per token joined, anything else as one value per group."""
        if isinstance(results[0], tuple):
            return tuple(self.join(items) for items in zip(*results, strict=True))
        if all(result is None for result in results):
            return None
        if not all(map(_per_token, results, self._form.shapes)):
            return Parts(results)
        edges = [self._edges.get(id(result)) for result in results]
        if edges[0] is not None:
            _, plain, module, _ = edges[0]
            inputs = [edge[3] for edge in edges if edge is not None and edge[2] is module]
            if len(inputs) == len(edges) and all(map(_per_token, inputs, self._form.shapes)):
                return plain(module, self._form.join(inputs))
        return self._form.join(results)

    def _divided(self, whole: mx.array, how: Callable[[mx.array], list[mx.array]]) -> list[mx.array]:
        if id(whole) not in self._parts:
            self._parts[id(whole)] = whole, how(whole)
            self._whole_of |= {id(part): (whole, i) for i, part in enumerate(self._parts[id(whole)][1])}
        return self._parts[id(whole)][1]


class Enough(Exception):
    """A tap has all it wanted, so the rest of the forward isn't built."""


@dataclass(slots=True)
class Tap:
    """What mixers answered in one forward, packed or not.

    Attributes:
        limit: calls after which the forward is ended; None lets it run.
        answers: of each call, an array [B, N, D] per group.
        calls: of each call, the class of the mixer and the index of the layer it worked with, where it had one.
    """

    limit: int | None = None
    answers: list[list[mx.array]] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)

    def see(self, answers: list[mx.array], name: str, layer: int | None = None) -> None:
        """Take in one call.

        Raises:
            Enough: it was the last one wanted.
        """
        self.answers.append(answers)
        self.calls.append((name, layer))
        if len(self.answers) == self.limit:
            raise Enough


class _Calls:
    """What calls of mixers, and of the modules in them, pass through.

    The classes of these modules hold this, so it holds none of them: a model that nobody uses any more goes at once.

    Attributes:
        form: of the packed forward that is being built.
        together: identities of the mixers that run so.
        tried: the mixers found so far, while they are looked for.
    """

    def __init__(self) -> None:
        self.form: Form | None = None
        self.together: set[int] = set()
        self.tried: dict[int, nn.Module] = {}
        self.outer: set[int] = set()
        self.tap: Tap | None = None
        self._inside = False
        self._mixing: Mixing | None = None

    def attempt(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of any module while mixers are looked for."""
        shared = any(map(_is_shared, (*args, *kwargs.values())))
        if self._inside or not shared or id(module) in self.outer:
            return plain(module, *args, **kwargs)
        if id(module) in self.tried:
            return self._mix(plain, module, args, kwargs)
        with suppress(Exception):
            return plain(module, *args, **kwargs)
        self.together.add(id(module))
        try:
            answer = self._mix(plain, module, args, kwargs)
        except Exception:
            self.together.remove(id(module))
            answer = self._mix(plain, module, args, kwargs)
        self.tried[id(module)] = module
        return answer

    def call(self, plain: Callable[..., Any], mixer: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a mixer."""
        if self.form is not None and not self._inside:
            return self._mix(plain, mixer, args, kwargs)
        answer = plain(mixer, *args, **kwargs)
        if self.tap is not None and not self._inside:
            self.tap.see([_first(answer)], type(mixer).__name__)
        return answer

    def project(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a position-wise module inside a mixer whose groups take turns."""
        if self._mixing is None:
            return plain(module, *args, **kwargs)
        return self._mixing.project(plain, module, args, kwargs)

    def _mix(self, plain: Callable[..., Any], mixer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a mixer for all groups."""
        form = self.form
        assert form is not None
        self._inside = True
        try:
            run = self._run_together if id(mixer) in self.together else self._run_in_turn
            answer = run(form, plain, mixer, args, kwargs)
        finally:
            self._inside = False
        if self.tap is not None:
            layers = [value.layer for value in (*args, *kwargs.values()) if isinstance(value, PackedView)]
            whole = _first(answer)
            parts = form.split(whole) if isinstance(whole, mx.array) else []
            self.tap.see(parts, type(mixer).__name__, layers[0] if layers else None)
        return answer

    def _run_together(self, form: Form, plain: Callable[..., Any], mixer: nn.Module, args: Any, kwargs: Any) -> Any:
        def row(value: Any) -> Any:
            if isinstance(value, PackedView):
                return value.by_rows()
            return form.as_rows(value) if isinstance(value, mx.array) and value.ndim else value

        return form.from_rows(plain(mixer, *map(row, args), **{name: row(value) for name, value in kwargs.items()}))

    def _run_in_turn(self, form: Form, plain: Callable[..., Any], mixer: nn.Module, args: Any, kwargs: Any) -> Any:
        mixing = self._mixing = Mixing(form)
        try:
            answers = []
            for group in range(len(form.shapes)):
                own = {name: mixing.part(value, group) for name, value in kwargs.items()}
                answers.append(plain(mixer, *[mixing.part(value, group) for value in args], **own))
            return mixing.join(answers)
        finally:
            self._mixing = None


class Packer:
    """Runs packed forwards of one model, once `discover` has found its mixers.

    Args:
        rows: see `Form`.

    Attributes:
        mixers: the modules that keep groups apart.
    """

    def __init__(self, forward: Forward, *, rows: bool = False) -> None:
        self.mixers: list[nn.Module] = []
        self._calls = _Calls()
        self._forward = forward
        self._rows = rows

    def __repr__(self) -> str:
        together = self._calls.together
        how = {f"{type(mixer).__name__}{'' if id(mixer) in together else ' in turn'}" for mixer in self.mixers}
        return f"Packer({', '.join(sorted(how))}{', tokens as rows' if self._rows else ''})"

    def run(self, groups: Sequence[Group]) -> list[mx.array]:
        """Hidden states [B, N, D] of every group, in order, from one forward, which advances each group's caches.

        If it raises, no group's caches can be trusted.
        """
        form = Form([(group.ids.shape[0], group.ids.shape[1]) for group in groups], rows=self._rows)
        ids = form.join([group.ids.astype(mx.int32) for group in groups])
        layers = enumerate(zip(*(group.caches for group in groups), strict=True))
        views = [PackedView(views, form, layer, rows=self._rows) for layer, views in layers]
        self._calls.form = form
        try:
            hidden = self._forward.hidden(ids, views)
        finally:
            self._calls.form = None
        return form.split(hidden)

    def discover(self, groups: Sequence[Group]) -> list[tuple[str, int | None]]:
        """Find the mixers with a packed forward over `groups`, whose graph is built only; see `Tap.calls`.

        A module that fails with what belongs to several groups is tried together, then in turn; if it fails then too,
        whoever called it is tried. The caches are no good afterwards.

        Raises:
            Unpackable: what fails holds several layers.
        """
        calls, model = self._calls, self._forward.model
        tap = calls.tap = Tap()
        calls.outer = _holders_of_layers(model)
        modules = {id(module): module for _, module in model.named_modules()}
        plain_classes = [(module, swap(module, calls.attempt)) for module in modules.values()]
        try:
            self.run(groups)
        except Unpackable:
            raise
        except Exception as error:
            raise Unpackable(str(error)) from error
        finally:
            for module, plain in plain_classes:
                module.__class__ = plain
            calls.tap = None
            self.mixers, calls.tried = list(calls.tried.values()), {}
        self._bind()
        return tap.calls

    @contextmanager
    def tapped(self, limit: int) -> Iterator[Tap]:
        """Take down the first `limit` calls of mixers in the one forward that runs inside, and end it with them."""
        tap = self._calls.tap = Tap(limit)
        try:
            yield tap
        except Enough:
            pass
        finally:
            self._calls.tap = None

    def _bind(self) -> None:
        turns = [mixer for mixer in self.mixers if id(mixer) not in self._calls.together]
        inside = {id(module): module for mixer in turns for _, module in mixer.named_modules() if module is not mixer}
        for module in inside.values():
            if isinstance(module, _POSITION_WISE):
                swap(module, self._calls.project)
        for mixer in self.mixers:
            swap(mixer, self._calls.call)


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, tuple) else answer


def _per_token(array: Any, shape: tuple[int, int]) -> bool:
    return isinstance(array, mx.array) and array.ndim == 3 and array.shape[:2] == shape


def _is_shared(value: Any) -> bool:
    """Whether a value belongs to several groups, or something in it does."""
    return isinstance(value, Parts) or (isinstance(value, tuple | list) and any(map(_is_shared, value)))


def _holders_of_layers(model: nn.Module) -> set[int]:
    """The identities of the modules that hold layers: the model, its trunk, and what is between them."""
    layers = {id(layer) for layer in model.layers}
    named = list(model.named_modules())
    paths = [path.split(".") for path, module in named if id(module) in layers]
    above = {".".join(path[:n]) for path in paths for n in range(len(path))}
    return {id(module) for path, module in named if path in above}
