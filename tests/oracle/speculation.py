"""Owns running requests of one family through a group, with joins and leaves, and the tokens they draw without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxbcd.methods.autoregressive import Ahead, DecodeGroup, Row
from mlxbcd.methods.events import Drawn, Event, Failed, Speculated
from mlxbcd.methods.proposing import Speculation
from mlxbcd.methods.speculative import WIDEST, SpeculativeGroup
from mlxbcd.methods.step import RoundBuilder
from mlxbcd.model.forward import Forward, Group
from mlxbcd.model.taps import Taps
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.sampling.sampler import RowSampler, sample
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth
from mlxbcd.spec.drafter import Companion, Drafter
from mlxbcd.spec.echo import Echo
from mlxbcd.spec.statistics import Statistics
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, Rows, commit

CHUNK = 16
SAMPLINGS: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "seed": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5, "seed": 3},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": ((3, 2.0),), "seed": 4},
    {"logprobs": True, "top_logprobs": 2},
    {},
)


@dataclass(frozen=True)
class Subject:
    """A model behind its seams."""

    forward: Forward
    composition: Composition
    vocabulary: int


class Cheap(VerifyCosts):
    """Costs on a machine where a window costs next to nothing, so that whatever is proposed is verified."""

    def __init__(self) -> None:
        super().__init__({1: 1.0, WIDEST: 1.001})

    def saw_plain(self, rows: int, seconds: float) -> None:
        """It stays so."""

    def saw_round(self, rows: int, width: int, seconds: float) -> None:
        """It stays so."""


def requests(n: int, vocabulary: int, *, length: int, seed: int = 0, eos: Sequence[int] = ()) -> dict[Key, Request]:
    """Ragged requests whose prompts repeat themselves here and there, each with another way to draw."""
    rng = random.Random(seed)
    made: dict[Key, Request] = {}
    for key in range(n):
        phrase = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 7))]
        prompt = [*(phrase * 4)[: rng.randrange(1, 14)], rng.randrange(vocabulary), *phrase]
        made[key] = Request(
            prompt=tuple(prompt),
            max_tokens=length + 3 * (key % 3),
            eos=frozenset(eos),
            sampling=Sampling(**SAMPLINGS[key % len(SAMPLINGS)]),
        )
    return made


class Play:
    """A group and what it has told.

    Args:
        drafter: speculates if there is one or if `echo` is set.
        depth: of every round, or what adapts it.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        drafter: Drafter | None = None,
        depth: int | Depth = 4,
        echo: bool = False,
        ahead: Ahead = Ahead.BUILD,
        costs: VerifyCosts | None = None,
        rounds: RoundBuilder | None = None,
    ) -> None:
        self.subject = subject
        self.events: list[Event] = []
        self.drafter = drafter
        self.echo = echo
        self.group: DecodeGroup
        if drafter is None and not echo:
            self.group = DecodeGroup(subject.forward, Rows(subject.composition, widest=1), ahead)
        else:
            self.group = SpeculativeGroup(
                subject.forward,
                Rows(subject.composition, widest=WIDEST),
                ahead,
                costs=costs or Cheap(),
                rounds=rounds,
                drafter=drafter,
                depth=None if drafter is None else depth if isinstance(depth, Depth) else Depth(depth, VerifyCosts()),
            )

    def admit(self, key: Key, request: Request, sources: Sequence[Sequence[int]] = ()) -> None:
        """Process a prompt and let its row join."""
        forward, composition = self.subject.forward, self.subject.composition
        tokens = (*request.prompt, *request.forced)
        sampler = RowSampler(request.sampling, tokens, self.subject.vocabulary, len(request.forced))
        row = Row(key, request, sampler, drawn=len(request.forced))
        rows = Rows(composition, widest=CHUNK)
        commit(rows.prepare(join=[Joiner(key, COLD, len(tokens))]))
        taps, states = self.group.taps or Taps(forward), []
        for at in range(0, len(tokens), CHUNK):
            turn = rows.begin(min(CHUNK, len(tokens) - at))
            (tapped,) = taps.run([Group(mx.array([tokens[at : at + CHUNK]], dtype=mx.int32), turn.caches)])
            mx.eval(turn.arrays(), tapped)
            turn.resolve()
            states.append(tapped.read)
        (first,) = sample(forward.head(tapped.hidden[:, -1:])[:, -1], [row.sampler]).read()
        self.events.append(row.take(first))
        if row.ended:
            return
        self.group.settle(self.events.extend)
        joiner = Joiner(key, rows.read(key), len(tokens) + 1)
        if isinstance(self.group, SpeculativeGroup):
            speculation = Speculation(
                Echo(tokens, sources, own=not sources) if self.echo else None, drafts=self.drafter is not None
            )
            if speculation.echo is not None:
                speculation.echo.observe(first.token)
            self.group.join(row, joiner, speculation, companion=Companion.cold(tokens, mx.concatenate(states, axis=1)))
        else:
            self.group.join(row, joiner)

    def step(self, check: Callable[[Play], None] | None = None) -> None:
        self.group.step(self.events.extend)
        if check is not None:
            check(self)

    def run(self, requests: dict[Key, Request], *, together: int, check: Callable[[Play], None] | None = None) -> None:
        """Let requests join as places become free, a step apart, until all have ended."""
        waiting = list(requests.items())
        while waiting or len(self.group):
            if waiting and len(self.group) < together:
                self.admit(*waiting.pop(0))
            self.step(check)
        self.group.settle(self.events.extend)

    def tokens(self, key: Key) -> list[int]:
        assert not [event for event in self.events if isinstance(event, Failed) and event.key == key]
        return [event.sample.token for event in self.events if isinstance(event, Drawn) and event.key == key]

    def statistics(self, key: Key) -> Statistics:
        """What was told last of a row."""
        return [event for event in self.events if isinstance(event, Speculated) and event.key == key][-1].statistics


def alone(subject: Subject, request: Request) -> list[int]:
    """A request's tokens by plain decoding, with a group of its own."""
    play = Play(subject)
    play.run({0: request}, together=1)
    return play.tokens(0)
