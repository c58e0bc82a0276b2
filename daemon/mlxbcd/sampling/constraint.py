"""Owns what rules out tokens of a row: a grammar, and a budget for reasoning. Touches no MLX.

A grammar holds for what is said, not for what is thought before: while the row reasons it waits, and the text can't
end. A budget counts the tokens inside reasoning; once it is spent, the closing marker is all that may come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from mlxbcd.sampling.grammar import Matcher, Words, all_but, only

_RETRACTABLE: Final = 64
"""Newest tokens that can be taken back, as many as a penalty can forget."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a row thinks before it speaks.

    Attributes:
        opening, closing: ids of the markers.
        budget: tokens between markers, of all blocks together; None sets no limit.
    """

    opening: int
    closing: int
    budget: int | None = None


class _Place(NamedTuple):
    """Where a row is.

    Attributes:
        inside: in a block of reasoning.
        thought: tokens in such blocks so far.
        said: tokens that the grammar has seen.
        begun: anything has been drawn.
    """

    inside: bool
    thought: int = 0
    said: int = 0
    begun: bool = False


class RowConstraint:
    """What one row may draw; see `plan.request.Constraint`.

    Args:
        width: of the logits.
        ends: ids that end a text.
        grammar: at the beginning of what is said.
        reasoning: None for a row that has none: the markers are text like any other then.
        inside: the prompt has opened reasoning.
        leads: the grammar is for the beginning; what follows it is free.
    """

    def __init__(
        self,
        width: int,
        ends: Iterable[int],
        grammar: Matcher | None = None,
        reasoning: Reasoning | None = None,
        *,
        inside: bool = False,
        leads: bool = False,
    ) -> None:
        self._leads = leads
        self._width = width
        self._ends = frozenset(ends)
        self._grammar = grammar
        self._reasoning = reasoning
        self._place = _Place(inside)
        self._past: deque[_Place] = deque(maxlen=_RETRACTABLE)
        self._endless: Words | None = None

    def __repr__(self) -> str:
        return f"RowConstraint({self._place}, {self._grammar!r})"

    @property
    def fault(self) -> str:
        """Why the row can't go on, once it can't."""
        return self._grammar.fault if self._grammar is not None else ""

    @property
    def complete(self) -> bool:
        """The grammar is satisfied, and nothing can be added."""
        return not self._leads and self._grammar is not None and not self._place.inside and self._grammar.complete

    @property
    def foresees(self) -> bool:
        """Whether the draw after the next token is free, whatever that token is."""
        if self._grammar is not None:
            return False
        return (
            self._reasoning is None
            or self._reasoning.budget is None
            or self._place.thought + 1 < self._reasoning.budget
        )

    def copy(self) -> RowConstraint:
        """Another one at the same place, with nothing to take back."""
        grammar = self._grammar.copy() if self._grammar is not None else None
        twin = RowConstraint(self._width, self._ends, grammar, self._reasoning, leads=self._leads)
        twin._place = self._place
        return twin

    def mask(self) -> Words | None:
        """Which tokens may come next; None allows all."""
        reasoning, place, grammar = self._reasoning, self._place, self._ruling
        if place.inside:
            assert reasoning is not None
            if reasoning.budget is not None and place.thought >= reasoning.budget:
                return only(reasoning.closing, self._width)
            return self._unending() if grammar is not None else None
        if grammar is None:
            return None
        words = grammar.mask()
        if reasoning is not None and not place.begun:
            words[reasoning.opening // 32] |= 1 << (reasoning.opening % 32)
        return words

    def forced(self) -> list[int]:
        """The tokens that come next whatever is drawn, as far as they are known; empty where there is a choice."""
        reasoning, place, grammar = self._reasoning, self._place, self._ruling
        if place.inside:
            assert reasoning is not None
            spent = reasoning.budget is not None and place.thought >= reasoning.budget
            return [reasoning.closing] if spent else []
        if grammar is None or (reasoning is not None and not place.begun):
            return []
        return grammar.forced()

    def accept(self, *tokens: int) -> None:
        """Take in the row's next tokens."""
        for token in tokens:
            self._past.append(self._place)
            self._place = self._after(token)

    def retract(self, count: int) -> None:
        """Take the last `count` accepted tokens back.

        Raises:
            ValueError: fewer of the newest tokens are still known.
        """
        if count > len(self._past):
            raise ValueError(f"{self!r} can take back {len(self._past)} tokens, not {count}")
        said = self._place.said
        for _ in range(count):
            self._place = self._past.pop()
        if self._grammar is not None and said > self._place.said:
            self._grammar.retract(said - self._place.said)

    @property
    def _ruling(self) -> Matcher | None:
        """The grammar, unless it has led to where the rest is free."""
        return None if self._leads and self._grammar is not None and self._grammar.complete else self._grammar

    def _after(self, token: int) -> _Place:
        """Where the row is after `token`; the grammar sees what is said."""
        place, reasoning, grammar = self._place._replace(begun=True), self._reasoning, self._ruling
        if place.inside:
            assert reasoning is not None
            if token == reasoning.closing:
                return place._replace(inside=False)
            return place._replace(thought=place.thought + 1)
        if reasoning is not None and token == reasoning.opening and (grammar is None or not self._place.begun):
            return place._replace(inside=True)
        if grammar is None:
            return place
        grammar.accept(token)
        return place._replace(said=place.said + 1)

    def _unending(self) -> Words:
        """A text that ended here would lack what the grammar asks for."""
        if self._endless is None:
            self._endless = all_but(self._ends, self._width)
        return self._endless
