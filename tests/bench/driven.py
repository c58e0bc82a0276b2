"""Owns our engine's device side inside a benchmark, driven by hand as its loop drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.events import Drawn, Event, Failed
from mlxbcd.plan.request import Constraint, Request
from mlxbcd.state.geometry import Key

ENDLESS = 1_000_000
_PIECE = 64


class Driven:
    """Greedy rows in decode that don't end.

    Args:
        constraints: what rules out tokens of each row; none for all of them by default.

    Attributes:
        tokens: what each row has generated.
    """

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[Sequence[int]],
        constraints: Sequence[Callable[[], Constraint] | None] = (),
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._rows: dict[Key, list[int]] = dict(enumerate(self.tokens))
        self._executor = executor
        for key, prompt in enumerate(prompts):
            constraint = constraints[key] if constraints else None
            request = Request(prompt=tuple(prompt), max_tokens=ENDLESS, eos=frozenset(), constraint=constraint)
            start = [(key, request)]
            for begin in range(0, len(prompt), _PIECE):
                width = min(_PIECE, len(prompt) - begin)
                piece = Piece(key, width, ends=begin + width == len(prompt))
                executor.iterate(Iteration(decode=False, piece=piece), start, (), self._take)
                start = []

    def step(self) -> None:
        """One decode step: one more token of every row is known to the host."""
        self._executor.iterate(Iteration(decode=True, piece=None), (), (), self._take)

    def settle(self) -> None:
        """Wait for what is being computed."""
        mx.synchronize()

    def close(self) -> None:
        """Let the rows go."""
        self._executor.iterate(
            Iteration(decode=False, piece=None), (), [Leaving(key) for key in self._rows], self._take
        )

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Drawn):
                self._rows[event.key].append(event.sample.token)
            elif isinstance(event, Failed):
                raise event.error
