"""Owns what a client that asks how its request is run gets told: the plan, and what guessing did. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxbc import wire
from mlxbcd.plan.resolve import Feature, Plan, Reason
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


def refusal_text(refusal: Reason, draft: str, drafters: Iterable[str]) -> str:
    """Why a request can't run: of a drafter that is missing which one, which there are, and how there would be.

    Args:
        draft: what the request says.
        drafters: those of its model.
    """
    if refusal is not Reason.NO_SUCH_DRAFTER:
        return refusal.text
    there = ", ".join(sorted(drafters))
    others = f"only {there}; draft auto takes what there is" if there else "and no other; leave draft out"
    text = f"this model has no such drafter as {draft!r}, {others}"
    more = {
        "model": "a line in the table [drafts] of the settings gives it a draft model",
        "mtp": "this one takes a checkpoint with heads for it",
    }.get(draft)
    return f"{text}, and {more}" if more else text


def plan_reply(plan: Plan, chunks: Sequence[int], drafters: Iterable[str], refusal: str = "") -> wire.Plan:
    """A plan as the wire tells it.

    Args:
        refusal: more than the plan's own words, if it is one.
    """
    why = plan.placement
    return wire.Plan(
        method=plan.method.value,
        mechanism=plan.mechanism.value,
        reason=refusal or (why.text if why is not None else ""),
        on=[feature.value for feature in Feature if plan.has(feature)],
        off={feature.value: reason.text for feature, reason in plan.off.items()},
        drafters=sorted(drafters),
        chunks=list(chunks),
    )
