"""Owns answering in a benchmark: requests through one executor, driven by hand, with what guessing did for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from bench.edits import Task
from bench.stories import Messages
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving
from mlxbcd.engine.scheduler import Iteration, Piece, Policy
from mlxbcd.methods.events import Drawn, Event, Failed, Speculated
from mlxbcd.plan.request import Request
from mlxbcd.spec.drafter import LOOKUP
from mlxbcd.spec.statistics import Statistics, total
from mlxbcd.state.geometry import Key
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer

_PIECE = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of some requests that ran together.

    Attributes:
        prompt_s: of their prompts, up to the first decode step.
        seconds: from there to the last token.
    """

    prompt_s: float
    seconds: float
    tokens: list[list[int]]
    statistics: Statistics

    @property
    def decoded(self) -> int:
        """Tokens that decoding made: the first of each comes from its prompt."""
        return sum(len(tokens) - 1 for tokens in self.tokens)


class Asking:
    """Makes requests of texts.

    Args:
        length: tokens of an answer.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
        self._length = length

    def edit(self, task: Task) -> Request:
        """A task with its source to be echoed."""
        source = tuple(self._tokenizer.encode(task.source, special=False))
        return replace(self.chat(task.messages), echo=(source,))

    def chat(self, messages: Messages) -> Request:
        """A conversation, with text that stands already looked up."""
        ids = self._tokenizer.encode(self._template.render(messages, {}), special=False)
        return Request(
            prompt=tuple(ids),
            max_tokens=self._length,
            eos=self._tokenizer.eos_ids,
            drafts=frozenset({LOOKUP}),
            kind="chat",
        )


def answer(executor: Executor, requests: Sequence[Request]) -> Outcome:
    """Run requests together, to the end of all."""
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

    came = perf_counter()
    for key, request in enumerate(requests):
        start: list[tuple[Key, Request]] = [(key, request)]
        for begin in range(0, len(request.prompt), _PIECE):
            width = min(_PIECE, len(request.prompt) - begin)
            piece = Piece(key, width, ends=begin + width == len(request.prompt))
            executor.iterate(Iteration(decode=False, piece=piece), start, (), take)
            start = []
    began = perf_counter()
    policy, costs, running = Policy(), Costs(), True
    while running:
        # As the scheduler lets them: no round is longer than others may have to wait.
        longest = policy.round_s(costs.step(len(requests)))
        report = executor.iterate(Iteration(decode=True, piece=None, step_s=longest), (), (), take)
        for count, step_s in report.steps:
            costs.saw_step(count, step_s)
        running = bool(report.running)
    seconds = perf_counter() - began
    executor.iterate(Iteration(decode=False, piece=None), (), [Leaving(key) for key in rows], take)
    return Outcome(began - came, seconds, list(rows.values()), total(list(statistics.values())))
