"""Owns taking tokens back from recurrent layers: record one forward, then re-run the mixers over the kept tokens only.

A recurrent state can't be cut back, so a forward that may be taken back is recorded: what every layer was called with,
and what every weight-bearing module inside it answered. To keep the first k of its tokens, the layer is called again
over its state from before, with those modules answering from the recording, cut to k. No weight is read, since MLX is
lazy and nobody asks for the layer's output: what is evaluated is the convolution and the recurrence. Rows that keep
equally many tokens are replayed together and unpadded, because several families compute wrong states for padded rows.

Layers and modules are recorded by swapping the class of the instances of one loaded model for a subclass, which leaves
`isinstance`, attributes and parameters as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxbcd.model.parts import PackedView
from mlxbcd.model.swap import swap
from mlxbcd.state.layout import Layout
from mlxbcd.state.nested import NestedLayout, NestedView
from mlxbcd.state.recurrent import RecurrentLayout, RecurrentView


@dataclass(slots=True)
class Call:
    """One layer's call in a recorded forward.

    Attributes:
        answers: what each weight-bearing module inside returned, in order, by the module's identity: a mixer that goes
            token by token calls some once per token, so a shorter replay calls those less often.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: dict[int, list[Any]] = field(default_factory=dict)


class Tape:
    """A forward being recorded, or a call being replayed from one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answering: dict[int, Iterator[Any]] | None = None

    def call_of(self, view: Any) -> Call:
        """The call that was given this view as its cache."""
        return next(call for call in self.calls if any(arg is view for arg in (*call.args, *call.kwargs.values())))


class Recorder:
    """Records forwards of one model, once `bind` has swapped its classes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._bound = False
        self._tape: Tape | None = None
        self._inside: Call | None = None

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Record the one forward that runs inside."""
        self._bind()
        self._tape = tape = Tape()
        try:
            yield tape
        finally:
            self._tape = None

    @contextmanager
    def answer(self, answers: Mapping[int, Sequence[Any]]) -> Iterator[None]:
        """Inside, each weight-bearing module answers from its own of `answers` in order."""
        self._tape = Tape()
        self._tape.answering = {module: iter(own) for module, own in answers.items()}
        try:
            yield
        finally:
            self._tape = None

    def _bind(self) -> None:
        """Swap classes at the first use, so that models nobody takes back pay nothing."""
        if self._bound:
            return
        self._bound = True
        weighty = _weighty_classes()
        for layer in self._model.layers:
            for _, module in layer.named_modules():
                if module is not layer and isinstance(module, weighty):
                    swap(module, self._module_call)
            swap(layer, self._layer_call)

    def _layer_call(self, plain: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> Any:
        tape = self._tape
        if tape is None or tape.answering is not None:
            return plain(layer, *args, **kwargs)
        if any(isinstance(value, PackedView) for value in (*args, *kwargs.values())):
            raise ValueError("a turn that may be taken back can't run packed where layers are recorded for it")
        call = Call(layer, args, kwargs)
        tape.calls.append(call)
        self._inside = call
        try:
            return plain(layer, *args, **kwargs)
        finally:
            self._inside = None

    def _module_call(self, plain: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        tape = self._tape
        if tape is not None and tape.answering is not None:
            return next(tape.answering[id(module)])
        answer = plain(module, *args, **kwargs)
        if self._inside is not None:
            self._inside.answers.setdefault(id(module), []).append(answer)
        return answer


class Undo:
    """What it takes to take back the last tokens of one recorded forward over a collection's recurrent layers.

    Args:
        layouts: the collection's, of which the recurrent ones (nested ones too) are undone.
        rows: batch size.
        width: tokens of the forward.
    """

    def __init__(self, recorder: Recorder, layouts: Sequence[Layout], rows: int, width: int) -> None:
        self._recorder = recorder
        self._layouts = layouts
        self._rows = rows
        self._width = width
        self._before = [[list(layout.slots) for layout in recurrent(outer)] for outer in layouts]
        self.tape: Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the forward inside."""
        with self._recorder.record() as tape:
            yield
        self.tape = tape

    def resolve(self, caches: Sequence[Any], kept: Sequence[int]) -> None:
        """Leave every recurrent layer as if row i had seen only its first ``kept[i]`` tokens. Lazy.

        Args:
            caches: the views that the forward ran over.

        Raises:
            RuntimeError: the forward was not recorded.
            ValueError: some rows are back at nothing, others aren't: a recurrent layer can't hold both.
        """
        counts = sorted(set(kept))
        if counts == [self._width]:
            return
        if self.tape is None:
            raise RuntimeError("a forward of recurrent layers can only be taken back if it was recorded")
        if counts[0] == 0 and any(array is None for outer in self._before for slots in outer for array in slots):
            if counts != [0]:
                raise ValueError("a row can't take back its very first tokens beside rows that keep some")
            for outer, before in zip(self._layouts, self._before, strict=True):
                for layout, slots in zip(recurrent(outer), before, strict=True):
                    layout.slots = list(slots)
            return
        groups = [(count, [row for row, n in enumerate(kept) if n == count]) for count in counts]
        order = [row for _, rows in groups for row in rows]
        place = mx.array(sorted(range(len(order)), key=order.__getitem__), dtype=mx.int32)
        for outer, view, before in zip(self._layouts, caches, self._before, strict=True):
            inner = recurrent(outer)
            if not inner:
                continue
            parts = [self._state_after(outer, view, before, count, rows) for count, rows in groups]
            for i, layout in enumerate(inner):
                for slot in range(len(layout.slots)):
                    arrays = [array for part in parts if (array := part[i][slot]) is not None]
                    layout.slots[slot] = mx.concatenate(arrays)[place] if arrays else None

    def _state_after(
        self, outer: Layout, view: Any, before: list[list[mx.array | None]], count: int, rows: list[int]
    ) -> list[list[mx.array | None]]:
        """The slots of one layer's recurrent layouts, for some rows, after `count` tokens."""
        index = mx.array(rows, dtype=mx.int32)
        after = [layout.slots for layout in recurrent(outer)]
        if count == self._width:
            return [[None if array is None else array[index] for array in slots] for slots in after]
        start = [[None if array is None else array[index] for array in slots] for slots in before]
        if count == 0:
            return start
        assert self.tape is not None
        call = self.tape.call_of(view)
        sandbox = _sandbox(view, iter(start))

        def cut(value: Any) -> Any:
            return self._cut(value, view, sandbox, index, count)

        answers = {module: [cut(answer) for answer in own] for module, own in call.answers.items()}
        with self._recorder.answer(answers):
            call.layer(*map(cut, call.args), **{name: cut(value) for name, value in call.kwargs.items()})
        return [list(layout.slots) for layout in _sandboxed(sandbox)]

    def _cut(self, value: Any, view: Any, sandbox: Any, index: mx.array, count: int) -> Any:
        """A recorded value as it would have been for some rows and the first `count` tokens."""
        if value is view:
            return sandbox
        if isinstance(value, tuple):
            return tuple(self._cut(part, view, sandbox, index, count) for part in value)
        if not isinstance(value, mx.array) or value.ndim == 0:
            # Masks of attention layers are opaque or strings; nobody reads what attention gives here.
            return value if isinstance(value, int | float | bool) else None
        if value.dtype == mx.bool_:
            return None
        rows, width = self._rows, self._width
        if value.shape[:2] == (rows, width):
            return value[index][:, :count]
        if value.shape[0] == rows * width and value.ndim > 1:
            return value.reshape(rows, width, *value.shape[1:])[index][:, :count].reshape(-1, *value.shape[1:])
        return value[index] if value.shape[0] == rows else value


def recurrent(layout: Layout) -> list[RecurrentLayout]:
    """The recurrent layouts of one layer."""
    if isinstance(layout, RecurrentLayout):
        return [layout]
    if isinstance(layout, NestedLayout):
        return [found for inner in layout.inner for found in recurrent(inner)]
    return []


class _Bystander:
    """Stands in for an attention layer's cache where only the recurrent state of the same layer is wanted."""

    offset = 0

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> None:
        """What attention gives is never evaluated."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def _sandbox(view: Any, states: Iterator[list[mx.array | None]]) -> Any:
    """A view of the same shape over states of its own."""
    if isinstance(view, NestedView):
        return NestedView([_sandbox(inner, states) for inner in view.caches])
    if isinstance(view, RecurrentView):
        layout = RecurrentLayout(0)
        layout.slots = next(states)
        return type(view)(layout)
    return _Bystander()


def _sandboxed(sandbox: Any) -> list[RecurrentLayout]:
    if isinstance(sandbox, NestedView):
        return [layout for inner in sandbox.caches for layout in _sandboxed(inner)]
    return [sandbox.layout] if isinstance(sandbox, RecurrentView) else []


def _weighty_classes() -> tuple[type, ...]:
    from mlx_lm.models import switch_layers

    return nn.Linear, nn.QuantizedLinear, switch_layers.SwitchGLU, switch_layers.SwitchMLP
