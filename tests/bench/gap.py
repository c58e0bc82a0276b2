"""Owns `gap`: what four running answers notice when a 4,000-token prompt joins, and how soon the joiner begins.

The same on each server, one after the other in one run: our daemon, mlx-lm's server, and llama.cpp's if it is given.
Then our daemon with other settings of its decode gap, as a curve of what one side gains and the other loses.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.chats import Chat, Ours, Side, Theirs
from bench.machine import peer_version
from bench.processes import Daemon, LlamaCpp, Peer
from bench.registry import Settings
from bench.served import all_flowing
from bench.stats import gaps_during, percentile
from bench.stories import chat
from bench.table import Row, Target, compare
from bench.weights import exported
from mlxbc import paths
from mlxbcd.engine.costs import Costs

DECODERS = 4
WORDS = 3950
"""With the template around them, about 4,000 tokens."""
_ANSWER = 4
_UNDISTURBED = 24
"""Pieces of text that every decoder has had when the long prompt joins."""
_ENDLESS = 4000
_ATTEMPTS = 5
_CURVE_MS = (250, 500, 1000, 2000)


@dataclass(frozen=True, slots=True)
class Joined:
    """What one join did; seconds.

    Attributes:
        before, during: gaps between a decoder's pieces of text, until the joiner came and until its first token.
        first, total: of the joiner.
        alone: its first token on a server with nothing else to do; 0 where that was not asked.
    """

    before: list[float]
    during: list[float]
    first: float
    total: float
    alone: float
    prompt: int

    def __str__(self) -> str:
        p50, p95, worst = (percentile(self.during, at) * 1e3 for at in (0.5, 0.95, 1.0))
        still = percentile(self.before, 0.5) * 1e3
        return (
            f"before {still:.0f} ms; joining p50 {p50:.0f}, p95 {p95:.0f}, max {worst:.0f} ms; "
            f"first token {self.first:.1f} s, alone {self.alone:.1f} s, total {self.total:.1f} s"
        )


def run(settings: Settings) -> list[Row]:
    """Rows `gap/…`: ours beside each peer, the targets of our own, and the curve."""
    with Daemon(settings.model) as daemon:
        daemon.await_ready()
        ours = _told("ours", asyncio.run(_measure(Ours(daemon.socket), settings, alone=True)))
    costs = _learnt()
    with Peer(exported(settings.model)) as peer:
        peer.await_ready()
        theirs = _told("mlx-lm", asyncio.run(_measure(Theirs(peer.port), settings)))
    rows = [*_against("mlx-lm", ours, theirs, peer_version(), 40), *_own(ours, costs)]
    if settings.llama_server is not None and settings.gguf is not None:
        with LlamaCpp(settings.llama_server, settings.gguf) as llama:
            llama.await_ready()
            other = _told("llama.cpp", asyncio.run(_measure(Theirs(llama.port), settings)))
        rows += _against("llama.cpp", ours, other, f"llama.cpp, {settings.gguf.name}", 8)
    for gap_ms in settings.pick(_CURVE_MS, _CURVE_MS[1:2]):
        # Pieces may be as long as the gap, or every gap above the longest piece would be the same.
        more = ("--set", f"schedule.decode_gap_ms={gap_ms}", "--set", f"schedule.max_piece_ms={gap_ms}")
        with Daemon(settings.model, *more) as daemon:
            daemon.await_ready()
            point = _told(f"{gap_ms} ms", asyncio.run(_measure(Ours(daemon.socket), settings)))
        rows.append(
            compare(f"gap/curve/{gap_ms}ms", percentile(point.during, 0.95), None, "s", "lower", note=str(point))
        )
    return rows


def _told(name: str, joined: Joined) -> Joined:
    """The figures as they come, since a whole run takes long."""
    print(f"gap, {name}: {joined}", file=sys.stderr, flush=True)
    return joined


async def _measure(side: Side, settings: Settings, *, alone: bool = False) -> Joined:
    words = settings.pick(WORDS, 300)
    # Loads the model, and lets a scheduler learn what pieces of a prompt cost.
    await side.hold(Chat(chat(words // 4, secrets.token_hex(4), 0), 8))
    solo = 0.0
    if alone:
        solo = (await side.hold(Chat(chat(words, f"{secrets.token_hex(4)}solo", 99), _ANSWER))).first
    decoders, running = await _decoders(side, settings)
    try:
        joiner = Chat(chat(words, f"{secrets.token_hex(4)}long", 99), _ANSWER)
        await side.hold(joiner)
    finally:
        await _end(running)
    first = joiner.sent + joiner.first
    begun = max(decoder.arrivals[0] for decoder in decoders)
    before = [gap for each in decoders for gap in gaps_during(each.arrivals, begun, joiner.sent)]
    during = [gap for each in decoders for gap in gaps_during(each.arrivals, joiner.sent, first)]
    if not before or not during:
        raise RuntimeError("no decoder was still running when the long prompt joined")
    return Joined(before, during, joiner.first, joiner.ended - joiner.sent, solo, joiner.prompt)


async def _decoders(side: Side, settings: Settings) -> tuple[list[Chat], list[asyncio.Task[Chat]]]:
    """Four answers under way. Some chats end after a word, so it is tried with others."""
    for attempt in range(_ATTEMPTS):
        nonce = secrets.token_hex(4)
        decoders = [Chat(chat(12, f"{nonce}{seed}", seed), _ENDLESS) for seed in range(DECODERS)]
        running = [asyncio.create_task(side.hold(decoder)) for decoder in decoders]
        try:
            await all_flowing(decoders, running, settings.pick(_UNDISTURBED, 6))
            return decoders, running
        except RuntimeError:
            await _end(running)
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _end(running: Sequence[asyncio.Task[Chat]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _against(name: str, ours: Joined, theirs: Joined, version: str, times: float) -> list[Row]:
    def seconds(what: str, mine: float, other: float, target: Target | None = None, note: str = "") -> Row:
        return compare(f"gap/{name}/{what}", mine, other, "s", "lower", peer_version=version, target=target, note=note)

    same = f"prompts of {ours.prompt} and {theirs.prompt} tokens"
    return [
        seconds("p50", percentile(ours.during, 0.5), percentile(theirs.during, 0.5), note=f"theirs: {theirs}"),
        seconds("p95", percentile(ours.during, 0.95), percentile(theirs.during, 0.95)),
        seconds("max", max(ours.during), max(theirs.during), Target("ratio", ">=", times), same),
        seconds("ttft", ours.first, theirs.first),
        seconds("total", ours.total, theirs.total),
    ]


def _own(ours: Joined, costs: Costs | None) -> list[Row]:
    """What our own figures are held to: the formula, from the costs that the daemon measured and kept."""
    rows = [
        compare(
            "gap/first-token",
            ours.first / ours.alone,
            None,
            "x alone",
            "lower",
            target=Target("ours", "<=", 1.5),
            note=str(ours),
        )
    ]
    if costs is not None:
        # Not the gaps before the join: of text that comes in rounds of several tokens half of them are nothing.
        step = costs.step(DECODERS)
        piece = costs.gap_s(DECODERS, ours.prompt * 95 // 100, 0.0) - step
        allowed = max(0.1, 1.2 * (step + piece))
        formula = f"max(100 ms, 1.2 x (step {step * 1e3:.0f} ms + piece {piece * 1e3:.0f} ms)) = {allowed * 1e3:.0f} ms"
        p95 = percentile(ours.during, 0.95)
        rows.append(compare("gap/p95", p95, None, "s", "lower", target=Target("ours", "<=", allowed), note=formula))
    return rows


def _learnt() -> Costs | None:
    """What the daemon that has just stopped measured."""
    files: Sequence[Path] = sorted((paths.cache_dir() / "costs").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return Costs.restored(json.loads(files[-1].read_bytes())) if files else None
