"""Owns what a client that asks how its request is run gets told: the plan, and what guessing did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxbc import wire
from mlxbcd.plan.resolve import Feature, Plan
from mlxbcd.spec.statistics import Counts, Statistics


def speculation_reply(statistics: Statistics) -> wire.Speculation:
    """What guessing did, as the wire tells it."""

    def guesses(counts: Counts) -> wire.Guesses:
        lengths = {str(accepted): rounds for accepted, rounds in sorted(counts.lengths.items())}
        figures = (counts.rounds, counts.drafted, counts.accepted)
        return wire.Guesses(*figures, list(counts.drafted_at), list(counts.accepted_at), lengths)

    return wire.Speculation(
        forwards=statistics.forwards,
        forwards_saved=statistics.forwards_saved,
        drafts=guesses(statistics.drafts),
        echo=guesses(statistics.echo),
        draft_ms=round(statistics.draft_s * 1e3, 3),
        verify_ms=round(statistics.verify_s * 1e3, 3),
    )


def plan_reply(plan: Plan, chunks: Sequence[int], drafters: Iterable[str]) -> wire.Plan:
    """A plan as the wire tells it."""
    why = plan.refusal or plan.placement
    return wire.Plan(
        method=plan.method.value,
        mechanism=plan.mechanism.value,
        reason=why.text if why is not None else "",
        on=[feature.value for feature in Feature if plan.has(feature)],
        off={feature.value: reason.text for feature, reason in plan.off.items()},
        drafters=sorted(drafters),
        chunks=list(chunks),
    )
