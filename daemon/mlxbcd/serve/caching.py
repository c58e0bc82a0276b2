"""Owns what the service does with the prefix cache: having one, a part for each model, and what requests get of it.

Whatever blocks runs on two threads of its own: reading states back must not wait behind a text that is tokenised, nor
the other way round.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from mlxbc import wire
from mlxbc.paths import cache_dir
from mlxbcd.cache import sizes
from mlxbcd.cache.disk import Directory, Taken
from mlxbcd.cache.identity import Changed, Signatures, identity
from mlxbcd.cache.lookups import Explained, Lease
from mlxbcd.cache.service import PrefixCache, Space
from mlxbcd.cache.streams import Streams
from mlxbcd.cache.writer import Pace
from mlxbcd.config.settings import Settings
from mlxbcd.engine.costs import Costs
from mlxbcd.engine.engine import Activity
from mlxbcd.engine.scheduler import Policy
from mlxbcd.errors import outline
from mlxbcd.plan.request import Caching, Keep, Request
from mlxbcd.plan.resolve import Feature
from mlxbcd.plan.snapshots import boundaries
from mlxbcd.residency.build import Built
from mlxbcd.residency.resident import Resident
from mlxbcd.serve.resuming import Book, Recording, asked
from mlxbcd.text.stable import Stable

T = TypeVar("T")

log = logging.getLogger(__name__)

PATIENCE_S: Final = 4.0
"""How long the end of the daemon waits for what is still to be written."""
KEEP_S: Final = 60
"""How long a generation goes on without its client where the request does not say."""
_SOON_S: Final = 0.25
"""How long a request waits for the identity of a model that has just been loaded."""
_PACES: Final = {Activity.IDLE: Pace.FULL, Activity.BUSY: Pace.SLOW, Activity.INTERACTIVE: Pace.PAUSED}


@dataclass(frozen=True, slots=True)
class _Model:
    """A resident model, and its part of the cache once it is known."""

    built: Built
    space: asyncio.Future[Space | None]


class Caches:
    """The prefix cache of one daemon, seen from its service. Belongs to the event loop's thread.

    Attributes:
        cache: None where the settings switch it off.
        streams: records of generations that may be resumed; None where nothing is kept on the disk.
        book: generations that can be taken up again.
        trouble: why nothing is kept on the disk although it should be; empty if it is.
    """

    def __init__(self, settings: Settings) -> None:
        self.cache: PrefixCache | None = None
        self.streams: Streams | None = None
        self.trouble = ""
        self._mode = settings.cache_mode
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="mlxbcd-cache")
        self._active: dict[Path, Activity] = {}
        self._models: dict[Path, _Model] = {}
        self._recovery: asyncio.Future[None] | None = None
        self._closed = False
        ram = sizes.ram_for(sizes.memory()) if settings.cache_ram is None else settings.cache_ram
        if ram:
            directory = self._directory(settings)
            cap = 0
            if directory is not None:
                cap = settings.cache_disk or sizes.disk_for(directory.free(), directory.held())
                self.streams = Streams(directory.path.with_name("streams"))
            self.cache = PrefixCache(ram, directory, disk=cap, floor=settings.cache_free or 0)
        self.book = Book(self.streams)

    def __repr__(self) -> str:
        return f"Caches({self.cache}{', ' + self.trouble if self.trouble else ''})"

    @property
    def features(self) -> frozenset[Feature]:
        """What a plan may count on."""
        return frozenset({Feature.CHECKPOINTS} | ({Feature.PREFIX_CACHE} if self.cache is not None else set()))

    def choose(self, settings: Settings) -> None:
        """Put what can change into force."""
        self._mode = settings.cache_mode

    def recover(self) -> None:
        """Begin to take in what an earlier daemon left."""
        if self.cache is not None:
            self._recovery = asyncio.ensure_future(self._run(self._recover))

    def _recover(self) -> None:
        assert self.cache is not None
        self.cache.recover()
        if self.streams is not None:
            self.streams.collect()

    async def close(self, *, flush: bool) -> None:
        """Write what is still to be written, if there is anything that can be trusted. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for model in self._models.values():
            model.space.cancel()
        await self.book.close()
        if self.cache is not None:
            await self._run(self.cache.close, PATIENCE_S if flush else 0.0)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- models

    async def adopt(self, resident: Resident) -> Space | None:
        """The part of a resident model, None where it has none. A model seen for the first time has to be read: then
        its first requests go without."""
        built = resident.built
        if self.cache is None or not built.capabilities.restorable:
            return None
        known = self._models.get(resident.source.path)
        if known is None or known.built is not built:
            known = self._models[resident.source.path] = _Model(built, asyncio.ensure_future(self._identify(resident)))
            resident.engine.active = partial(self._see, resident.source.path)
        await asyncio.wait([known.space], timeout=_SOON_S)
        return known.space.result() if known.space.done() and not known.space.cancelled() else None

    async def _identify(self, resident: Resident) -> Space | None:
        """Find out which model it is, by its files' contents."""
        built, path = resident.built, resident.source.path
        assert self.cache is not None
        if self._recovery is not None:
            await asyncio.wait([self._recovery])
        space = await self._space(resident.name, path, built.files, built.traits, trimmable=built.trimmable)
        if space is None:
            return None
        if (drafts := built.companions) is not None:
            space.companions = await self._space(
                f"drafts for {resident.name}", drafts.directory, drafts.files, drafts.traits, trimmable=drafts.trimmable
            )
        # Read on the device thread at the next row's start; one reference, so there is nothing to tear.
        built.executor.reuse.space = space
        return space

    async def _space(
        self, whose: str, directory: Path, files: Signatures, traits: Mapping[str, object], *, trimmable: bool
    ) -> Space | None:
        assert self.cache is not None
        try:
            name = await self._run(identity, directory, files, traits, cache_dir() / "digests.json")
        except (Changed, OSError) as error:
            log.warning("states of %s are not kept: %s", whose, error)
            return None
        return self.cache.space(name, trimmable=trimmable)

    def _see(self, model: Path, activity: Activity) -> None:
        """An engine works, or not: writing to the disk stays out of its way."""
        self._active[model] = activity
        if activity is Activity.IDLE:
            del self._active[model]
        if self.cache is not None:
            order = list(_PACES)
            most = max(self._active.values(), key=order.index, default=Activity.IDLE)
            self.cache.set_pace(_PACES[most])

    # -- requests

    def wanted(self, request: wire.Generate) -> bool:
        """Whether a request has to do with the cache at all."""
        return self.cache is not None and self.mode(request) != "none"

    def mode(self, request: wire.Generate) -> wire.CacheMode:
        """Where a request's states may go."""
        return request.cache or self._mode

    def explain(self, space: Space, request: Request) -> Explained:
        """What a prompt would be restored from."""
        return space.explain((*request.prompt, *request.forced))

    def recording(
        self, space: Space | None, model: Path, asked_for: wire.Generate, request: Request, stream: str
    ) -> Recording:
        """What will be remembered of a generation."""
        name = str(model) if space is None else space.name
        keep_s = None
        if asked_for.on_disconnect == "keep":
            keep_s = KEEP_S if asked_for.keep_s is None else asked_for.keep_s
        on_disk = space is not None and self.mode(asked_for) == "disk"
        return Recording(self.book, stream, asked(name, request), request.forced, keep_s, on_disk=on_disk)

    def plan(
        self,
        space: Space | None,
        asked_for: wire.Generate,
        request: Request,
        stable: Stable,
        *,
        trimmable: bool,
        checkpoints: bool,
    ) -> Request:
        """The request with what it has to do with the cache.

        Args:
            space: None while it isn't known; it may be by the time the request has something to leave.
        """
        total = len(request.prompt) + len(request.forced)
        matched = reused = 0
        if not trimmable and space is not None:
            known = self.explain(space, request)
            matched, reused = min(known.matched, stable.length), known.disk
        caching = Caching(
            read=True,
            keep=Keep(self.mode(asked_for)),
            session=asked_for.session or "",
            shared=stable.shared,
            checkpoints=checkpoints,
        )
        ends = boundaries(
            total,
            stable=min(stable.length, len(request.prompt)),
            shared=stable.shared,
            matched=matched,
            reused=reused,
            trimmable=trimmable,
        )
        return dataclasses.replace(request, caching=caching, boundaries=ends)

    async def hold(self, space: Space, request: Request, costs: Costs, policy: Policy) -> Lease:
        """The prefix that a request will be restored from, read back from the disk where that is faster than anew."""
        ids = (*request.prompt, *request.forced)

        def worth(begin: int, end: int, seconds: float) -> bool:
            expected = expected_s(costs, policy, begin, end)
            return expected is None or seconds < expected

        session, companions = request.caching.session, space.companions if request.drafts else None
        beside = companions is not None and companions.on_disk(ids) > 0
        if not beside and not space.on_disk(ids):
            return space.take(ids, session, counted=False)

        def fetch() -> Lease:
            if companions is not None and beside:
                # Its row finds it in RAM when it joins, unless that has been needed for something else.
                companions.fetch(ids, worth, session, counted=False).release()
            return space.fetch(ids, worth, session)

        reading = asyncio.get_running_loop().run_in_executor(self._threads, fetch)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_release)
            raise
        except Exception as error:
            log.error("a cached state could not be read: %s", outline(error))
            return space.take(ids, session, counted=False)

    # -- people

    def report(self, request: int) -> wire.CacheReport:
        """What the cache holds, and how much it helped."""
        cache, mode = self.cache, self._mode
        if cache is None:
            return wire.CacheReport(id=request, mode="none", trouble=self.trouble)
        tier, index, counters = cache.tier, cache.index, cache.counters
        return wire.CacheReport(
            id=request,
            mode=mode,
            ram_bytes=index.ram.bytes,
            ram_limit=cache.ram,
            ram_entries=index.ram.nodes,
            disk_bytes=index.disk.bytes,
            disk_limit=tier.cap if tier is not None else 0,
            disk_entries=index.disk.nodes,
            directory=str(tier.directory.path) if tier is not None else "",
            pending=tier.writer.waiting if tier is not None else 0,
            leases=cache.leases,
            lookups=counters.lookups,
            hits=counters.hits,
            tokens=counters.tokens,
            reused=counters.reused,
            from_disk=counters.from_disk,
            evicted=counters.evicted,
            trouble=self.trouble or (tier.trouble if tier is not None else ""),
        )

    async def clear(self, request: int) -> wire.CacheCleared:
        """Empty it."""
        freed = await self._run(self.cache.clear) if self.cache is not None else 0
        streams = await self._run(self.streams.clear) if self.streams is not None else 0
        return wire.CacheCleared(id=request, bytes=freed, streams=streams)

    def notes(self) -> list[str]:
        """What a person should know."""
        return [self.trouble] if self.trouble else []

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _directory(self, settings: Settings) -> Directory | None:
        if settings.cache_disk == 0:
            return None
        path = settings.cache_directory or cache_dir() / "prefix"
        try:
            return Directory(path / "states")
        except Taken as error:
            self.trouble = f"the prefix cache keeps nothing on the disk: {error}"
        except OSError as error:
            self.trouble = f"the prefix cache can't use {path} ({error.strerror or error}), so it keeps nothing there"
        log.warning("%s", self.trouble)
        return None


def expected_s(costs: Costs, policy: Policy, begin: int, end: int) -> float | None:
    """Seconds that prompt tokens [begin, end) would take alone; None if nothing has been measured."""
    if not costs.widest:
        return None
    seconds, position = 0.0, begin
    while position < end:
        width = min(costs.width(policy.max_piece_s, position), end - position)
        seconds += costs.piece(width, position)
        position += width
    return seconds


def _release(reading: asyncio.Future[Lease]) -> None:
    """Nobody waits for it any more."""
    if not reading.cancelled() and reading.exception() is None:
        reading.result().release()
