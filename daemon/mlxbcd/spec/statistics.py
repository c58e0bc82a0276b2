"""Owns what a request's speculation did: counted per row, told as plain values. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Counts:
    """Proposals of one kind: a drafter's drafts, or echoed spans.

    Attributes:
        rounds: verified windows that had any.
        drafted, accepted: proposals in all.
        drafted_at, accepted_at: of them, those at each place of their window.
        lengths: how many windows had how many accepted.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted

    def saw(self, drafted: int, accepted: int) -> None:
        """A window of a row was verified."""
        if not drafted:
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for at, n in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            at += [0] * (n - len(at))
            for place in range(n):
                at[place] += 1
        self.lengths[accepted] = self.lengths.get(accepted, 0) + 1

    def copy(self) -> Counts:
        return replace(
            self, drafted_at=list(self.drafted_at), accepted_at=list(self.accepted_at), lengths=dict(self.lengths)
        )


@dataclass(slots=True)
class Statistics:
    """What speculation did for one request.

    Attributes:
        generated: tokens delivered since the row joined its group, whose first one came from the prompt's forward.
        forwards: of the target that the row was part of, those without proposals included.
        drafts: what the drafter proposed.
        echo: spans of supplied texts; the drafter's figures know nothing of them.
        draft_s, verify_s: seconds of drafting, and of forwards with proposals and their draws. Shared work counts fully
            for each row, so times of several rows don't add up.
    """

    generated: int = 0
    forwards: int = 0
    drafts: Counts = field(default_factory=Counts)
    echo: Counts = field(default_factory=Counts)
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def drafted(self) -> int:
        return self.drafts.drafted + self.echo.drafted

    @property
    def accepted(self) -> int:
        return self.drafts.accepted + self.echo.accepted

    @property
    def tokens_per_forward(self) -> float:
        return self.generated / self.forwards if self.forwards else 0.0

    @property
    def forwards_saved(self) -> int:
        return max(0, self.generated - self.forwards)

    def copy(self) -> Statistics:
        """A snapshot that later rounds don't change."""
        return replace(self, drafts=self.drafts.copy(), echo=self.echo.copy())


def total(all_of: Sequence[Statistics]) -> Statistics:
    """The sum of several requests' figures; see `Statistics` about times."""
    out = Statistics()
    for one in all_of:
        out.generated += one.generated
        out.forwards += one.forwards
        out.draft_s += one.draft_s
        out.verify_s += one.verify_s
        for into, counts in ((out.drafts, one.drafts), (out.echo, one.echo)):
            into.rounds += counts.rounds
            into.drafted += counts.drafted
            into.accepted += counts.accepted
            for at, other in ((into.drafted_at, counts.drafted_at), (into.accepted_at, counts.accepted_at)):
                at += [0] * (len(other) - len(at))
                for place, n in enumerate(other):
                    at[place] += n
            for accepted, n in counts.lengths.items():
                into.lengths[accepted] = into.lengths.get(accepted, 0) + n
    return out
