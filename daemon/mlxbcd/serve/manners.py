"""Owns how the daemon behaves towards the machine: background work waits on battery, memory is given back when short.

The machine is asked only while requests are open, and at most every few seconds: an idle daemon has no timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeAlias

from mlxbcd.config.settings import Settings
from mlxbcd.errors import ServeError, outline
from mlxbcd.machine.memory import Memory, Pressure
from mlxbcd.machine.power import Condition, Power

PERIOD_S: Final = 5.0
"""How often the machine is asked while requests are open."""
SHARE: Final = 8
"""Of the budget, what is given back at once when the system is short; all that can be when it is at its end."""

_REFUSAL: Final = "the system is out of memory; close other programs, or unload a model (mlxbc ps), then retry"

Sample: TypeAlias = tuple[Condition, Pressure]
Offload: TypeAlias = Callable[[Callable[[], Sample]], Awaitable[Sample]]
"""Calls something that may wait for the hardware, away from the event loop."""

log = logging.getLogger(__name__)


class Relief(Protocol):
    """What can give memory back."""

    async def relieve(self, wanted: int) -> int:
        """Free up to so many bytes of what can be made again; how many it were."""

    def settle(self) -> None:
        """Look at what everything takes."""


class Manners:
    """Watches the machine for one daemon.

    Args:
        relief: asked for memory.
        limit: bytes that the daemon may take in all.
        changed: called when background requests may start again, or no more.

    Attributes:
        background: they may.
        reason: why not, for people; empty if they may.
        refusal: what new generations are told, if they are refused.
    """

    def __init__(
        self,
        power: Power,
        memory: Memory,
        relief: Relief,
        limit: Callable[[], int],
        offload: Offload,
        changed: Callable[[], None],
    ) -> None:
        self.background = True
        self.reason = ""
        self.refusal = ""
        self._power = power
        self._memory = memory
        self._relief = relief
        self._limit = limit
        self._offload = offload
        self._changed = changed
        self._yields: dict[str, bool] = {}
        self._open = False
        self._looked = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"Manners({self.reason or 'at ease'}, {'watching' if self._task is not None else 'idle'})"

    def take(self, settings: Settings) -> None:
        """Put settings into force; from the next look on."""
        self._yields = {
            "the machine runs on battery": settings.power_battery == "yield",
            "the machine saves power": settings.power_low_power == "yield",
            "the machine is hot": settings.power_thermal == "yield",
        }

    def watch(self) -> None:
        """Requests are open."""
        self._open = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="manners")

    def rest(self) -> None:
        """None are."""
        self._open = False
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def look(self) -> None:
        """Ask the machine, and act on the answer. One of the last few seconds does too."""
        if time.monotonic() - self._looked < PERIOD_S:
            return
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
        try:
            await asyncio.shield(self._looking)
        finally:
            if self._looking is not None and self._looking.done():
                self._looking = None

    async def _watch(self) -> None:
        while self._open:
            try:
                await self.look()
            except ServeError:  # shutting down
                return
            except Exception as error:
                log.error("the machine could not be asked how it is: %s", outline(error))
            await asyncio.sleep(max(0.1, self._looked + PERIOD_S - time.monotonic()))

    async def _look(self) -> None:
        condition, pressure = await self._offload(lambda: (self._power.condition(), self._memory.pressure()))
        self._looked = time.monotonic()
        self._heed(condition)
        await self._give_back(pressure)

    def _heed(self, condition: Condition) -> None:
        found = (condition.on_battery, condition.low_power, condition.hot)
        reasons = [why for (why, yields), holds in zip(self._yields.items(), found, strict=True) if holds and yields]
        self.reason = " and ".join(reasons)
        if self.background == bool(reasons):
            self.background = not reasons
            log.info("background requests %s", f"wait: {self.reason}" if reasons else "may start again")
            self._changed()

    async def _give_back(self, pressure: Pressure) -> None:
        self._relief.settle()
        if pressure is Pressure.NORMAL:
            self.refusal = ""
            return
        critical = pressure is Pressure.CRITICAL
        freed = await self._relief.relieve(self._limit() if critical else self._limit() // SHARE)
        if freed:
            log.warning("the system is short of memory: gave %.0f MB back", freed / 1e6)
        if critical and not freed:
            if not self.refusal:
                log.warning("the system is out of memory, and nothing is left to give back: new requests are refused")
            self.refusal = _REFUSAL
