"""Owns `cache`: what the second turn of a long chat costs, from RAM, from the disk after a restart, and at the peer.

Both servers hold the same chats in turns, greedily, each chat with a history that nobody has seen. A second turn comes
when both have nothing left to do, since a person thinks longer than a state takes to be written. The peer keeps states
in memory alone, so after a restart it starts from nothing, as our cold turns do.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

from bench.chats import Chat, Ours, Side, Theirs
from bench.machine import peer_version
from bench.processes import Daemon, Peer
from bench.registry import Settings
from bench.stories import Messages, chat
from bench.table import Row, Target, compare
from bench.weights import exported
from mlxbc.aio import AsyncClient

_HISTORY_WORDS = 2955
"""With the template around them, 3,000 tokens."""
_ANSWER = 8
_DECODED = 160
_QUESTION = {"role": "user", "content": "Why?"}
_MOST_COMPUTED = 40
"""Tokens of a hit that nobody can have: the answer that the model did not give, and the question."""
_PATIENCE_S = 120.0


def run(settings: Settings) -> list[Row]:
    """Rows `cache/ram-vs-cold`, `cache/warm-vs-peer`, `cache/ssd-vs-cold` and `cache/decode-with-writes`."""
    with tempfile.TemporaryDirectory(prefix="mlxbc-bench-cache-") as scratch:
        figures = asyncio.run(_turns(settings, Path(scratch)))
        rates = asyncio.run(_rates(settings, Path(scratch)))
    return [*_turn_rows(figures), *_rate_rows(rates)]


@dataclass(slots=True)
class _Turns:
    """Seconds to the first piece of text, an entry per round.

    Attributes:
        cold: the first turn, whose history is new.
        warm: the second.
        restarted: the second after a restart.
        computed: tokens of the prompts of `warm` and `restarted` that were not restored. The peer doesn't say.
    """

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    restarted: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


async def _turns(settings: Settings, scratch: Path) -> tuple[_Turns, _Turns]:
    ours, theirs = _Turns(), _Turns()
    rounds = settings.pick(3, 1)
    words = settings.pick(_HISTORY_WORDS, 400)
    directory = scratch / "turns"
    histories: list[Messages] = []
    with Daemon(settings.model, cache=directory) as daemon, Peer(exported(settings.model)) as peer:
        daemon.await_ready()
        peer.await_ready()
        sides: dict[Side, _Turns] = {Ours(daemon.socket): ours, Theirs(peer.port): theirs}
        for side in sides:
            await side.hold(Chat(chat(60, secrets.token_hex(4), 0), 8))
        await _known(daemon)
        for round_ in range(rounds):
            first = chat(words, secrets.token_hex(4), round_)
            # What the model has answered doesn't matter: both sides find the question and not this.
            second: Messages = [*first, {"role": "assistant", "content": "I see."}, _QUESTION]
            for side, figures in sides.items():
                figures.cold.append((await side.hold(Chat(first, _ANSWER))).first)
            await _written(daemon)
            for side, figures in sides.items():
                held = await side.hold(Chat(second, _ANSWER))
                figures.warm.append(held.first)
                figures.computed.append(held.prompt - held.cached)
            histories.append(second)
        await _written(daemon)
    # For each chat a daemon of its own, so that nothing is in its memory.
    for second in histories:
        with Daemon(settings.model, cache=directory) as daemon:
            daemon.await_ready()
            side = Ours(daemon.socket)
            await side.hold(Chat(chat(60, secrets.token_hex(4), 0), 8))
            await _known(daemon)
            question: Messages = [*second[:-1], {"role": "user", "content": "How?"}]
            held = await side.hold(Chat(question, _ANSWER))
            ours.restarted.append(held.first)
            ours.computed.append(held.prompt - held.cached)
    if max(ours.computed) > _MOST_COMPUTED:
        raise RuntimeError(f"of second turns, {ours.computed} tokens were not restored: these were no hits")
    return ours, theirs


async def _rates(settings: Settings, scratch: Path) -> tuple[list[float], list[float]]:
    """Tokens per second while states are written behind, and where none are: the same chats, by turns.

    Token by token: how far two daemons have learnt to guess would differ by more than what writing takes.
    """
    writing: list[float] = []
    plain: list[float] = []
    words, answer = settings.pick(_HISTORY_WORDS // 2, 300), settings.pick(_DECODED, 24)
    with Daemon(settings.model, cache=scratch / "rates") as one, Daemon(settings.model) as two:
        for daemon in (one, two):
            daemon.await_ready()
            await Ours(daemon.socket).hold(Chat(chat(60, secrets.token_hex(4), 0), 8))
            await _known(daemon)
        for round_ in range(settings.pick(8, 1)):
            messages = chat(words, secrets.token_hex(4), round_)
            for daemon, rates in ((one, writing), (two, plain))[:: 1 if round_ % 2 else -1]:
                held = await Ours(daemon.socket, draft="off").hold(Chat(messages, answer))
                rates.append((len(held.arrivals) - 1) / (held.arrivals[-1] - held.arrivals[0]))
                await _written(daemon)
    return writing, plain


async def _known(daemon: Daemon) -> None:
    """Wait until it has found out which model it is."""
    async with AsyncClient(daemon.socket, client_name="bench") as client:
        began = perf_counter()
        while (await client.explain("x")).cached is None:
            _check(began)
            await asyncio.sleep(0.01)


async def _written(daemon: Daemon) -> None:
    """Wait until everything is on the disk."""
    async with AsyncClient(daemon.socket, client_name="bench") as client:
        began = perf_counter()
        while (await client.status()).running or (await client.cache()).pending:
            _check(began)
            await asyncio.sleep(0.01)


def _check(began: float) -> None:
    if perf_counter() - began > _PATIENCE_S:
        raise RuntimeError(f"the daemon was not done within {_PATIENCE_S:g} s")


def _turn_rows(figures: tuple[_Turns, _Turns]) -> list[Row]:
    ours, theirs = figures
    cold = median(ours.cold)
    this = "this daemon, cold"
    return [
        compare(
            *("cache/ram-vs-cold", median(ours.warm), cold, "s", "lower"),
            peer_version=this,
            target=Target("ratio", ">=", 50),
            note=f"first token of turn 2, history of 3,000 tokens, at most {max(ours.computed)} of its tokens computed",
        ),
        compare(
            *("cache/warm-vs-peer", median(ours.warm), median(theirs.warm), "s", "lower"),
            peer_version=peer_version(),
            target=Target("ratio", ">=", 1.5),
            note=f"cold: {cold:.1f} s ours, {median(theirs.cold):.1f} s theirs",
        ),
        compare(
            *("cache/ssd-vs-cold", median(ours.restarted), cold, "s", "lower"),
            peer_version=this,
            target=Target("ratio", ">=", 20),
            note="after a restart, where the peer starts from nothing",
        ),
    ]


def _rate_rows(rates: tuple[list[float], list[float]]) -> list[Row]:
    writing, plain = rates
    return [
        compare(
            *("cache/decode-with-writes", median(writing), median(plain), "tok/s", "higher"),
            peer_version="this daemon, nothing on disk",
            target=Target("ratio", ">=", 0.98),
            note="while the prompt's states are written behind",
        )
    ]
