"""Owns the compiled grammars of one model: each is compiled once however many ask, off the loop, and then kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from mlxbcd.errors import ServeError
from mlxbcd.sampling.grammar import Grammar, Vocabulary
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.text.workers import TextWorkers

PATIENCE_S: Final = 10.0
"""Seconds a request waits for its grammar. Compiling can't be stopped, but it ends by limits of its own."""
_MOST_KEPT: Final = 64
_MOST_CHARACTERS: Final = 1024 * 1024
"""Of all kept grammars together. One takes up to a hundred times its text in memory, most take far less."""


class Grammars:
    """Compiles and keeps. Used from one event loop.

    Args:
        vocabulary: makes the model's vocabulary, which takes long enough to be put off until somebody needs it. It may
            raise ServeError.
        patience: seconds a request waits.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], workers: TextWorkers, *, patience: float = PATIENCE_S
    ) -> None:
        self._make = vocabulary
        self._workers = workers
        self._patience = patience
        self._vocabulary: asyncio.Task[Vocabulary] | None = None
        self._compiling: dict[Source, asyncio.Task[Grammar]] = {}
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()

    def __repr__(self) -> str:
        return f"Grammars({len(self._kept)} kept, compiling {list(self._compiling)})"

    async def get(self, source: Source) -> Grammar:
        """The grammar of a source.

        Raises:
            ServeError: grammar_invalid, with the place; bad_request, the model's tokenizer can't follow any.
        """
        if (kept := self._kept.get(source)) is not None:
            self._kept.move_to_end(source)
            return kept
        task = self._compiling.get(source)
        if task is None:
            task = self._compiling[source] = asyncio.ensure_future(self._compile(source))
            task.add_done_callback(_heard)
        done, _ = await asyncio.wait([task], timeout=self._patience)
        if not done:
            raise ServeError(
                "grammar_invalid",
                f"the {source.kind} has not been compiled after {self._patience:g} s; simplify it",
            )
        return task.result()

    async def _compile(self, source: Source) -> Grammar:
        try:
            if self._vocabulary is None or (self._vocabulary.done() and _failed(self._vocabulary)):
                self._vocabulary = asyncio.ensure_future(self._workers.offload_stubborn(self._make))
                self._vocabulary.add_done_callback(_heard)
            vocabulary = await asyncio.shield(self._vocabulary)
            grammar = await self._workers.offload_stubborn(lambda: vocabulary.compile(source))
        finally:
            del self._compiling[source]
        self._kept[source] = grammar
        while len(self._kept) > _MOST_KEPT or sum(len(kept.text) for kept in self._kept) > _MOST_CHARACTERS:
            self._kept.popitem(last=False)
        return grammar


def _failed(task: asyncio.Task[Vocabulary]) -> bool:
    return task.cancelled() or task.exception() is not None


def _heard(task: asyncio.Task[Grammar] | asyncio.Task[Vocabulary]) -> None:
    """If everyone who waited has left, nobody fetches its exception, which is no reason to warn."""
    if not task.cancelled():
        task.exception()
