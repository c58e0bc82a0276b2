"""Owns finding out, at load, whether groups of rows may run packed through one model, and why not where they may not.

Three things have to hold. A packed forward over groups of different shapes can be built, in which nothing but mixers
looks at a layer's cache (`Packer.discover`; the graph is not evaluated). What the mixers answer in packed forwards is
what they answer in separate ones, in the first layers up to one of every kind; only those are evaluated, so this costs
a few small forwards through a few layers. (Where a model has no mixers, since all its tokens can run as rows, what is
compared is its hidden states.) And rows share a batch at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

import mlx.core as mx

from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.packed import Packer
from mlxbcd.model.parts import Unpackable
from mlxbcd.state import geometry
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Class
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from mlxbcd.state.step import Segment, Step

_TOLERANCE: Final = 1e-3
"""Largest difference in float32, relative to the largest value: far more than rounding, far less than a mistake."""
_COARSE_TOLERANCE: Final = 5e-2
"""The same in 16 bits, where kernels for other shapes round otherwise."""
_WIDEST: Final = 8


class NotPacked(Enum):
    """Why groups of a model never run packed."""

    ALONE = "rows of this model run alone"
    ENTANGLED = "the model computes with its state outside what can run group by group"
    DIFFERENT = "packed layers do not answer what separate ones do"


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether groups run packed.

    Attributes:
        packer: runs them; None where they can't.
        reason: why they can't.
        detail: what stood in the way, for logs.
    """

    packer: Packer | None
    reason: NotPacked | None = None
    detail: str = ""

    def __str__(self) -> str:
        """Why not, for a person; empty where they do."""
        if self.reason is None:
            return ""
        return f"{self.reason.value} ({self.detail})" if self.detail else self.reason.value


def inspect(forward: Forward, composition: Composition) -> Packing:
    """Try packed forwards of a model that has just been loaded. On the device thread."""
    if not composition.batches:
        return Packing(None, NotPacked.ALONE, composition.reason)
    faults = []
    for rows in (False, True):
        packer = Packer(forward, rows=rows)
        try:
            calls = packer.discover(_shapes(composition))
            # Once more: the projections at the mixers' edges were not joined yet.
            packer.run(_shapes(composition))
        except Unpackable as error:
            faults.append(str(error))
            continue
        difference = _difference(forward, packer, composition, _enough(calls, composition.kinds))
        return Packing(None, NotPacked.DIFFERENT, difference) if difference else Packing(packer)
    return Packing(None, NotPacked.ENTANGLED, faults[0])


def _shapes(composition: Composition) -> list[Group]:
    """Three rows of different lengths that decode, beside a piece of a prompt, over state that is never evaluated."""
    small = Class(geometry.SMALLEST)
    steps = [Step([1, 3, 2], 1, [Segment(0, 3, small)]), Step([4], 5, [Segment(0, 1, small)])]
    return [
        Group(
            mx.zeros((len(step.starts), step.width), dtype=mx.int32),
            [layout.view(step) for layout in composition.layouts(_WIDEST)],
        )
        for step in steps
    ]


def _enough(calls: Sequence[tuple[str, int | None]], kinds: Sequence[str]) -> int:
    """Calls of mixers until there has been one of every kind, and one more to see what lies between them."""
    seen: set[tuple[str, str]] = set()
    last = 0
    for i, (name, layer) in enumerate(calls):
        kind = name, "" if layer is None else kinds[layer]
        if kind not in seen:
            seen.add(kind)
            last = i
    return min(last + 2, len(calls))


def _difference(forward: Forward, packer: Packer, composition: Composition, limit: int) -> str:
    """How packed answers differ from separate ones; empty where they don't."""

    def separate(groups: Sequence[Group]) -> list[mx.array]:
        answers = []
        for group in groups:
            hidden = []
            with packer.tapped(limit) as tap:
                hidden = forward.run([group])
            answers += [answer for call in tap.answers for answer in call] or hidden
        return answers

    def packed(groups: Sequence[Group]) -> list[mx.array]:
        hidden = []
        with packer.tapped(limit) as tap:
            hidden = packer.run(groups)
        # Group by group, as the separate ones come.
        return [call[i] for i in range(len(groups)) for call in tap.answers] or hidden

    try:
        ours, wanted = _story(composition, packed), _story(composition, separate)
        mx.eval(ours, wanted)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    worst = max(map(_apart, ours, wanted), key=lambda apart: (apart != apart, apart))
    return "" if worst <= 1 else f"they are {worst:.1f} times further apart than rounding explains"


def _story(composition: Composition, run: Callable[[Sequence[Group]], list[mx.array]]) -> list[mx.array]:
    """What `run` answers when three prompts begin, and when two of them decode together beside a piece of the third."""
    prompts = [Rows(composition, widest=_WIDEST) for _ in range(3)]
    for key, rows in enumerate(prompts):
        commit(rows.prepare(join=[Joiner(key, COLD, 2 * _WIDEST)]))
    answers = _advance(prompts, [2, 3, 4], run)
    decoding, going_on = Rows(composition, widest=1), prompts[2]
    commit(decoding.prepare(join=[Joiner(key, prompts[key].read(key), 2 * _WIDEST) for key in (0, 1)]))
    return answers + _advance([decoding, going_on], [1, 5], run)


def _advance(
    collections: Sequence[Rows], widths: Sequence[int], run: Callable[[Sequence[Group]], list[mx.array]]
) -> list[mx.array]:
    turns = [rows.begin(width) for rows, width in zip(collections, widths, strict=True)]
    groups = [
        # Small numbers, which every vocabulary has.
        Group(
            mx.array(
                [
                    [1 + start + 7 * row + n for n in range(turn.step.width)]
                    for row, start in enumerate(turn.step.starts)
                ]
            ),
            turn.caches,
        )
        for turn in turns
    ]
    answers = run(groups)
    for turn in turns:
        turn.resolve()
    return answers


def _apart(ours: mx.array, wanted: mx.array) -> float:
    """Largest difference as a multiple of what is tolerated; NaN where either holds NaN."""
    tolerance = _TOLERANCE if wanted.dtype == mx.float32 else _COARSE_TOLERANCE
    apart = mx.abs(ours - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1e-6)
    return cast("float", apart.item()) / tolerance
