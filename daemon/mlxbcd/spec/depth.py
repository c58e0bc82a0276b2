"""Owns how deep to draft: each round's depth gives the most tokens per second, by rates and measured costs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final, TypeAlias

from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.rates import Believed, Prior, Rates

Key: TypeAlias = Hashable
"""Names a row."""

PAYS: Final = 1.05
"""A round with spans must promise this many times the tokens per second of plain steps, which are built ahead."""
_PAYS: Final = 1.02
"""The same of a round with drafts: giving them up costs more than a little, since only probes bring them back."""

_PLACES: Final = 16
_KEEPS: Final = 0.98
_CHAINED: Final = 8.0
_LASTS: Final = 0.998
_FIRM: Final = 10.0
_SPENT: Final = 0.025
"""The share of time that probes may cost before any has failed."""
_SOONEST: Final = 6
_RARER: Final = 1.25
_MOST_FAILED: Final = 8

MOST_DRAFTED: Final = 8
"""The deepest draft of a drafter that costs something."""

HOPEFUL: Final = Believed([0.7])
"""What is believed of a drafter that nobody has tried."""


def lasting_priors() -> tuple[Prior, Prior]:
    """What to believe of a drafter, learnt from all rows it drafts for."""
    return (
        Rates(_PLACES, HOPEFUL, keeps=_LASTS, weight=_FIRM, chained=_CHAINED),
        Rates(_PLACES, HOPEFUL, keeps=_LASTS, weight=_FIRM, chained=_CHAINED),
    )


def tokens(chances: Sequence[float], most: int | None = None) -> float:
    """Expected tokens of a row's round: one, and each proposal times the chance that it and all before it are right."""
    expected, reached = 1.0, 1.0
    for chance in chances if most is None else chances[:most]:
        reached *= chance
        expected += reached
    return expected


def best_depth(rows: Sequence[Sequence[float]], costs: VerifyCosts) -> int:
    """How many proposals the widest row of a round should verify; 0 where plain steps are as good.

    Args:
        rows: of each row the chances of its proposals, each given that all before it were right; empty without any.
        costs: known ones.
    """
    deepest = max(map(len, rows), default=0)
    if not deepest:
        return 0
    plain = len(rows) / costs.plain(len(rows))

    def rate(depth: int) -> float:
        return sum(tokens(chances, depth) for chances in rows) / costs.round(len(rows), depth + 1)

    best = max(range(1, deepest + 1), key=rate)
    return best if rate(best) >= PAYS * plain else 0


def worth_waiting(rows: Sequence[Sequence[float]], costs: VerifyCosts) -> bool:
    """Whether to read the step in flight before the next one is built, since its sample may confirm proposals.

    Then the host builds while the device rests, which is lost if nothing is confirmed.

    Args:
        rows: of each row the chances of its proposals, of which the first would be the sample in flight.
    """
    batch = len(rows)
    if not any(len(chances) > 1 for chances in rows):
        return False
    plain, idle = costs.plain(batch), costs.idle(batch)
    none = 1.0
    for chances in rows:
        none *= 1.0 - (chances[0] if len(chances) > 1 else 0.0)

    def saved(depth: int) -> float:
        more = sum(chances[0] * (tokens(chances[1:], depth) - 1.0) for chances in rows if len(chances) > 1)
        return more * plain / batch - (1.0 - none) * (costs.round(batch, depth + 1) - plain) - none * idle

    return max(saved(depth) for depth in range(1, max(map(len, rows)))) > 0.0


class Depth:
    """How deep a drafter that costs something drafts next.

    What it has seen of its drafts decides. Texts have good and bad stretches, so what a row's last draft was like says
    which rates hold for the next one. At depth 0 nothing is seen, so it *probes* now and then: as often as costs
    little, and ever more rarely while probes fail. A probe is a round, or, where that loses less, a *shadow*: the
    drafter guesses the token that a plain step draws anyway, and nothing is verified. One token is enough: deeper
    shadows cost more than what they tell is worth.

    Args:
        most: the deepest draft.
        costs: of verifying; while they are not known, drafts are always `most` deep.
        priors: what to believe at first, behind a good draft and behind a bad one; they learn.
        draft_s: seconds that drafting this deep takes a batch of so many rows.

    Attributes:
        probing: the depth told last is a probe.
        shadowing: it is a shadow: the depth is 0, and the drafter should guess each row's next token beside the step.
    """

    def __init__(
        self,
        most: int,
        costs: VerifyCosts,
        priors: tuple[Prior, Prior] = (HOPEFUL, HOPEFUL),
        draft_s: Callable[[int, int], float] = lambda rows, depth: 0.0,
    ) -> None:
        self.most = most
        self.probing = False
        self.shadowing = False
        self._costs = costs
        self._priors = priors
        self._draft_s = draft_s
        self.renew()

    def __repr__(self) -> str:
        return f"Depth(at most {self.most}, {self._good}, {self._bad})"

    def renew(self) -> None:
        """Other rows run from now on: believe what was believed at first."""
        self._good, self._bad = (Rates(_PLACES, prior, keeps=_KEEPS, chained=_CHAINED) for prior in self._priors)
        self._behind_bad: set[Key] = set()
        self._failed = 0
        self._waited = 0.0

    def next(self, cap: int, rows: Collection[Key], *, shadows: bool = False) -> int:
        """The depth of the next round of these rows, at most `cap`.

        Args:
            shadows: a plain step of all of them can be shadowed.
        """
        cap = min(cap, self.most)
        self.probing = self.shadowing = False
        if cap < 1 or not self._costs.known:
            return max(cap, 0)
        good, bad = self._good.table(), self._bad.table()
        worse = sum(key in self._behind_bad for key in rows)
        batch = len(rows)
        plain = batch / self._costs.plain(batch)
        best, best_rate, reached_good, reached_bad = 0, _PAYS * plain, 1.0, 1.0
        expected = float(batch)
        for depth in range(1, cap + 1):
            place = min(depth, _PLACES) - 1
            reached_good *= good[place]
            reached_bad *= bad[place]
            expected += (batch - worse) * reached_good + worse * reached_bad
            rate = expected / self._seconds(batch, depth)
            if rate > best_rate:
                best, best_rate = depth, rate
        if best:
            return best
        self._waited += 1.0
        step_s = self._costs.plain(batch)
        gained = ((batch - worse) * good[0] + worse * bad[0]) / batch
        lost, shadow_lost = self._seconds(batch, 1) - step_s, self._draft_s(batch, 1) + self._costs.idle(batch)
        shadow = shadows and shadow_lost < lost - gained * step_s
        if shadow:
            lost = shadow_lost
        if self._waited < max(lost / step_s / _SPENT, _SOONEST) * _RARER**self._failed:
            return 0
        self.probing = True
        self.shadowing = shadow
        self._waited = 0.0
        self._failed = min(self._failed + 1, _MOST_FAILED)
        return 0 if shadow else 1

    def saw(self, row: Key, drafted: int, accepted: int) -> None:
        """A row's draft was verified, in a round or along plain steps. Not for echoed spans."""
        if not drafted:
            return
        (self._bad if row in self._behind_bad else self._good).saw_draft(drafted, accepted)
        if accepted:
            self._behind_bad.discard(row)
            self._failed = 0
        else:
            self._behind_bad.add(row)

    def forget(self, row: Key) -> None:
        """A row has left."""
        self._behind_bad.discard(row)

    def _seconds(self, batch: int, depth: int) -> float:
        return self._costs.round(batch, depth + 1) + self._draft_s(batch, depth)
