"""Owns the work behind the sockets: it turns requests into resident models, tokens and frames.

Importing this module imports MLX: see `service`, which decides when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Final, TypeAlias

from mlxbc import wire
from mlxbcd.config.settings import Settings
from mlxbcd.device import Device
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.scheduler import Policy
from mlxbcd.errors import ServeError
from mlxbcd.machine import heap
from mlxbcd.machine.system import Machine, this_machine
from mlxbcd.model import allocator
from mlxbcd.model.blas import BlasReport
from mlxbcd.plan.freeze import check
from mlxbcd.residency.resident import Residency
from mlxbcd.serve import logs
from mlxbcd.serve.allowance import Allowance
from mlxbcd.serve.caching import Caches
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.contract import Fault, Job, Send, Work
from mlxbcd.serve.errands import Errand, Errands
from mlxbcd.serve.generation import HANDED_OVER, Generation
from mlxbcd.serve.jobs import FinishedJob, TaskJob
from mlxbcd.serve.manners import Manners
from mlxbcd.serve.preparing import Preparation
from mlxbcd.serve.priming import generation_of, primed
from mlxbcd.serve.prompts import Prompts, weight
from mlxbcd.serve.standing import Standing
from mlxbcd.serve.subscriptions import Changes, Subscription, Trace, Watch
from mlxbcd.text.workers import TextWorkers
from mlxbcd.trace import Tracer

Open: TypeAlias = Generation | TaskJob
Labour: TypeAlias = wire.Generate | wire.Prime | Errand
"""Requests that take time, and that a draining daemon waits for."""

log = logging.getLogger(__name__)

MOST_SUBSCRIPTIONS: Final = 256
"""Clients that may watch or trace."""


class LiveService:
    """Generation, tokens and models over one device thread."""

    def __init__(
        self,
        device: Device,
        configuration: Configuration,
        on_fatal: Fault,
        blas: BlasReport,
        machine: Machine | None = None,
    ) -> None:
        machine = machine or this_machine()
        self._device = device
        self._configuration = configuration
        self._settings = configuration.settings
        self._blas = blas
        self._on_fatal = on_fatal
        self._workers = TextWorkers(tidy=heap.give_back)
        self._allowance = Allowance(self._settings, machine.memory)
        self._tracer = Tracer()
        self._residency = Residency(device, self._workers, self._fault, self._allowance.budget, self._tracer)
        self._caches = Caches(self._settings)
        if (cache := self._caches.cache) is not None:
            self._residency.share_with("the prefix cache", lambda: cache.index.ram.bytes, cache.shed)
        self._manners = Manners(
            machine.power,
            machine.memory,
            self._residency.keeper,
            lambda: self._allowance.budget.limit,
            self._workers.offload,
            self._schedule,
        )
        self._prompts = Prompts(self._settings.prompts)
        self._preparation = Preparation(
            self._residency, self._caches, self._prompts, self._workers, self._manners.look, self._settings
        )
        self._standing = Standing(
            device, self._residency, self._caches, self._allowance, self._manners, configuration, blas
        )
        self._errands = Errands(device, self._residency, self._caches, self._preparation, self._standing, self._workers)
        self._changes = Changes()
        self._subscriptions: set[Subscription] = set()
        self._open: set[Open] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._warming: asyncio.Task[None] | None = None
        self._closing = False
        configuration.tell(self._take)

    def __repr__(self) -> str:
        return f"LiveService({len(self._open)} open, {self._residency!r})"

    # -- the contract

    @property
    def stuck(self) -> bool:
        """See `contract.Service.stuck`."""
        return self._standing.stuck

    def resident(self) -> list[str]:
        """Names of the resident models."""
        return [resident.name for resident in self._residency.models.values()]

    def submit(self, request: Work, reply: Send, client: str) -> Job:
        """See `contract.Service.submit`."""
        match request:
            case wire.Status():
                reply(self._status(request.id))
                return FinishedJob()
            case wire.Ps():
                reply(wire.ProcessList(id=request.id, models=self._standing.processes()))
                return FinishedJob()
            case wire.Config():
                reply(self._configuration.report(request.id))
                return FinishedJob()
            case wire.Watch():
                return self._subscribe(Watch(request, reply, self._subscriptions.discard, self._status, self._changes))
            case wire.Trace():
                return self._subscribe(Trace(request.id, reply, self._subscriptions.discard, self._tracer))
            case wire.Cache():
                reply(self._caches.report(request.id))
                return FinishedJob()
        if self._standing.draining:
            raise _stopping()
        if len(self._open) >= self._settings.queue:
            raise ServeError("queue_full", f"{self._settings.queue} requests are waiting or running; retry later")
        size = weight(request)
        self._prompts.check(size)
        job = self._start(request, reply, client)
        if job in self._open:
            self._prompts.hold(job, size)
        return job

    def _start(self, request: Labour, reply: Send, client: str) -> Job:
        match request:
            # The order matters: to explain a request is to make one of the same fields.
            case wire.Explain():
                return self._answer(request, reply)
            case wire.Generate():
                return self._generate(request, reply, client)
            case wire.Prime():
                return self._prime(request, reply, client)
            case _:
                return self._answer(request, reply)

    def reload(self) -> None:
        """See `contract.Service.reload`. What ends takes no other settings."""
        if not self._closing:
            self._configuration.reload()

    async def drain(self) -> None:
        """See `contract.Service.drain`."""
        self._standing.draining = True
        self._changes.poke()
        self._schedule()
        await self._idle.wait()

    async def close(self) -> None:
        """See `contract.Service.close`."""
        self._closing = self._standing.draining = True
        for job in (*self._open, *self._subscriptions):
            job.failed(_stopping())
        if self._warming is not None:
            self._warming.cancel()
        self._manners.rest()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._standing.faulted:
            await self._residency.close()
            await self._device.close()
        await self._caches.close(flush=not self._standing.faulted)
        await self._workers.close()

    def _take(self, settings: Settings) -> None:
        self._settings = settings
        self._prompts.limit = settings.prompts
        self._preparation.take(settings)
        self._residency.choose(default=settings.model, aliases=settings.aliases, drafts=settings.drafts)
        self._caches.choose(settings)
        self._manners.take(settings)
        self._schedule()
        keeper = self._residency.keeper
        keeper.keep_alive, keeper.pin_default = settings.keep_alive, settings.pin_default
        keeper.settle()
        self._background(self._allowance.change(settings))
        logs.set_level(settings.log_level)

    def _schedule(self) -> None:
        # The daemon's end waits for every request, so none rests then.
        background = self._manners.background or self._standing.draining
        self._residency.schedule(replace(_policy(self._settings), background=background))

    # -- start-up and faults

    def warm(self, *, preload: bool) -> None:
        """Bring MLX up on the device thread, then load the default model if asked to and if it is there."""
        self._caches.recover()
        self._warming = self._background(self._warm(preload))

    async def _warm(self, preload: bool) -> None:
        try:
            ready = await self._device.run(allocator.bring_up)
            await self._allowance.take_effect(ready.recommended, self._limit)
        except Exception as error:
            log.exception("MLX could not be started")
            self._fault(DeviceFault(f"MLX could not be started: {error}"))
            return
        self._standing.device_name = f"{ready.name} ({self._blas.kind})" if ready.name == "cpu" else ready.name
        if not preload:
            return
        try:
            async with self._residency.use(await self._residency.resolve(None)) as resident:
                await self._caches.adopt(resident)
        except ServeError as error:
            note = f"the default model was not loaded: {error.message}"
            log.warning("%s", note)
            self._standing.missing_default = note

    async def _limit(self, everything: int, cache: int, wired: int | None) -> None:
        await self._device.run(allocator.limit, everything, cache, wired)

    def _fault(self, fault: DeviceFault) -> None:
        self._standing.faulted = True
        self._on_fatal(fault)

    # -- jobs

    def _background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        return self._hold(task)

    def _hold(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _enter(self, job: Open) -> None:
        self._open.add(job)
        self._idle.clear()
        self._changes.poke()
        self._manners.watch()

    def _leave(self, job: Open) -> None:
        self._open.discard(job)
        self._prompts.hold(job, 0)
        self._changes.poke()
        if not self._open:
            self._manners.rest()
            self._idle.set()

    def _status(self, request_id: int) -> wire.StatusReport:
        return self._standing.report(request_id, sum(isinstance(job, Generation) for job in self._open))

    def _subscribe(self, subscription: Subscription) -> Subscription:
        if len(self._subscriptions) >= MOST_SUBSCRIPTIONS:
            raise ServeError("queue_full", f"{MOST_SUBSCRIPTIONS} clients watch or trace already; end one of them")
        self._subscriptions.add(subscription)
        subscription.begin()
        return subscription

    def _answer(self, request: Errand, reply: Send) -> TaskJob:
        job = TaskJob(request.id, reply, self._errands.work(request), self._leave)
        self._hold(job.task)
        self._enter(job)
        return job

    # -- generation

    def _generate(self, request: wire.Generate, reply: Send, client: str) -> Generation:
        if self._manners.refusal:
            raise ServeError("out_of_memory", self._manners.refusal)
        check(request)
        generation = Generation(request, reply, self._ended, client)
        self._enter(generation)
        generation.preparing(self._background(self._preparation.prepare(generation, client)))
        return generation

    def _prime(self, request: wire.Prime, reply: Send, client: str) -> Generation:
        asked = generation_of(request)
        check(asked)
        if not self._caches.wanted(asked):
            raise ServeError("bad_request", "there is no prefix cache to prime; see cache.mode in mlxbc config")
        return self._generate(asked, primed(reply), client)

    def _ended(self, generation: Generation) -> None:
        if generation.ended_with == HANDED_OVER:
            # The request goes on, and counts where it ends.
            self._leave(generation)
            self._residency.keeper.settle()
            return
        self._standing.count(generation)
        self._leave(generation)
        self._residency.keeper.settle()
        generation.log()
        generation.trace(self._tracer)


def _policy(settings: Settings) -> Policy:
    gap = settings.decode_gap_ms / 1e3 if settings.decode_gap_ms else None
    return Policy(max_rows=settings.max_rows, max_piece_s=settings.max_piece_ms / 1e3, decode_gap_s=gap)


def _stopping() -> ServeError:
    return ServeError("shutting_down", "the daemon is stopping; retry once it is back")
