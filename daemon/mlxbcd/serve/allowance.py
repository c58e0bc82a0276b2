"""Owns how much memory the daemon may take on this machine: from its size and the settings to the budget and MLX."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mlxbcd.config.settings import Settings
from mlxbcd.engine.budget import Limits, MemoryBudget, limits
from mlxbcd.machine.memory import Memory

Apply = Callable[[int, int, int | None], Awaitable[None]]
"""Has the allocator keep to these limits: everything, cache, wired."""


class Allowance:
    """The limits in force.

    Args:
        apply: see `Apply`.
        system: what tells the machine's size.

    Attributes:
        budget: what all models may take.
        limits: what the machine and the settings allow.
    """

    def __init__(self, settings: Settings, system: Memory) -> None:
        self.system = system
        self._settings = settings
        self._recommended = 0
        self._apply: Apply | None = None
        self.limits = self._wanted()
        self.budget = MemoryBudget(self.limits.budget)

    def __repr__(self) -> str:
        return f"Allowance({self.budget}, {self.limits})"

    async def take_effect(self, recommended: int, apply: Apply) -> None:
        """The device is ready: limit it. What is wired is decided here, once."""
        self._recommended, self._apply = recommended, apply
        await self._limit(wire=self._settings.memory_wired == "weights")

    async def change(self, settings: Settings) -> None:
        """The user allows another amount."""
        before, self._settings = self.limits, settings
        if self._wanted() != before:
            await self._limit(wire=False)

    async def _limit(self, *, wire: bool) -> None:
        self.limits = self._wanted()
        self.budget.limit = self.limits.budget
        if self._apply is not None:
            wired = self.limits.wired if wire else None
            await self._apply(self.limits.budget + self.limits.cache, self.limits.cache, wired)

    def _wanted(self) -> Limits:
        settings = self._settings
        return limits(self.system.total(), self._recommended, wanted=settings.memory_limit, cache=settings.memory_cache)
