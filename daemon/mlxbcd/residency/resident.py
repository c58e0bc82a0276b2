"""Owns resident models: loaded once however many ask, kept in memory while in use, dropped on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from mlxbcd.device import Device
from mlxbcd.engine.budget import MemoryBudget
from mlxbcd.engine.engine import Engine
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.packing import PackingRanges
from mlxbcd.engine.scheduler import Policy
from mlxbcd.errors import ServeError
from mlxbcd.model.load import expands
from mlxbcd.model.size import bytes_in_memory
from mlxbcd.residency import drafting, learned
from mlxbcd.residency.build import Built, build, given_up
from mlxbcd.residency.grammars import Grammars
from mlxbcd.residency.keeper import Keeper
from mlxbcd.residency.names import Resolved, resolve
from mlxbcd.residency.store import check_files
from mlxbcd.residency.words import Words
from mlxbcd.sampling.grammar import Vocabulary
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.text.template import ChatTemplate
from mlxbcd.text.tokenizer import Tokenizer
from mlxbcd.text.workers import TextWorkers
from mlxbcd.trace import Tracer

log = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
"""Takes (done, total) bytes, on the loop's thread."""

_UNLIMITED: Final = 1 << 62


@dataclass(slots=True)
class Resident:
    """A model in memory, with the engine that serves it.

    Attributes:
        grammars: those that its requests follow.
        loaded_s: seconds the load took.
        users: those who are about to use it: see `Residency.use`.
        keep_alive: seconds it stays without being asked, `math.inf` for ever; None is the daemon's setting.
        touched: when somebody last began or ended to use it, in seconds of the monotonic clock.
        leaving: it takes no new users, since another model waits for its room.
        draft: name of the model that drafts for it; empty if none does.
    """

    source: Resolved
    words: Words
    grammars: Grammars
    engine: Engine
    built: Built
    loaded_s: float
    users: int = 0
    keep_alive: float | None = None
    touched: float = field(default_factory=time.monotonic)
    leaving: bool = False
    draft: str = ""

    def __repr__(self) -> str:
        return f"Resident({self.name}, {self.built}, {self.engine.running} running, {self.users} users)"

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def used(self) -> float:
        """When it was last used, in seconds of the monotonic clock."""
        return max(self.touched, self.engine.last_active)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.words.tokenizer

    @property
    def template(self) -> ChatTemplate:
        return self.words.template

    @property
    def busy(self) -> bool:
        """Somebody needs it."""
        return bool(self.users or self.engine.running or self.engine.queued)


@dataclass(slots=True)
class _Loading:
    """A load in progress and everyone who waits for it.

    Attributes:
        given_up: nobody wants it any more; read by the device thread between groups of weights.
        done, total: bytes.
        loaded: the model, once it is there. Until a waiter has noticed, it counts as a user.
        room: bytes that it may take.
        draft: the model that drafts for it, once that is known.
    """

    source: Resolved
    task: asyncio.Task[None] = field(init=False)
    watchers: list[Progress] = field(default_factory=list)
    waiters: int = 0
    given_up: bool = False
    done: int = 0
    total: int = 0
    loaded: Resident | None = None
    room: int = 0
    draft: Resolved | None = None

    def __repr__(self) -> str:
        return f"_Loading({self.source.name}, {self.waiters} waiting{', given up' if self.given_up else ''})"

    def advance(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        for watcher in list(self.watchers):
            watcher(done, total)


class _NoRoom(Exception):
    """A model is larger than the room that was made for it; nothing of it has been read yet."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"{needed} bytes")
        self.needed = needed


class Residency:
    """The models of one daemon.

    Args:
        on_fault: told when the device can't be trusted any more.
        budget: None is one without bounds.
        tracer: told what the engines do.

    Attributes:
        models: the resident ones, by directory.
        budget: what they may take, and take.
        keeper: which of them stay.
    """

    def __init__(
        self,
        device: Device,
        workers: TextWorkers,
        on_fault: Callable[[DeviceFault], None],
        budget: MemoryBudget | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.models: dict[Path, Resident] = {}
        self.budget = budget or MemoryBudget(_UNLIMITED)
        self._tracer = tracer or Tracer()
        self.keeper = Keeper(self.models, self.budget, self._let_go, self._reschedule)
        self._default: str | None = None
        self._aliases: Mapping[str, str] = {}
        self._drafts: Mapping[str, str] = {}
        self._policy = Policy()
        self._device = device
        self._workers = workers
        self._on_fault = on_fault
        self._loading: dict[Path, _Loading] = {}
        self._leaving: dict[Path, asyncio.Task[None]] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"Residency({list(self.models.values())}, {list(self._loading.values())})"

    @property
    def loading(self) -> list[str]:
        """Names of the models that are being loaded."""
        return [loading.source.name for loading in self._loading.values()]

    def choose(
        self, *, default: str | None, aliases: Mapping[str, str], drafts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """From now on `None` asks for `default` (None: the embedded model), and `aliases` are names too.

        Args:
            drafts: by name of a model that of the one to draft for it; for those that are loaded from now on.
        """
        if (default, aliases) != (self._default, self._aliases):
            self.keeper.default = None
        self._default, self._aliases, self._drafts = default, aliases, drafts

    @property
    def progress(self) -> list[tuple[str, int, int]]:
        """Of each load: the model, bytes that were read, and all."""
        return [(one.source.name, one.done, one.total) for one in self._loading.values()]

    async def resolve(self, name: str | None) -> Resolved:
        """What `name` means here and now.

        Raises:
            ServeError: unknown_model; load_failed for a file that can't be imported.
        """
        found = await self._workers.offload(resolve, name or self._default, self._aliases)
        if name is None:
            self.keeper.default = found.path
        return found

    def find(self, source: Resolved) -> Resident | None:
        """The resident model of that source, if it is in memory."""
        return self.models.get(source.path)

    @contextlib.asynccontextmanager
    async def use(self, source: Resolved, progress: Progress | None = None) -> AsyncIterator[Resident]:
        """The resident model, loaded first if need be, and not unloaded inside the context.

        There is one load however many wait for it. A waiter that is cancelled leaves; when the last one has, the load
        is given up.

        Raises:
            ServeError: load_failed, shutting_down.
        """
        while (resident := self.models.get(source.path)) is None or resident.leaving:
            if resident is None:
                await self._wait(source, progress)
            else:
                await self.keeper.changed()
        # Nothing was awaited since it was found, so nobody can have unloaded it.
        resident.users += 1
        resident.touched = time.monotonic()
        try:
            yield resident
        finally:
            resident.users -= 1
            resident.touched = time.monotonic()
            self.keeper.settle()

    async def unload(self, source: Resolved) -> Resident:
        """Drop a model from memory. Once begun it goes on, even if the caller is cancelled.

        Raises:
            ServeError: bad_request, it isn't resident or is in use.
        """
        resident = self.models.get(source.path)
        if resident is None:
            raise ServeError("bad_request", f"{source.name} is not loaded; `mlxbc ps` lists what is")
        if resident.busy:
            raise ServeError("bad_request", f"requests run on {resident.name}; cancel them or wait, then unload it")
        await asyncio.shield(self._let_go(resident))
        return resident

    def _let_go(self, resident: Resident) -> asyncio.Task[None]:
        """See `Keeper`."""
        path = resident.source.path
        del self.models[path]
        leaving = asyncio.get_running_loop().create_task(self._close(resident), name=f"unload {resident.name}")
        self._leaving[path] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(path))
        return leaving

    def share_with(self, cache: str, held: Callable[[], int], shed: Callable[[int], int]) -> None:
        """Count what a cache holds, and have it free memory before a model or a request goes without.

        Args:
            held: bytes it holds; called on the loop's thread.
            shed: frees up to so many bytes and tells how many; called on the device thread.
        """

        async def shed_there(wanted: int) -> int:
            return await self._device.run(shed, wanted)

        self.budget.measure(cache, "prefix", held)
        self.keeper.shedders.append(shed_there)

    async def close(self) -> None:
        """Load nothing more, give up what is being loaded, and drop everything."""
        self._closed = True
        for loading in self._loading.values():
            loading.given_up = True
        self.keeper.close()
        changing = [*(loading.task for loading in self._loading.values()), *self._leaving.values()]
        await asyncio.gather(*changing, return_exceptions=True)
        while self.models:
            _, resident = self.models.popitem()
            await self._close(resident)

    async def _close(self, resident: Resident) -> None:
        await resident.engine.close()
        engine = resident.engine
        built = resident.built
        packing, verify = engine.packing or PackingRanges(), built.verify or VerifyCosts()
        known = learned.Learned(engine.costs, packing, engine.cohorts, verify, built.measured)
        await self._workers.offload(learned.remember, built.costs_at, known)
        await self._device.run(resident.built.close)
        if not self._closed:
            # Weights of a few megabytes each are pieces of the C library's heap, which keeps what it is given back.
            await self._workers.tidy()
        self.budget.forget(resident.source.path)
        self.keeper.settle()

    def schedule(self, policy: Policy) -> None:
        """Take settings of scheduling, for the models in memory too."""
        self._policy = policy
        for resident in self.models.values():
            self._reschedule(resident)
        self.keeper.settle()

    def _reschedule(self, resident: Resident) -> None:
        policy = self._policy_of(resident.built)
        # Whoever waits for its room would wait for its background rows too, if these rested.
        resident.engine.policy = replace(policy, background=policy.background or resident.leaving)

    def _policy_of(self, built: Built) -> Policy:
        return replace(self._policy, max_rows=1) if built.reason else self._policy

    # -- loading

    async def _wait(self, source: Resolved, progress: Progress | None) -> None:
        """Wait until something has changed about a model that isn't resident: load it, or let it leave first."""
        if (leaving := self._leaving.get(source.path)) is not None:
            await asyncio.wait([leaving])
            return
        loading = self._loading.get(source.path) or self._begin(source)
        if loading.given_up:
            # Its end is near, and the device does one thing at a time anyway.
            await asyncio.wait([loading.task])
            return
        loading.waiters += 1
        if progress is not None:
            loading.watchers.append(progress)
            if loading.total:
                progress(loading.done, loading.total)
        try:
            await asyncio.shield(loading.task)
        finally:
            loading.waiters -= 1
            if loading.loaded is not None:
                loading.loaded.users -= 1
            if progress is not None:
                loading.watchers.remove(progress)
            if not loading.waiters:
                loading.given_up = True
                self.keeper.settle()

    def _begin(self, source: Resolved) -> _Loading:
        if self._closed:
            raise ServeError("shutting_down", "the daemon is stopping; retry once it is back")
        loading = self._loading[source.path] = _Loading(source)
        loading.task = asyncio.get_running_loop().create_task(self._load(loading), name=f"load {source.name}")
        # If every waiter has left, nobody fetches its exception, which is no reason to warn.
        loading.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return loading

    async def _load(self, loading: _Loading) -> None:
        source, began = loading.source, time.monotonic()
        try:
            words, built = await self._read_into_room(loading)
            # Reading has left pieces as large as the model itself.
            await self._workers.tidy()
            known = await self._workers.offload(learned.recall, built.costs_at, built.verify)
            engine = Engine(
                self._device,
                built.executor,
                self._policy_of(built),
                self._on_fault,
                costs=known.costs,
                packing=None if built.apart else known.packing,
                cohorts=known.cohorts,
                shed=self.keeper.relieve_soon,
                tracer=self._tracer,
                name=source.name,
            )
            seconds = time.monotonic() - began
            self.budget.measure(source.path, "weights", built.bytes)
            self.budget.measure(source.path, "kv", lambda: engine.claimed)
            width = built.vocab_size
            grammars = Grammars(lambda: _vocabulary(words.tokenizer, width), self._workers)
            loading.loaded = resident = Resident(source, words, grammars, engine, built, seconds)
            resident.users = loading.waiters
            resident.draft = loading.draft.name if loading.draft is not None else ""
            self.models[source.path] = loading.loaded
            log.info("loaded %s in %.1f s: %r", source.name, seconds, built)
        finally:
            if source.path not in self.models:
                self.budget.forget(source.path)
            del self._loading[source.path]
            self.keeper.settle()

    async def _read_into_room(self, loading: _Loading) -> tuple[Words, Built]:
        """Make room for the model, and read it. Its size is told by its files first, and by its arrays before they are
        read: where the two differ it may have to make more room."""
        source = loading.source
        if self.keeper.default is None:
            with contextlib.suppress(ServeError):
                await self.resolve(None)
        await self._workers.offload(check_files, source.path)
        loading.draft = await self._workers.offload(drafting.chosen, source, self._drafts, self._aliases)
        expand = await self._device.run(expands)
        paths = [source.path, *([loading.draft.path] if loading.draft is not None else [])]
        sizes = [await self._workers.offload(partial(bytes_in_memory, path, expand=expand)) for path in paths]
        needed = sum(sizes)
        sure = False
        while True:
            await self.keeper.reserve(source.path, source.name, needed, sure=sure, given_up=lambda: loading.given_up)
            if loading.given_up:
                raise given_up(source.name)
            loading.room = needed + self.budget.free
            try:
                return await self._read(loading)
            except _NoRoom as larger:
                needed, sure = larger.needed, True

    async def _read(self, loading: _Loading) -> tuple[Words, Built]:
        """Tokenizer and weights, side by side: one needs a core, the other the disk. Either's failure ends both."""

        def give_up(text: asyncio.Future[Words]) -> None:
            if text.cancelled() or text.exception() is not None:
                loading.given_up = True

        def report(done: int, total: int) -> None:
            if total > loading.room:
                raise _NoRoom(total)
            self._device.tell(loading.advance, done, total)

        path = loading.source.path
        draft = loading.draft.path if loading.draft is not None else None
        text = asyncio.ensure_future(self._workers.offload(drafting.words, loading.source, loading.draft))
        text.add_done_callback(give_up)
        words, built = await asyncio.gather(
            text, self._device.run(build, path, report, lambda: loading.given_up, draft), return_exceptions=True
        )
        if isinstance(words, BaseException):
            if isinstance(built, Built):
                await self._device.run(built.close)
            raise words
        if isinstance(built, BaseException):
            raise built
        return words, built


def _vocabulary(tokenizer: Tokenizer, width: int) -> Vocabulary:
    return Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, width, tokenizer.eos_ids)
