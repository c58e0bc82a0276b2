"""Owns `served`: what many users at once get from our daemon over its socket, beside mlx-lm's server over HTTP.

Both servers run for the whole time, and take turns in being used. Prompts are new in every round and the same for both
sides, so nobody's prefix cache helps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.chats import Chat, Ours, Side, Theirs
from bench.machine import peer_version
from bench.processes import Daemon, Peer
from bench.registry import Settings
from bench.stats import gaps_during, percentile
from bench.stories import chat
from bench.table import Row, Target, compare
from bench.weights import exported

_CROWD = (46, 80, 120, 170, 230, 300, 370, 434)
"""Words that each chat of the crowd is about: with the template around them, 91 to 479 tokens."""
_ANSWER = 64
_DECODERS = 4
_JOINER_WORDS = 1955
"""With the template, 2,000 tokens."""
_JOINER_ANSWER = 4
_FLOWING = 12
"""Pieces of text that every decoder has had when the long prompt joins."""
_ENDLESS = 2000


def run(settings: Settings) -> list[Row]:
    """Rows `served/ttft`, `served/total` and `served/gap`, and what stands behind them."""
    with Daemon(settings.model) as daemon, Peer(exported(settings.model)) as peer:
        daemon.await_ready()
        peer.await_ready()
        return asyncio.run(_run(Ours(daemon.socket), Theirs(peer.port), settings))


@dataclass(slots=True)
class _Figures:
    """One side's figures, an entry per round; times in seconds."""

    first: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    gap_median: list[float] = field(default_factory=list)
    gap_p95: list[float] = field(default_factory=list)
    gap_worst: list[float] = field(default_factory=list)
    joiner_first: list[float] = field(default_factory=list)
    outlasted: list[int] = field(default_factory=list)
    prompts: set[tuple[int, ...]] = field(default_factory=set)


async def _run(ours: Side, theirs: Side, settings: Settings) -> list[Row]:
    sides = {ours: _Figures(), theirs: _Figures()}
    for side in sides:
        # Loads the model, and lets our scheduler learn what pieces of a prompt cost.
        await side.hold(Chat(chat(60, secrets.token_hex(4), 0), 8))
    for _ in range(settings.pick(3, 1)):
        nonce = secrets.token_hex(4)
        for side, figures in sides.items():
            await _crowd(side, figures, nonce, settings)
    for _ in range(settings.pick(2, 1)):
        nonce = secrets.token_hex(4)
        for side, figures in sides.items():
            await _join(side, figures, nonce, settings)
    return _rows(sides[ours], sides[theirs])


async def _crowd(side: Side, figures: _Figures, nonce: str, settings: Settings) -> None:
    """Eight chats at once."""
    answer = settings.pick(_ANSWER, 8)
    chats = [
        Chat(chat(words, f"{nonce}{seed}", seed), answer)
        for seed, words in enumerate(settings.pick(_CROWD, _CROWD[:3]))
    ]
    await asyncio.gather(*(side.hold(one) for one in chats))
    wall = max(one.ended for one in chats) - min(one.sent for one in chats)
    figures.first.append(median(one.first for one in chats))
    figures.total.append(sum(one.generated for one in chats) / wall)
    figures.prompts.add(tuple(one.prompt for one in chats))


async def _join(side: Side, figures: _Figures, nonce: str, settings: Settings) -> None:
    """Four chats are being answered when one with a long prompt joins."""
    decoders = [Chat(chat(12, f"{nonce}{seed}", seed), _ENDLESS) for seed in range(_DECODERS)]
    running = [asyncio.create_task(side.hold(decoder)) for decoder in decoders]
    try:
        await all_flowing(decoders, running)
        joiner = Chat(chat(settings.pick(_JOINER_WORDS, 200), f"{nonce}long", 99), _JOINER_ANSWER)
        await side.hold(joiner)
        figures.outlasted.append(sum(not task.done() for task in running))
    finally:
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
    failures = [error for error in ended if isinstance(error, Exception)]
    if failures:
        raise failures[0]
    first = joiner.sent + joiner.first
    gaps = [gap for decoder in decoders for gap in gaps_during(decoder.arrivals, joiner.sent, first)]
    if not gaps:
        raise RuntimeError("no decoder was still running when the long prompt joined")
    figures.gap_median.append(median(gaps))
    figures.gap_p95.append(percentile(gaps, 0.95))
    figures.gap_worst.append(max(gaps))
    figures.joiner_first.append(joiner.first)
    # Rows that were hung up on leave between steps: a small chat ends only after a few of them.
    await side.hold(Chat(chat(5, f"{nonce}after", 0), 4))


async def all_flowing(decoders: Sequence[Chat], running: Sequence[asyncio.Task[Chat]], pieces: int = _FLOWING) -> None:
    """Wait until every decoder has had some text.

    Raises:
        RuntimeError: one ended before. If it failed, its own error is raised.
    """
    flowing = asyncio.gather(*(decoder.flowing(pieces) for decoder in decoders))
    first_of: list[asyncio.Future[Any]] = [flowing, *running]
    await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
    if not flowing.done():
        flowing.cancel()
        for task in running:
            if task.done():
                task.result()
        raise RuntimeError("a chat ended before the long prompt joined")


def _rows(ours: _Figures, theirs: _Figures) -> list[Row]:
    version = peer_version()

    def seconds(
        name: str, mine: Sequence[float], other: Sequence[float], target: Target | None = None, note: str = ""
    ) -> Row:
        return compare(name, median(mine), median(other), "s", "lower", peer_version=version, target=target, note=note)

    outlasted = min(*ours.outlasted, *theirs.outlasted)
    worst = f"worst while joining; {outlasted} of {_DECODERS} decoders outlasted that"
    return [
        seconds("served/ttft", ours.first, theirs.first, Target("ratio", ">=", 1 / 0.6), _same_prompts(ours, theirs)),
        compare(
            "served/total",
            median(ours.total),
            median(theirs.total),
            "tok/s",
            "higher",
            peer_version=version,
            target=Target("ratio", ">=", 1.2),
        ),
        seconds("served/gap", ours.gap_worst, theirs.gap_worst, Target("ratio", ">=", 20), worst),
        seconds("served/gap-p95", ours.gap_p95, theirs.gap_p95),
        seconds("served/gap-p50", ours.gap_median, theirs.gap_median),
        seconds("served/join-ttft", ours.joiner_first, theirs.joiner_first, note="the price of small gaps"),
    ]


def _same_prompts(ours: _Figures, theirs: _Figures) -> str:
    sizes = sorted({size for prompts in ours.prompts for size in prompts})
    same = "the same" if ours.prompts == theirs.prompts else "NOT the same"
    return f"prompts of {sizes[0]} to {sizes[-1]} tokens, {same} for both"
