"""Owns what the rows of a group propose in one step, known spans and drafts, and whether verifying them pays."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from mlxbcd.methods.autoregressive import Row
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth, best_depth, worth_waiting
from mlxbcd.spec.drafter import LOOKUP, Asked, Drafter
from mlxbcd.spec.echo import BELIEVED, PLACES, Echo, Origin
from mlxbcd.spec.forcing import Forcing
from mlxbcd.spec.rates import Rates
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.geometry import Key

_KEEPS: Final = 0.9
_WEIGHT: Final = 4.0
_LEARNS: Final = 0.998
_FIRMNESS: Final = 12.0
"""How fast a row's rates and those of its kind of request forget, and how many observations each one's prior counts."""

_STRANGER: Final = 2.0
_STRANGEST: Final = 3.0
_EASING: Final = 0.95
"""Times what is expected: that the first round after a join may take, that any may be taken to; and what a step leaves
of that."""
_FIXED: Final = 4
"""Proposals of an echoed span while nobody knows what verifying costs."""


@dataclass(slots=True)
class Speculation:
    """What the group keeps of a row.

    Attributes:
        echo: what the row may be copying; None where it must not.
        drafts: the drafter may propose for it.
        forcing: its grammar proposes, if it has one.
    """

    echo: Echo | None = None
    drafts: bool = False
    forcing: Forcing | None = None
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(slots=True)
class _Span:
    """What is known of a row's next tokens without drafting.

    Attributes:
        chances: of each token.
        forced: they are the grammar's; else they are echoed.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """A row's part of a round.

    Attributes:
        origin: whose span the proposals are; None if the drafter's, or if there are none.
        forced: they are the grammar's.
        samplers: of each position.
    """

    row: Row
    proposals: Sequence[int]
    origin: Origin | None
    forced: bool
    samplers: Sequence[RowSampler]


class Proposer:
    """Decides what a group's rows propose.

    Args:
        speculations: the group's, of each of its rows.
        costs: of verifying.
        drafter: None leaves it at spans.
        depth: how deep the drafter drafts; needed with one.
    """

    def __init__(
        self, speculations: Mapping[Key, Speculation], costs: VerifyCosts, drafter: Drafter | None, depth: Depth | None
    ) -> None:
        assert (drafter is None) == (depth is None)
        self._speculations = speculations
        self._costs = costs
        self._drafter = drafter
        self._depth = depth
        self._beliefs: dict[str, dict[Origin, Rates]] = {}
        self._strain = 1.0

    def __repr__(self) -> str:
        return f"Proposer({'no drafter' if self._drafter is None else self._drafter.name})"

    def speculation(self, row: Row) -> Speculation:
        """What the request of a row that joins allows."""
        request = row.request
        if row.sampler.constraint is not None and request.proposes:
            return Speculation(forcing=Forcing())
        if not request.drafts and not request.echo:
            return Speculation()
        beliefs = self._beliefs.setdefault(request.kind, {origin: _belief() for origin in Origin})
        rates = {origin: Rates(PLACES, belief, keeps=_KEEPS, weight=_WEIGHT) for origin, belief in beliefs.items()}
        own = LOOKUP in request.drafts
        echo = Echo(row.sequence, request.echo, rates=rates, own=own) if own or request.echo else None
        return Speculation(echo, drafts=self._drafter is not None and self._drafter.name in request.drafts)

    def joined(self) -> None:
        """A row has joined: with a long context it makes every window dearer than any that was measured."""
        self._strain = max(self._strain, _STRANGER)

    def took(self, rows: int, width: int, seconds: float) -> None:
        """A round took so long. What is expected follows slowly, but nobody should wait too long twice."""
        if self._costs.known:
            self._strain = min(max(1.0, seconds / self._costs.round(rows, width)), _STRANGEST)

    def ease(self) -> None:
        """A step begins. Care that leaves no rounds at all must not do so for ever."""
        self._strain = max(1.0, self._strain * _EASING)

    def widest(self, rows: int, most: int, within: float) -> int:
        """Proposals that any window may have, at most `most`, in a round that takes no longer than `within` seconds.

        Where nobody has measured what rounds cost, nothing is bounded: a model that is loaded to be served has been.
        """
        if math.isinf(within) or not self._costs.known:
            return most
        while most > 0 and self._strain * self._costs.round(rows, most + 1) > within:
            most -= 1
        return most

    def waits(self, rows: Mapping[Key, Row], most: int) -> bool:
        """Whether the sample in flight is likely enough to confirm a span, or to settle what a grammar forces, that is
        worth verifying.

        Args:
            most: proposals of any window.
        """
        if not self._costs.known or most < 1:
            return False
        chances: list[Sequence[float]] = []
        for key, row in rows.items():
            speculation = self._speculations[key]
            n = min(most, _room(row) - 1) + 1
            if n < 2 or row.ended:
                chances.append([])
            elif speculation.forcing is not None:
                chances.append(speculation.forcing.expected(n - 1))
            else:
                echo = speculation.echo
                chances.append(echo.chances(len(echo.propose(n))) if echo is not None else [])
        return any(chances) and worth_waiting(chances, self._costs)

    def due(self, rows: Mapping[Key, Row], most: int, *, flying: bool) -> tuple[int, bool]:
        """How deep the drafter should draft in this step; and whether it should be plain, with a shadow: see `Depth`.

        Args:
            most: proposals of any window.
            flying: a step of the rows is in flight, so a plain one would be built ahead.
        """
        drafted = self._drafted(rows)
        room = min(max(map(_room, drafted), default=0), most)
        if self._depth is None or room < 1:
            return 0, False
        # What a constraint allows behind the token in flight is not known yet.
        shadows = flying and all(row.sampler.constraint is None for row in drafted)
        depth = self._depth.next(room, [row.key for row in drafted], shadows=shadows)
        return depth, self._depth.shadowing

    def foreseen(self, rows: Mapping[Key, Row]) -> dict[Key, RowSampler]:
        """What the rows that draft will draw by in the next step that is built."""
        return {row.key: row.sampler.supposing(())[0] for row in self._drafted(rows)}

    def guesses(self, rows: Sequence[Row], samplers: Mapping[Key, RowSampler]) -> dict[Key, int]:
        """What the drafter thinks that rows draw in the step in flight, end tokens left out as in windows.

        Args:
            samplers: what that step draws by, of the rows that draft.
        """
        asked = [Asked(row.key, row.pending, samplers[row.key], 1) for row in rows if row.key in samplers]
        ends = {row.key: row.request.eos for row in rows}
        drafts = self._ask(asked, 1)
        return {key: token for key, draft in drafts.items() for token in _until(ends[key], draft)}

    def windows(self, rows: Mapping[Key, Row], most: int, depth: int) -> list[Window]:
        """The rows' windows, in any order; nothing if a plain step is as good.

        Args:
            most: proposals of any window.
            depth: of drafts.
        """
        if most < 1:
            return []
        spans = self._spans(rows, most)
        drafts = self._drafts(rows, min(depth, most), spans)
        if not any(span.tokens for span in spans.values()) and not any(drafts.values()):
            return []
        windows = []
        for key, row in rows.items():
            span, echo = spans[key], self._speculations[key].echo
            proposals = _until(row.request.eos, span.tokens or drafts.get(key, []))
            origin = echo.origin if echo is not None and span.tokens and not span.forced else None
            samplers = row.sampler.supposing(proposals)
            windows.append(Window(row, proposals[: len(samplers) - 1], origin, span.forced, samplers))
        return windows if any(window.proposals for window in windows) else []

    def _spans(self, rows: Mapping[Key, Row], most: int) -> dict[Key, _Span]:
        """Each row's span, cut to the depth that pays for all."""
        spans = {key: self._span(row, min(most, _room(row))) for key, row in rows.items()}
        chances = [span.chances for span in spans.values()]
        if self._costs.known:
            depth = best_depth(chances, self._costs)
        else:
            depth = _FIXED if any(each and each[0] > 0.8 for each in chances) else 0
        for span in spans.values():
            span.tokens = span.tokens[:depth]
        return spans

    def _span(self, row: Row, most: int) -> _Span:
        """What is known to follow a row's newest token, at most so many tokens of it."""
        speculation, constraint = self._speculations[row.key], row.sampler.constraint
        if speculation.forcing is not None and constraint is not None:
            forced = constraint.forced()
            speculation.forcing.saw(len(forced))
            forced = forced[: max(most, 0)]
            return _Span(forced, speculation.forcing.chances(len(forced)), forced=True)
        if speculation.echo is None:
            return _Span()
        tokens = speculation.echo.propose(most)
        return _Span(tokens, speculation.echo.chances(len(tokens)))

    def _drafts(self, rows: Mapping[Key, Row], depth: int, spans: Mapping[Key, _Span]) -> dict[Key, list[int]]:
        """What the drafter proposes for the rows without a span."""
        if depth < 1:
            return {}
        asked = [
            Asked(key, row.pending, row.sampler, min(room, depth))
            for key, row in rows.items()
            if self._speculations[key].drafts and not spans[key].tokens and (room := _room(row)) > 0
        ]
        return self._ask(asked, depth)

    def _drafted(self, rows: Mapping[Key, Row]) -> list[Row]:
        """The rows that the drafter may propose for."""
        return [row for key, row in rows.items() if self._speculations[key].drafts and not row.ended]

    def _ask(self, asked: Sequence[Asked], depth: int) -> dict[Key, list[int]]:
        """What the drafter proposes."""
        if self._drafter is None or not asked:
            return {}
        depth = min(depth, max(row.most for row in asked))
        began = time.perf_counter()
        drafts = self._drafter.draft(asked, depth)
        seconds = time.perf_counter() - began
        for row in asked:
            self._speculations[row.key].statistics.draft_s += seconds
        return {row.key: draft[: row.most] for row, draft in zip(asked, drafts, strict=True)}


def _room(row: Row) -> int:
    """Proposals that a row can use: its last token never needs one."""
    return row.request.max_tokens - row.drawn - 1


def _belief() -> Rates:
    """What is believed of the spans of one kind of request, learnt from all that have run."""
    return Rates(PLACES, BELIEVED, keeps=_LEARNS, weight=_FIRMNESS)


def _until(ends: frozenset[int], proposals: Sequence[int]) -> list[int]:
    """The proposals before the first one that would end the row: behind it nothing is drawn."""
    return list(takewhile(lambda token: token not in ends, proposals))
