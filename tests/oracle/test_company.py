"""Over the whole zoo: what a request draws does not depend on who shares its forwards, or on how its prompt was cut.

Random programs drive the executor as the scheduler may: requests come and are cancelled whenever they like, pieces have
any width up to the next planned end, alone or with those of others, steps come between them, in the same forward, or
don't. Each row is held to a run of its own.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.model.packed import Packer
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.sampling.noise import gumbel, key
from mlxbcd.state import packing
from oracle import coverage
from oracle.agreement import Tally
from oracle.families import FAMILIES, VOCABULARY, Family, load, small_classes
from oracle.probes import PASS

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from tiny import Driver

CHUNK = 12
"""Planned ends are multiples of this: three windows of eight positions wrap within a few chunks."""
_MOST_ROWS = 6
_REQUESTS = 10
_COMING = 3
"""Requests that may come at once."""
BATCHED = [name for name in FAMILIES if coverage.read()[name]["batch"] == PASS]


@dataclass
class Progress:
    """A request under way: prompt tokens processed, and whether it was told to leave."""

    request: Request
    position: int = 0
    cancelled: bool = False

    @property
    def left(self) -> int:
        return len(self.request.prompt) - self.position

    @property
    def to_planned_end(self) -> int:
        return min(CHUNK - self.position % CHUNK, self.left)


@dataclass
class Program:
    """Runs requests through one executor in an order that follows from a seed.

    Attributes:
        together: pieces may share forwards with each other and with steps.
    """

    family: Family
    seed: int
    ahead: Ahead
    together: bool
    tally: Tally = field(default_factory=Tally)

    def run(self) -> None:
        choose = random.Random(self.seed)
        driver = Driver(executor(self.family, self.ahead, packer(self.family.name) if self.together else None))
        coming = [a_request(choose) for _ in range(_REQUESTS)]
        under_way: dict[int, Progress] = {}
        for number in range(10_000):
            running = {row for row in driver.report.running if isinstance(row, int)}
            preparing = {row: one for row, one in under_way.items() if one.left and not one.cancelled}
            if not coming and not running and not preparing:
                break
            start, leave = [], []
            pieces: list[tuple[int, int, bool]] = []
            if coming and len(running) + len(preparing) < _MOST_ROWS and choose.random() < 0.5:
                for row in range(_COMING * number, _COMING * number + choose.randint(1, min(_COMING, len(coming)))):
                    request = coming.pop()
                    under_way[row] = preparing[row] = Progress(request)
                    start.append((row, request))
            if preparing and (start or choose.random() < 0.7):
                # A request that starts is one whose piece comes now.
                chosen = [row for row, _ in start] or [choose.choice(sorted(preparing))]
                if self.together and choose.random() < 0.5:
                    others = sorted(preparing.keys() - {*chosen})
                    chosen += choose.sample(others, choose.randint(0, len(others)))
                for row in chosen:
                    width = choose.randint(1, preparing[row].to_planned_end)
                    pieces.append((row, width, width == preparing[row].to_planned_end))
                    preparing[row].position += width
            came = {row for row, _ in start}
            if choose.random() < 0.08 and (candidates := sorted(running | (preparing.keys() - came))):
                gone = choose.choice(candidates)
                under_way[gone].cancelled = True
                leave.append(Leaving(gone))
                pieces = [piece for piece in pieces if piece[0] != gone]
            driver.step(
                decode=choose.random() < 0.8 or not pieces,
                piece=pieces[0] if pieces else None,
                beside=pieces[1:],
                packed=self.together and choose.random() < 0.5,
                start=start,
                leave=leave,
            )
        for row, one in under_way.items():
            self.check(f"{self.family.name}/{self.seed}/{row}", one, driver.tokens(row), driver.ends(row))

    def check(self, name: str, one: Progress, drawn: list[int], ends: list[str]) -> None:
        alone = solo(self.family, one.request)
        if not one.cancelled:
            assert ends == ["length"], (name, ends)
            assert len(drawn) == len(alone), name
        self.tally.compare(name, drawn, alone[: len(drawn)], lambda: scores(self.family, one.request, drawn))


def executor(family: Family, ahead: Ahead = Ahead.BUILD, packer: Packer | None = None) -> Executor:
    vocabulary = family.forward.head(family.forward.hidden(mx.array([[0]]), family.composition.make_stock())).shape[-1]
    return Executor(family.forward, family.composition, vocabulary, ahead, packer=packer)


@cache
def packer(name: str) -> Packer:
    """What runs a family's packed forwards: all that batch have one."""
    family = load(name)
    found = packing.inspect(family.forward, family.composition)
    assert found.packer is not None, str(found)
    return found.packer


def a_request(choose: random.Random) -> Request:
    length = choose.choice([1, 2, 5, CHUNK, CHUNK + 1, choose.randint(3, 40)])
    sampling = choose.choice(
        [
            Sampling(),
            Sampling(temperature=0.8, seed=choose.randrange(1000)),
            Sampling(temperature=1.0, top_k=20, seed=choose.randrange(1000)),
        ]
    )
    prompt = tuple(choose.randrange(VOCABULARY) for _ in range(length))
    return Request(prompt=prompt, max_tokens=choose.randint(1, 12), eos=frozenset(), sampling=sampling)


def solo(family: Family, request: Request) -> list[int]:
    """What a request draws with the executor to itself, its prompt in whole chunks."""
    driver = Driver(executor(family))
    one, start = Progress(request), [(0, request)]
    while one.left:
        width = one.to_planned_end
        one.position += width
        driver.step(decode=False, piece=(0, width, True), start=start, leave=[])
        start = []
    driver.finish()
    return driver.tokens(0)


def scores(family: Family, request: Request, drawn: list[int]) -> npt.NDArray[np.float64]:
    """The scores that each draw took the best of, from one forward of the zoo's own over the whole text."""
    text = [*request.prompt, *drawn[:-1]]
    logits = family.model(mx.array([text]))[0, len(request.prompt) - 1 :].astype(mx.float32)
    sampling = request.sampling
    if not sampling.greedy:
        keys = mx.array([key(sampling.seed, index) for index in range(len(drawn))], dtype=mx.uint32)
        noise = gumbel(keys, mx.arange(logits.shape[-1], dtype=mx.uint32))
        if sampling.top_k:
            floor = mx.sort(logits, axis=-1)[:, -sampling.top_k][:, None]
            logits = mx.where(logits >= floor, logits, -1e9)
        logits = logits / sampling.temperature + noise
    return np.array(logits, dtype=np.float64)


def run_programs(name: str, seeds: range) -> Tally:
    tally = Tally()
    with small_classes():
        for seed in seeds:
            program = Program(load(name), seed, list(Ahead)[seed % 2], together=seed // 2 % 2 == 0)
            program.run()
            tally.add(program.tally)
    return tally


@pytest.mark.parametrize("name", ["llama", "exaone4", "gemma2", "qwen3_5", "falcon_h1"])
def test_company_changes_nothing(name: str) -> None:
    """One family for each kind of layout."""
    tally = run_programs(name, range(2))
    assert tally.positions > 20
    assert len(tally.near_ties) <= 1, str(tally)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BATCHED)
def test_company_changes_nothing_in_any_family(name: str) -> None:
    tally = run_programs(name, range(8))
    assert tally.positions > 100
    assert len(tally.near_ties) <= 2, str(tally)
