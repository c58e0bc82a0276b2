"""Owns `spec`: tokens per second with speculation beside the same engine without it, on texts that copy and that don't.

Both sides run on one executor, in one process, on the same prompts, and take turns request by request. Their tokens are
compared: what differs but by a near tie would be a fault, so the note counts how many agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from bench import inprocess
from bench.edits import TASKS, Task
from bench.registry import Settings
from bench.stories import Messages
from bench.table import Row, Target, compare
from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.events import Drawn, Event, Failed, Speculated
from mlxbcd.plan.request import Request
from mlxbcd.spec.drafter import LOOKUP
from mlxbcd.spec.statistics import Statistics, total
from mlxbcd.state.geometry import Key
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer

_PIECE = 128
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
    """Rows `spec/copy/B=1`, `spec/copy/B=4`, `spec/edit/B=1` and `spec/chat/B=1`."""
    built = inprocess.built(settings.model)
    tokenizer = Tokenizer.load(settings.model)
    bench = _Bench(built.executor, tokenizer, settings.pick(256, 24))
    copying = [task for task in TASKS if task.copies]
    others = [task for task in TASKS if not task.copies]
    rounds = settings.pick(3, 1)
    if settings.quick:
        copying, others = copying[:1], others[:1]
    edits = [bench.edit(task) for task in copying]
    return [
        bench.row("spec/copy/B=1", [[one] for one in edits], rounds, Target("ratio", ">=", 3.0)),
        bench.row("spec/copy/B=4", _fours(edits), rounds, Target("ratio", ">=", 1.5)),
        bench.row("spec/edit/B=1", [[bench.edit(task)] for task in others], rounds, None),
        bench.row("spec/chat/B=1", [[bench.chat(chat)] for chat in CHATS], rounds, Target("ratio", ">=", 0.97)),
    ]


def _fours(requests: Sequence[Request]) -> list[list[Request]]:
    """Every request in the company of three others."""
    doubled = [*requests, *requests, *requests, *requests]
    return [doubled[at : at + 4] for at in range(len(requests))]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of some requests that ran together.

    Attributes:
        seconds: from the first decode step to the last token.
    """

    seconds: float
    tokens: list[list[int]]
    statistics: Statistics

    @property
    def decoded(self) -> int:
        """Tokens that decoding made: the first of each comes from its prompt."""
        return sum(len(tokens) - 1 for tokens in self.tokens)


class _Bench:
    """One executor, and requests to run on it."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer, length: int) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self._length = length

    def edit(self, task: Task) -> Request:
        """A task with its source to be echoed."""
        source = tuple(self._tokenizer.encode(task.source, special=False))
        return replace(self.chat(task.messages), echo=(source,))

    def chat(self, messages: Messages) -> Request:
        ids = self._tokenizer.encode(self._template.render(messages, {}), special=False)
        return Request(
            prompt=tuple(ids),
            max_tokens=self._length,
            eos=self._tokenizer.eos_ids,
            drafts=frozenset({LOOKUP}),
            kind="chat",
        )

    def row(self, name: str, groups: Sequence[Sequence[Request]], rounds: int, target: Target | None) -> Row:
        """All groups, several times, with and without by turns."""
        ratios, rates, plain_rates = [], [], []
        same = compared = 0
        figures = []
        for turn in range(rounds):
            for number, group in enumerate(groups):
                plain = [replace(request, drafts=frozenset(), echo=()) for request in group]
                sides = (group, plain) if (turn + number) % 2 == 0 else (plain, group)
                outcomes = {side is group: self._run(side) for side in sides}
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

    def _run(self, requests: Sequence[Request]) -> _Outcome:
        rows: dict[Key, list[int]] = {key: [] for key in range(len(requests))}
        statistics: dict[Key, Statistics] = {}

        def take(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Drawn):
                    rows[event.key].append(event.sample.token)
                elif isinstance(event, Speculated):
                    statistics[event.key] = event.statistics
                elif isinstance(event, Failed):
                    raise event.error

        executor = self._executor
        for key, request in enumerate(requests):
            start: list[tuple[Key, Request]] = [(key, request)]
            for begin in range(0, len(request.prompt), _PIECE):
                width = min(_PIECE, len(request.prompt) - begin)
                piece = Piece(key, width, ends=begin + width == len(request.prompt))
                executor.iterate(Iteration(decode=False, piece=piece), start, (), take)
                start = []
        began = perf_counter()
        while executor.iterate(Iteration(decode=True, piece=None), (), (), take).running:
            pass
        seconds = perf_counter() - began
        executor.iterate(Iteration(decode=False, piece=None), (), [Leaving(key) for key in rows], take)
        return _Outcome(seconds, list(rows.values()), total(list(statistics.values())))
