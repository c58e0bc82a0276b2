"""Owns which resident models stay: one goes for lack of use, for another one's room, or when the system is short.

A model that somebody needs never goes. What can be made again goes first: prefix caches, then idle models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from mlxbcd.engine.budget import MemoryBudget
from mlxbcd.errors import ServeError, outline
from mlxbcd.residency.eviction import Candidate, Room, make_room

if TYPE_CHECKING:
    from mlxbcd.residency.resident import Resident

Shed: TypeAlias = Callable[[int], Awaitable[int]]
"""Frees up to so many bytes of what can be made again (a prefix cache); tells how many it has freed."""

PATIENCE_S: Final = 10.0
"""How long a model that has no room waits for busy ones to become idle by themselves, before they take no more."""

log = logging.getLogger(__name__)


class Keeper:
    """Decides over the models of one residency; belongs to the event loop's thread.

    Args:
        models: the resident ones, which others add and remove.
        let_go: lets one go that nobody needs; it isn't resident any more when this returns, and what it took is free
            when what it returns is done.
        leaving: told when a model takes no new requests any more, and when it does again.

    Attributes:
        default: the directory of the default model, once it is known.
        keep_alive: seconds that a model stays without being asked, unless it has its own.
        pin_default: the default model stays whatever happens.
        shedders: asked for memory before any model is dropped.
    """

    def __init__(
        self,
        models: Mapping[Path, Resident],
        budget: MemoryBudget,
        let_go: Callable[[Resident], asyncio.Task[None]],
        leaving: Callable[[Resident], None],
    ) -> None:
        self.budget = budget
        self.default: Path | None = None
        self.keep_alive = math.inf
        self.pin_default = True
        self.shedders: list[Shed] = []
        self._models = models
        self._let_go = let_go
        self._leaving = leaving
        self._one_by_one = asyncio.Lock()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._relieving: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Keeper({self.budget}, {len(self._models)} models)"

    # -- what holds for a model

    def pinned(self, resident: Resident) -> bool:
        """It stays whatever happens."""
        if resident.keep_alive is not None:
            return resident.keep_alive == math.inf
        return self.pin_default and resident.source.path == self.default

    def expires_s(self, resident: Resident) -> float:
        """Seconds until it goes for lack of use; `math.inf` for never. While it is busy that is its whole time."""
        if resident.keep_alive is not None:
            keep = resident.keep_alive
        else:
            keep = math.inf if self.pinned(resident) else self.keep_alive
        return keep if resident.busy else max(0.0, keep - (time.monotonic() - resident.used))

    # -- events

    def settle(self) -> None:
        """Something may have become idle, or idle for longer than it may; whoever waits for that looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        self._share()
        if self.budget.free < 0:
            self.relieve_soon(-self.budget.free)
        # No timer while everything stays for ever, which is the default.
        soonest = min((self.expires_s(one) for one in self._models.values() if not one.busy), default=math.inf)
        if soonest < math.inf:
            self._timer = asyncio.get_running_loop().call_later(soonest, self._expire)

    async def changed(self) -> None:
        """Wait until `settle` is called."""
        await self._changed.wait()

    def close(self) -> None:
        """Drop nothing more by itself."""
        self._closed = True
        self.settle()

    def _share(self) -> None:
        """Tell each engine what the states of its rows may come to need: all that nobody else holds or may need."""
        caches = self.budget.held(kind="prefix")
        movable = {path: self.budget.held(path) for path, one in self._models.items() if not self.pinned(one)}
        for path, resident in self._models.items():
            left = max(0, self.budget.free + self.budget.held(path, "kv"))
            most = left + caches + sum(movable.values()) - movable.get(path, 0)
            policy = resident.engine.policy
            if (policy.bytes_limit, policy.bytes_most) != (left, most):
                resident.engine.policy = replace(policy, bytes_limit=left, bytes_most=most)

    def _expire(self) -> None:
        for resident in list(self._models.values()):
            if not resident.busy and self.expires_s(resident) <= 0:
                log.info("dropping %s: idle for %.0f s", resident.name, time.monotonic() - resident.used)
                self._let_go(resident)
        self.settle()

    # -- room

    async def reserve(self, path: Path, name: str, needed: int, *, sure: bool, given_up: Callable[[], bool]) -> None:
        """Make room for a model of `needed` bytes and count them as taken.

        Waits for busy models if it has to. Unless it is `sure` how large the model is, it isn't refused here.

        Raises:
            ServeError: out_of_memory, there can be no room.
        """
        async with self._one_by_one:
            self.budget.forget(path)
            await self._make_room(name, needed, sure=sure, given_up=given_up)
            self.budget.measure(path, "weights", needed)
            self._share()

    async def _make_room(self, name: str, needed: int, *, sure: bool, given_up: Callable[[], bool]) -> None:
        patient_until = time.monotonic() + PATIENCE_S
        told: list[Resident] = []
        caches = self.budget.held(kind="prefix") if self.shedders else 0
        try:
            while not given_up() and (lacking := self.budget.lacks(needed)):
                room = self._plan(lacking - caches)
                if not room.enough and self._plan(lacking - caches - self._moving()).enough:
                    await self.changed()
                elif not room.enough:
                    if sure:
                        raise self._refusal(name, needed)
                    return
                elif caches:
                    caches = 0
                    await self.shed(lacking)
                elif room.drop:
                    await self._drop_all(room.drop, f"to make room for {name}")
                else:
                    if time.monotonic() >= patient_until:
                        told += self._tell_to_go(room.wait_for)
                    await self._wait_until(patient_until)
        finally:
            for resident in told:
                resident.leaving = False
                self._leaving(resident)
            self.settle()

    def _moving(self) -> int:
        """Bytes of models that are being loaded, and may have to go once they are, or are being dropped."""
        return self.budget.used - sum(map(self.budget.held, self._models)) - self.budget.held(kind="prefix")

    def _plan(self, lacking: int) -> Room:
        candidates = [
            Candidate(path, self.budget.held(path), one.used, one.busy, self.pinned(one))
            for path, one in self._models.items()
        ]
        return make_room(candidates, lacking)

    def _tell_to_go(self, paths: Iterable[object]) -> list[Resident]:
        """Have busy models take no new requests: a model that is always asked would keep all others out for ever."""
        going = [one for path in paths if isinstance(path, Path) and (one := self._models.get(path)) is not None]
        for resident in going:
            resident.leaving = True
            self._leaving(resident)
        self._share()
        return going

    async def _wait_until(self, patient_until: float) -> None:
        left = patient_until - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed(), left if left > 0 else None)

    async def _drop_all(self, paths: Iterable[object], why: str) -> None:
        for path in paths:
            resident = self._models.get(path) if isinstance(path, Path) else None
            if resident is not None and not resident.busy:
                log.info("dropping %s %s", resident.name, why)
                await asyncio.shield(self._let_go(resident))

    def _refusal(self, name: str, needed: int) -> ServeError:
        staying = [one for one in self._models.values() if self.pinned(one)]
        beside = f" beside {', '.join(one.name for one in staying)}, which stays" if staying else ""
        return ServeError(
            "out_of_memory",
            f"{name} takes {needed / 1e9:.2f} GB, and there is no room for it{beside}: all models may take "
            f"{self.budget.limit / 1e9:.2f} GB; choose a smaller one, or raise the setting memory.limit",
            needed=needed,
            limit=self.budget.limit,
        )

    # -- what can be made again

    def relieve_soon(self, wanted: int) -> None:
        """A request has to wait for `wanted` bytes: see whether anything can go for it, one thing at a time."""
        if self._relieving is None and not self._closed:
            self._relieving = asyncio.get_running_loop().create_task(self._relieve(wanted), name="relieve")

    async def _relieve(self, wanted: int) -> None:
        try:
            # A moment later: whoever has just ended may not have been counted yet.
            await asyncio.sleep(0)
            await self.relieve(wanted)
        finally:
            self._relieving = None

    async def shed(self, wanted: int) -> int:
        """Free up to `wanted` bytes without dropping a model; how many it were."""
        freed = 0
        for shed in self.shedders:
            if freed >= wanted:
                break
            try:
                freed += await shed(wanted - freed)
            except Exception as error:
                log.error("a cache could not be shed: %s", outline(error))
        return freed

    async def relieve(self, wanted: int) -> int:
        """Memory is short: free up to `wanted` bytes, prefix caches first and then idle models.

        Returns:
            Bytes that were freed.
        """
        freed = await self.shed(wanted)
        if freed:
            self.settle()
        idle = [one for one in self._models.values() if not one.busy and not self.pinned(one)]
        for resident in sorted(idle, key=lambda one: one.used):
            if freed >= wanted:
                break
            size = self.budget.held(resident.source.path)
            await self._drop_all([resident.source.path], "since memory is short")
            freed += size
        return freed
