"""From the machine's size and the settings to budget and allocator; what is wired is decided once, at the start."""

from __future__ import annotations

import pytest
from test_doctor import Box

from mlxbcd.config.settings import Settings
from mlxbcd.engine.budget import GIB, limits
from mlxbcd.serve.allowance import Allowance


class Allocator:
    """What would tell MLX."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int | None]] = []

    async def __call__(self, everything: int, cache: int, wired: int | None) -> None:
        self.told.append((everything, cache, wired))


@pytest.mark.parametrize("gib", [8, 16, 24, 64])
async def test_the_budget_and_the_allocator_follow_the_machine(gib: int) -> None:
    allocator, allowance = Allocator(), Allowance(Settings(), Box(gib))
    assert allowance.budget.limit == limits(gib * GIB).budget, "known before the device is ready"
    recommended = gib * GIB // 3
    await allowance.take_effect(recommended, allocator)
    wanted = limits(gib * GIB, recommended)
    assert allocator.told == [(wanted.budget + wanted.cache, wanted.cache, None)]
    assert allowance.budget.limit == wanted.budget


async def test_weights_are_wired_once_if_asked_for_and_never_by_a_change_of_settings() -> None:
    allocator, allowance = Allocator(), Allowance(Settings(memory_wired="weights"), Box(64))
    await allowance.take_effect(40 * GIB, allocator)
    (_, _, wired) = allocator.told[0]
    assert wired is not None
    assert wired <= 0.9 * 40 * GIB
    await allowance.change(Settings(memory_wired="weights", memory_limit=20 * GIB))
    await allowance.change(Settings(memory_wired="weights", memory_limit=20 * GIB))
    assert [told[2] for told in allocator.told[1:]] == [None], "the same settings again change nothing"
    assert allocator.told[1][0] == 20 * GIB
