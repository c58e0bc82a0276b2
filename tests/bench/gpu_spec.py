"""Owns the benchmark of speculative rounds on a GPU: real rounds over scripted proposals, beside plain decoding.

What each row is going to draw is known beforehand (`make_sure`). Each of its proposals is that token four times out of
five, by a seeded die, and a wrong one else; always four of them. So a round delivers 1 + 0.8 + 0.8² + 0.8³ + 0.8⁴ =
3.36 tokens per row on the average, whatever the model. Drafting itself costs nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import mlx.core as mx

from bench.gpu_model import Model, follower, prefilled
from bench.table import Row, Target, compare
from mlxbcd.methods.autoregressive import Ahead, DecodeGroup
from mlxbcd.methods.autoregressive import Row as DecodeRow
from mlxbcd.methods.compiled import CompiledSteps
from mlxbcd.methods.events import Drawn, Event
from mlxbcd.methods.speculative import SpeculativeGroup
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth
from mlxbcd.spec.drafter import Asked, Companion, Covered
from mlxbcd.spec.statistics import total
from mlxbcd.state.geometry import Key
from mlxbcd.state.rows import COLD, Joiner, PreparedChange, Rows

DEPTH = 4
RATE = 0.8
_NAME = "script"
_TARGETS = {("bf16", 1): 2.0, ("bf16", 8): 1.3}
_WARM, _BLOCKS = 2, 5
"""Blocks whose time isn't taken, in which both sides find out whether to compile; and those that count."""
_STEPS, _ROUNDS = 100, 30
"""Of a block each: about as many tokens, so that both sides' rows stay about equally long."""
_ENDLESS = 1_000_000
_ROOM = 1500
"""Positions of each row from the start: what growing costs is another question."""


@dataclass
class Script:
    """A drafter that knows what comes, and is wrong on purpose now and then."""

    model: Model
    name: str = _NAME
    reads_hidden: bool = False
    taps: Sequence[int] = ()
    nbytes: int = 0
    prepared: Sequence[PreparedChange] = ()
    _dice: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, rows: int, depth: int) -> float:
        """Nothing."""
        return 0.0

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> Script:
        """Nothing is kept of a row."""
        return self

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        """What follows each row's pending token, one in five of them wrong."""
        return [self._line(row.pending, depth) for row in rows]

    def commit(self, covered: Sequence[Covered] = (), hidden: mx.array | None = None) -> None:
        """Nothing to follow."""

    def capture(self, key: Key) -> Companion:
        """Nothing."""
        return Companion(COLD, [])

    def discard(self) -> None:
        """Nothing to let go."""

    def _line(self, token: int, depth: int) -> list[int]:
        line = []
        for _ in range(depth):
            token = follower(self.model, token)
            wrong = self._dice.random() >= RATE
            line.append((token + 1) % self.model.vocab_size if wrong else token)
        return line


class Side:
    """Rows in a group of ours, and the tokens that they have drawn."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]], group: DecodeGroup, drafts: bool) -> None:
        self.model = model
        self.prompts = prompts
        self.group = group
        self.tokens: list[list[int]] = [[] for _ in prompts]
        for key, prompt in enumerate(prompts):
            rows = prefilled(model, key, prompt)
            drafters = frozenset([_NAME] if drafts else [])
            request = Request(prompt=tuple(prompt), max_tokens=_ENDLESS, eos=frozenset(), drafts=drafters)
            sampler = RowSampler(request.sampling, request.prompt, model.vocab_size)
            group.join(DecodeRow(key, request, sampler, pending=prompt[-1]), Joiner(key, rows.read(key), _ROOM))

    def seconds_per_step(self, steps: int) -> float:
        """Seconds of each of so many steps or rounds."""
        began = perf_counter()
        for _ in range(steps):
            self.group.step(self._take)
        mx.synchronize()
        return (perf_counter() - began) / steps

    def expected(self) -> tuple[int, int]:
        """How many of the tokens drawn are the ones that were to come, of how many."""
        right = 0
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            before = [prompt[-1], *tokens[:-1]]
            right += sum(follower(self.model, last) == token for last, token in zip(before, tokens, strict=True))
        return right, sum(map(len, self.tokens))

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Drawn):
                self.tokens[int(str(event.key))].append(event.sample.token)


def speculation(model: Model, prompts: Sequence[Sequence[int]], ahead: Ahead) -> Row:
    """One row: tokens per second with rounds, beside plain decoding of the same prompts by turns.

    Args:
        model: one that was made sure.
    """
    batch = len(prompts)
    steps = CompiledSteps(model.forward)
    plain = Side(model, prompts, DecodeGroup(model.forward, Rows(model.composition, widest=1), ahead, steps), False)
    costs = VerifyCosts()  # not known, so drafts are always as deep as can be
    state = Rows(model.composition, widest=DEPTH + 1)
    compiled = CompiledSteps(model.forward)
    group = SpeculativeGroup(
        model.forward, state, ahead, costs=costs, drafter=Script(model), depth=Depth(DEPTH, costs), rounds=compiled
    )
    rounds = Side(model, prompts, group, True)
    sides = ((rounds, _ROUNDS), (plain, _STEPS))
    for side, count in sides:
        side.seconds_per_step(_WARM * count)
    times: dict[Side, list[float]] = {side: [] for side, _ in sides}
    for turn in range(_BLOCKS):
        for side, count in sides if turn % 2 else sides[::-1]:
            times[side].append(side.seconds_per_step(count))
    round_s, step_s = median(times[rounds]), median(times[plain])
    statistics = total([group.statistics(key) for key in range(batch)])
    (right, drawn), (plain_right, plain_drawn) = rounds.expected(), plain.expected()
    limit = _TARGETS.get((model.name, batch))
    row = compare(
        f"gpu/{model.name}/spec/B={batch}",
        batch * statistics.tokens_per_forward / round_s,
        batch / step_s,
        "tok/s",
        "higher",
        peer_version="plain decoding of ours",
        target=None if limit is None else Target("ratio", ">=", limit),
        note=f"{statistics.tokens_per_forward:.2f} tokens per row and forward, "
        f"{statistics.accepted} of {statistics.drafted} proposals taken; a round takes "
        f"{1e3 * round_s:.1f} ms ({_how(compiled)}), a plain step "
        f"{1e3 * step_s:.1f} ({_how(steps)}, {ahead.value} ahead); "
        f"{right} of {drawn} and {plain_right} of {plain_drawn} tokens as they had to be",
    )
    for side, _ in sides:
        side.group.discard()
    mx.clear_cache()
    return row


def _how(steps: CompiledSteps) -> str:
    return "compiled" if steps.off is None else f"eager: {steps.off.value}"
