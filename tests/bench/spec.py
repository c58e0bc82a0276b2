"""Owns `spec`: tokens per second with speculation beside the same engine without it, on texts that copy and that don't.

Both sides run on one executor, in one process, on the same prompts, and take turns request by request. Their tokens are
compared: what differs but by a near tie would be a fault, so the note counts how many agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from bench import drafting, inprocess
from bench.answers import Asking, answer
from bench.edits import TASKS
from bench.registry import Settings
from bench.stories import Messages
from bench.table import Row, Target, compare
from mlxbcd.engine.executor import Executor
from mlxbcd.plan.request import Request
from mlxbcd.spec.statistics import total
from mlxbcd.text.tokenizer import Tokenizer

_WITHOUT = "mlxbc without speculation"

CHATS: Sequence[Messages] = [
    [{"role": "user", "content": text}]
    for text in (
        "Why is the sky blue? Explain it to a curious adult.",
        "Tell me a story about a fox who wants to learn how to swim.",
        "What should somebody think about before they adopt a dog?",
        "How did people find their way at sea before there were satellites?",
    )
]


def run(settings: Settings) -> list[Row]:
    """Rows `spec/copy/B=1`, `spec/copy/B=4`, `spec/edit/B=1`, `spec/chat/B=1`, and those of `drafting`."""
    built = inprocess.built(settings.model)
    tokenizer = Tokenizer.load(settings.model)
    asking = Asking(tokenizer, settings.pick(256, 80))
    copying = [task for task in TASKS if task.copies]
    others = [task for task in TASKS if not task.copies]
    rounds = settings.pick(3, 1)
    if settings.quick:
        copying, others = copying[:1], others[:1]
    edits = [asking.edit(task) for task in copying]
    return [
        _row(built.executor, "spec/copy/B=1", [[one] for one in edits], rounds, Target("ratio", ">=", 3.0)),
        _row(built.executor, "spec/copy/B=4", _fours(edits), rounds, Target("ratio", ">=", 1.5)),
        _row(built.executor, "spec/edit/B=1", [[asking.edit(task)] for task in others], rounds, None),
        _row(
            built.executor,
            "spec/chat/B=1",
            [[asking.chat(chat)] for chat in CHATS],
            rounds,
            Target("ratio", ">=", 0.97),
        ),
        *drafting.rows(settings, built, [asking.chat(chat) for chat in CHATS]),
    ]


def _fours(requests: Sequence[Request]) -> list[list[Request]]:
    """Every request in the company of three others."""
    doubled = [*requests, *requests, *requests, *requests]
    return [doubled[at : at + 4] for at in range(len(requests))]


def _row(executor: Executor, name: str, groups: Sequence[Sequence[Request]], rounds: int, target: Target | None) -> Row:
    """All groups, several times, with and without by turns."""
    ratios, rates, plain_rates = [], [], []
    same = compared = 0
    figures = []
    for turn in range(rounds):
        for number, group in enumerate(groups):
            plain = [replace(request, drafts=frozenset(), echo=()) for request in group]
            sides = (group, plain) if (turn + number) % 2 == 0 else (plain, group)
            outcomes = {side is group: answer(executor, side) for side in sides}
            ours, without = outcomes[True], outcomes[False]
            rates.append(ours.decoded / ours.seconds)
            plain_rates.append(without.decoded / without.seconds)
            ratios.append(rates[-1] / plain_rates[-1])
            figures.append(ours.statistics)
            same += sum(a == b for a, b in zip(ours.tokens, without.tokens, strict=True))
            compared += len(ours.tokens)
    counted = total(figures)
    note = (
        f"{counted.tokens_per_forward:.2f} tokens per forward, {counted.accepted} of {counted.drafted} right, "
        f"{same} of {compared} answers equal, ratios {min(ratios):.2f} to {max(ratios):.2f}"
    )
    row = compare(
        name, median(rates), median(plain_rates), "tok/s", "higher", peer_version=_WITHOUT, target=target, note=note
    )
    # Tasks differ more than turns do: the ratio is that of each task with itself.
    return replace(row, ratio=median(ratios))
