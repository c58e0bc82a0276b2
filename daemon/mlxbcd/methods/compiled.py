"""Owns compiled decode: a whole step (trunk, head, the writes to the state, sampling) as one traced function per shape,
and the trunk of a round of windows likewise.

Building a step's graph operation by operation takes the host as long as a fast device takes to compute it. A traced
function is built from Python once; a step then only fills in its arrays: tokens, positions, the samplers' parameters
and keys, and the state, whose buffers go in and are replaced by what comes out, so that nobody else holds them and each
is written in place.

One function serves all steps of one `Bucket`, one `Goal` and the same shapes of state. Where it can't be used
a step is built eagerly, and `Off` says why; whether it pays is found out as it runs (`contest`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import mlx.core as mx

from mlxbcd.methods.contest import Contest, Way
from mlxbcd.methods.step import EagerSteps, Off
from mlxbcd.model.forward import Forward, Group
from mlxbcd.sampling.form import Form, Inputs
from mlxbcd.sampling.sampler import Draw, Samplers
from mlxbcd.state.alone import AloneTurn
from mlxbcd.state.bucket import Bucket, TracedStep
from mlxbcd.state.composition import Composition
from mlxbcd.state.layout import Layout
from mlxbcd.state.rows import COLD, Joiner, Rows, Turn, commit

log = logging.getLogger(__name__)

_PATIENCE: Final = 3
"""Steps of a shape that are built eagerly before it is traced: shapes that come and go aren't worth it."""
_MOST: Final = 64
"""Traced functions kept; each is a graph of a few thousand nodes, without data."""
_MARGIN: Final = 0.95
"""A traced step must take at most this share of an eager one: tracing costs about as much as two steps, and the
smallest bucket lasts 64."""


class Part(Enum):
    """What a function that doesn't sample gives."""

    LOGITS = "logits"
    """Of one token of each row, [B, V]."""
    HIDDEN = "hidden"
    """Final hidden states of each row's window, [B, N, D]."""


Goal: TypeAlias = Form | Part
"""What a traced function gives: what is chosen, or less."""

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], mx.Dtype], ...]


class _NotFixed(Exception):
    """A step that was traced gives its state other shapes than it took."""


@dataclass(slots=True)
class _Shape:
    """Steps of one shape.

    Attributes:
        steps: built so far, eagerly or not.
        call: the traced function, once there is one.
        traces: how often Python has run to trace it.
        off: why there will never be one.
    """

    steps: int = 0
    call: Callable[..., Any] | None = None
    traces: int = 0
    off: Off | None = None


@dataclass(slots=True)
class _Last:
    """The step built last."""

    at: float
    contest: Contest
    way: Way


@dataclass(slots=True)
class CompiledSteps:
    """Builds steps, or rounds, from traced functions where that can be done and pays.

    One object is for one of the two: what was measured and found out, and `off`, are of the last kind built.

    Args:
        always: use a traced function wherever there can be one, and at once, without measuring.

    Attributes:
        off: why the last step was built eagerly; None if it was not.
    """

    forward: Forward
    always: bool = False
    clock: Callable[[], float] = time.perf_counter
    off: Off | None = None
    _eager: EagerSteps = field(init=False)
    _shapes: OrderedDict[Any, _Shape] = field(default_factory=OrderedDict, init=False)
    _contests: dict[Any, Contest] = field(default_factory=dict, init=False)
    _untraceable: bool = field(default=False, init=False)
    _numbers: dict[Shapes, int] = field(default_factory=dict, init=False)
    _state: tuple[weakref.ref[Rows], int, int, int] | None = field(default=None, init=False)
    _layouts: list[Layout] | None = field(default=None, init=False)
    _last: _Last | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._eager = EagerSteps(self.forward)

    def __repr__(self) -> str:
        return f"CompiledSteps({sum(shape.call is not None for shape in self._shapes.values())} traced, {self.off})"

    @property
    def traces(self) -> list[int]:
        """How often each function in use was traced."""
        return [shape.traces for shape in self._shapes.values() if shape.call is not None]

    def refusal(self, composition: Composition) -> Off | None:
        """Why no step of the model could be compiled; None if some can. Traces one that is never evaluated."""
        if not composition.batches:
            return Off.ALONE
        rows = Rows(composition, widest=1)
        commit(rows.prepare(join=[Joiner("probe", COLD, 2)]))
        probe = CompiledSteps(self.forward, always=True)
        for _ in range(2):
            turn = rows.begin(1)
            probe.logits(turn, mx.zeros(1, dtype=mx.uint32))
            turn.resolve()
        return probe.off

    def build(self, turn: Turn | AloneTurn, ids: mx.array, samplers: Samplers) -> Draw:
        """See `StepBuilder.build`."""
        chosen = self._outputs(turn, ids[:, None], samplers.form, samplers.inputs)
        return self._eager.build(turn, ids, samplers) if chosen is None else samplers.advance(chosen)

    def logits(self, turn: Turn | AloneTurn, ids: mx.array) -> mx.array:
        """See `StepBuilder.logits`."""
        outputs = self._outputs(turn, ids[:, None], Part.LOGITS)
        return self._eager.logits(turn, ids) if outputs is None else outputs[0]

    def hidden(self, turn: Turn, ids: mx.array) -> mx.array:
        """See `RoundBuilder.hidden`."""
        outputs = self._outputs(turn, ids, Part.HIDDEN)
        return self._eager.hidden(turn, ids) if outputs is None else outputs[0]

    def _outputs(
        self,
        turn: Turn | AloneTurn,
        ids: mx.array,
        goal: Goal,
        inputs: Callable[[], Sequence[Inputs]] = tuple,
    ) -> list[mx.array] | None:
        """What the traced function of a step over ids [B, N] gives. None if the step is to be built eagerly, and
        nothing has changed.

        Args:
            inputs: what its form takes, asked for only if there is a function to call.
        """
        if not isinstance(turn, Turn) or self._untraceable or turn.recorded or 0 in turn.step.starts:
            self._last = None
            self.off = self._general_refusal(turn)
            return None
        arrays = turn.rows.arrays()
        bucket = Bucket.of(turn.step)
        shape = self._shape(bucket, goal, self._number(turn.rows, arrays))
        kind = goal if isinstance(goal, Part) else None
        contest = self._contests.setdefault((bucket.segments, bucket.width, kind), Contest(_MARGIN))
        self.off = self._refusal(shape, contest)
        shape.steps += 1
        self._measure(contest, Way.FAMILIAR if self.off else Way.OTHER)
        if self.off is not None:
            return None
        if shape.call is None:
            shape.call = self._function(shape, bucket, goal)
        return self._called(shape, turn, ids, inputs(), arrays)

    def _general_refusal(self, turn: Turn | AloneTurn) -> Off:
        if not isinstance(turn, Turn):
            return Off.ALONE
        if self._untraceable:
            return Off.UNTRACEABLE
        return Off.RECORDED if turn.recorded else Off.COLD

    def _refusal(self, shape: _Shape, contest: Contest) -> Off | None:
        if shape.off is not None or self.always:
            return shape.off
        if shape.steps < _PATIENCE and shape.call is None and contest.winner is not Way.OTHER:
            return Off.NEW
        if contest.way is Way.OTHER:
            return None
        return Off.SLOWER if contest.winner is Way.FAMILIAR else Off.TRIAL

    def _measure(self, contest: Contest, way: Way) -> None:
        """Between two steps in a row of one kind lies the time of one, host and device together."""
        now = self.clock()
        last, self._last = self._last, _Last(now, contest, way)
        if last is not None and last.contest is contest and last.way is way:
            contest.note(way, now - last.at)

    def _called(
        self, shape: _Shape, turn: Turn, ids: mx.array, inputs: Sequence[Inputs], arrays: list[mx.array]
    ) -> list[mx.array] | None:
        assert shape.call is not None
        starts = mx.array(turn.step.starts, dtype=mx.int32)
        self._layouts = turn.rows.layouts
        try:
            outputs, written = shape.call(ids.astype(mx.uint32), starts, inputs, arrays)
        except _NotFixed:
            shape.call, shape.off = None, Off.UNFIXED
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            # Whatever a model does that can't be done without values; if the fault is another, the eager step raises.
            log.info("the model's decode step can't be traced: %s", type(error).__name__)
            shape.call, self._untraceable = None, True
        else:
            turn.rows.replace(written)
            return list(outputs)
        finally:
            self._layouts = None
        self.off = shape.off or Off.UNTRACEABLE
        return None

    def _function(self, shape: _Shape, bucket: Bucket, goal: Goal) -> Callable[..., Any]:
        """What runs steps of one shape: traced when it is called first."""

        def step(
            ids: mx.array, starts: mx.array, inputs: Sequence[Inputs], arrays: Sequence[mx.array]
        ) -> tuple[list[mx.array], list[mx.array]]:
            # Runs to be traced only, over layouts that end with the trace: a function that outlives a collection must
            # not hold it.
            assert self._layouts is not None
            shape.traces += 1
            fresh = iter(arrays)
            layouts = [layout.over(fresh) for layout in self._layouts]
            traced = TracedStep(bucket, starts)
            (hidden,) = self.forward.run([Group(ids, [layout.view(traced) for layout in layouts])])
            outputs = self._reached(goal, hidden, inputs)
            written = [array for layout in layouts for array in layout.arrays()]
            if _shapes(written) != _shapes(arrays):
                raise _NotFixed
            return outputs, written

        call: Callable[..., Any] = mx.compile(step)
        return call

    def _reached(self, goal: Goal, hidden: mx.array, inputs: Sequence[Inputs]) -> list[mx.array]:
        if goal is Part.HIDDEN:
            return [hidden]
        logits = self.forward.head(hidden)[:, -1]
        return goal.choose(logits, inputs) if isinstance(goal, Form) else [logits]

    def _shape(self, bucket: Bucket, goal: Goal, state: int) -> _Shape:
        key = (bucket, goal, state)
        shape = self._shapes.setdefault(key, _Shape())
        self._shapes.move_to_end(key)
        if len(self._shapes) > _MOST:
            self._shapes.popitem(last=False)
        return shape

    def _number(self, rows: Rows, arrays: Sequence[mx.array]) -> int:
        """Stands for the shapes of a collection's buffers."""
        known = self._state
        if known is None or known[0]() is not rows or known[1:3] != (rows.changes, len(arrays)):
            number = self._numbers.setdefault(_shapes(arrays), len(self._numbers))
            known = self._state = (weakref.ref(rows), rows.changes, len(arrays), number)
        return known[3]


def _shapes(arrays: Sequence[mx.array]) -> Shapes:
    return tuple((array.shape, array.dtype) for array in arrays)
