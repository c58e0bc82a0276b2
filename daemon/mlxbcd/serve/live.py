"""Owns the work behind the sockets: it turns requests into resident models, tokens and frames.

Importing this module imports MLX: see `service`, which decides when.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeAlias

import mlxbcd
from mlxbc import wire
from mlxbcd.cache.service import Lease, Space
from mlxbcd.config.settings import Settings
from mlxbcd.device import Device
from mlxbcd.engine.faults import DeviceFault
from mlxbcd.engine.runner import Report
from mlxbcd.engine.scheduler import Policy, planned_chunks
from mlxbcd.errors import ServeError
from mlxbcd.machine import heap
from mlxbcd.machine.system import Machine, this_machine
from mlxbcd.model import allocator
from mlxbcd.model.blas import BlasReport
from mlxbcd.model.probe import probe
from mlxbcd.plan.freeze import check, check_text, freeze, needs
from mlxbcd.plan.request import Request
from mlxbcd.plan.resolve import Feature, Plan, resolve
from mlxbcd.residency.names import Resolved, listing
from mlxbcd.residency.resident import Residency, Resident
from mlxbcd.serve import logs
from mlxbcd.serve.allowance import Allowance
from mlxbcd.serve.caching import Caches, expected_s
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.contract import Fault, Job, Send, Work
from mlxbcd.serve.explaining import plan_reply
from mlxbcd.serve.generation import HANDED_OVER, PROGRESS_S, Generation
from mlxbcd.serve.jobs import FinishedJob, TaskJob, internal
from mlxbcd.serve.manners import Manners
from mlxbcd.serve.metrics import Metrics
from mlxbcd.serve.priming import generation_of, primed
from mlxbcd.serve.prompting import Prompt, Prompter, max_tokens
from mlxbcd.serve.prompts import TOKEN_BYTES, Prompts, weight
from mlxbcd.serve.resuming import Recording
from mlxbcd.serve.subscriptions import Changes, Subscription, Trace, Watch
from mlxbcd.text.workers import TextWorkers
from mlxbcd.trace import Tracer

Open: TypeAlias = Generation | TaskJob
Labour: TypeAlias = (
    wire.Explain
    | wire.Generate
    | wire.Prime
    | wire.CacheClear
    | wire.Tokenize
    | wire.Count
    | wire.Models
    | wire.Load
    | wire.Probe
    | wire.Unload
)
"""Requests that take time, and that a draining daemon waits for."""

log = logging.getLogger(__name__)

BUSY_S: Final = 10.0
"""A device job that takes longer is worth a note in `status`."""
STUCK_S: Final = 60.0
"""One that takes longer than this, and isn't a load, may never return."""
_GOOD_ENDS: Final = frozenset({"stop", "length", "cancelled", "superseded", "deadline"})
ENABLED: Final[frozenset[Feature]] = frozenset(
    {Feature.INFILLING, Feature.DRAFTS, Feature.ECHO, Feature.GRAMMAR_PROPOSALS}
)
"""Features that this daemon has."""


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
        self._missing_default = ""
        self._blas = blas
        self._on_fatal = on_fatal
        self._workers = TextWorkers(tidy=heap.give_back)
        self._prompter = Prompter(self._workers, self._settings.fim)
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
        self._metrics = Metrics()
        self._prompts = Prompts(self._settings.prompts)
        self._changes = Changes()
        self._subscriptions: set[Subscription] = set()
        self._open: set[Open] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._warming: asyncio.Task[None] | None = None
        self._draining = False
        self._faulted = False
        self._began = time.monotonic()
        self._served = 0
        self._failed = 0
        self._generated = 0
        self._drafted = self._accepted = 0
        self._device_name = "starting"
        configuration.tell(self._take)

    def __repr__(self) -> str:
        return f"LiveService({len(self._open)} open, {self._residency!r})"

    # -- the contract

    @property
    def stuck(self) -> bool:
        """See `contract.Service.stuck`."""
        return self._device.busy_s > STUCK_S and not self._residency.loading

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
                reply(wire.ProcessList(id=request.id, models=self._processes()))
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
        if self._draining:
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
            case wire.Explain():
                check(request)
                return self._answer(request.id, reply, lambda job: self._explain(request, job))
            case wire.Generate():
                return self._generate(request, reply, client)
            case wire.Prime():
                return self._prime(request, reply, client)
            case wire.CacheClear():
                return self._answer(request.id, reply, self._clear)
            case wire.Tokenize() | wire.Count():
                check_text(request)
                return self._answer(request.id, reply, lambda job: self._tokenize(request, job))
            case wire.Models():
                return self._answer(request.id, reply, lambda job: self._models(request, job))
            case wire.Load():
                return self._answer(request.id, reply, lambda job: self._load(request, job))
            case wire.Probe():
                return self._answer(request.id, reply, lambda job: self._probe(request, job))
            case wire.Unload():
                return self._answer(request.id, reply, lambda job: self._unload(request, job))

    def reload(self) -> None:
        """See `contract.Service.reload`."""
        self._configuration.reload()

    async def drain(self) -> None:
        """See `contract.Service.drain`."""
        self._draining = True
        self._changes.poke()
        self._schedule()
        await self._idle.wait()

    async def close(self) -> None:
        """See `contract.Service.close`."""
        self._draining = True
        for job in (*self._open, *self._subscriptions):
            job.failed(_stopping())
        if self._warming is not None:
            self._warming.cancel()
        self._manners.rest()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._faulted:
            await self._residency.close()
            await self._device.close()
        await self._caches.close(flush=not self._faulted)
        await self._workers.close()

    def _take(self, settings: Settings) -> None:
        self._settings = settings
        self._prompts.limit = settings.prompts
        self._prompter = Prompter(self._workers, settings.fim)
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
        background = self._manners.background or self._draining
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
        self._device_name = f"{ready.name} ({self._blas.kind})" if ready.name == "cpu" else ready.name
        if not preload:
            return
        try:
            async with self._residency.use(await self._residency.resolve(None)) as resident:
                await self._caches.adopt(resident)
        except ServeError as error:
            note = f"the default model was not loaded: {error.message}"
            log.warning("%s", note)
            self._missing_default = note

    async def _limit(self, everything: int, cache: int, wired: int | None) -> None:
        await self._device.run(allocator.limit, everything, cache, wired)

    def _fault(self, fault: DeviceFault) -> None:
        self._faulted = True
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

    def _subscribe(self, subscription: Subscription) -> Subscription:
        if len(self._subscriptions) >= MOST_SUBSCRIPTIONS:
            raise ServeError("queue_full", f"{MOST_SUBSCRIPTIONS} clients watch or trace already; end one of them")
        self._subscriptions.add(subscription)
        subscription.begin()
        return subscription

    def _answer(self, request_id: int, reply: Send, work: Callable[[TaskJob], Awaitable[None]]) -> TaskJob:
        job = TaskJob(request_id, reply, work, self._leave)
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
        generation.preparing(self._background(self._prepare(generation, client)))
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
        if generation.ended_with in _GOOD_ENDS:
            self._served += 1
        else:
            self._failed += 1
        self._generated += generation.generated
        self._drafted += generation.usage.drafted
        self._accepted += generation.usage.accepted
        self._leave(generation)
        self._residency.keeper.settle()
        generation.log()
        generation.trace(self._tracer)
        self._metrics.see(generation.ended_with or "", generation.usage, generation.clock.timings())

    async def _prepare(self, generation: Generation, client: str) -> None:
        """Everything before the engine: the model, the template, the tokens, the frozen request."""
        try:
            await self._admit(generation, client)
        except ServeError as error:
            generation.failed(error)
        except Exception as error:
            generation.failed(internal(error))

    async def _admit(self, generation: Generation, client: str) -> None:
        request = generation.wire
        if request.priority == "background":
            await self._manners.look()
        source = await self._residency.resolve(request.model)
        seed = request.seed if request.seed is not None else secrets.randbits(52)
        stream = request.resume.stream if request.resume is not None else secrets.token_hex(16)
        known = self._residency.find(source)
        position = known.engine.queued if known is not None else 0
        logs.request_id.set(stream)
        generation.accept(wire.Accepted(id=request.id, stream=stream, seed=seed, model=source.name, position=position))
        async with self._residency.use(
            source, lambda done, total: generation.progress("load", done, total)
        ) as resident:
            if known is None:
                generation.clock.loaded = time.monotonic()
            _keep(resident, request.keep_alive)
            prompt, frozen, plan = await self._freeze(resident, request, seed)
            self._prompts.replace(generation, TOKEN_BYTES * len(frozen.prompt))
            stages = await self._prompter.stages(resident.words, request, prompt, frozen, stream)
            explained = plan if request.explain else None
            space = await self._caches.adopt(resident) if plan.has(Feature.PREFIX_CACHE) else None
            remembered = self._remember(generation, source, frozen, plan, space, stream)
            record = None
            if remembered is not None and request.resume is not None:
                other = self._caches.book.take(remembered)
                if other is not None:
                    await generation.take_over(other, frozen, resident.tokenizer, stages, plan=explained)
                    return
                record = await self._caches.book.load(remembered)
            told = len(frozen.forced)
            if record is not None:
                frozen = replace(frozen, forced=record.ids)
            frozen, held = await self._reuse(resident, request, prompt, frozen, plan, space)
            generation.start(
                resident.engine,
                frozen,
                resident.tokenizer,
                stages,
                client=client,
                plan=explained,
                held=held,
                replay=frozen.forced[told:],
                whole=record.whole if record is not None else None,
            )

    def _remember(
        self, generation: Generation, source: Resolved, frozen: Request, plan: Plan, space: Space | None, stream: str
    ) -> Recording | None:
        """Let a generation be taken up again, if it can be.

        Raises:
            ServeError: bad_request, it is to go on without its client, and can't.
        """
        request = generation.wire
        if plan.has(Feature.CHECKPOINTS):
            recording = self._caches.recording(space, source.path, request, frozen, stream)
            generation.remember(recording, self._caches.book)
            return recording
        if request.on_disconnect == "keep":
            raise ServeError("bad_request", f"on_disconnect keep: {plan.off[Feature.CHECKPOINTS].text}")
        return None

    async def _reuse(
        self,
        resident: Resident,
        request: wire.Generate,
        prompt: Prompt,
        frozen: Request,
        plan: Plan,
        space: Space | None,
    ) -> tuple[Request, Lease | None]:
        """The request with what it has to do with the prefix cache, and the prefix that it is restored from."""
        if not plan.has(Feature.PREFIX_CACHE):
            return frozen, None
        trimmable, checkpoints = resident.built.trimmable, plan.has(Feature.CHECKPOINTS)
        known = await self._prompter.stable(resident.words, request, prompt, next_turn=not trimmable)
        frozen = self._caches.plan(space, request, frozen, known, trimmable=trimmable, checkpoints=checkpoints)
        if space is None:
            return frozen, None
        return frozen, await self._caches.hold(space, frozen, resident.engine.costs, resident.engine.policy)

    async def _freeze(self, resident: Resident, request: wire.Generate, seed: int) -> tuple[Prompt, Request, Plan]:
        """The prompt, the immutable request, and its plan.

        Raises:
            ServeError: it can't run, or not as asked.
        """
        words, built, prompter = resident.words, resident.built, self._prompter
        prompt = await prompter.prompt(words, request, built.context)
        constraint = await prompter.constraint(words, resident.grammars, request, prompt, built.vocab_size)
        defaults = words.tokenizer.generation_defaults
        frozen = freeze(
            request,
            prompt.tokens,
            seed=seed,
            eos=words.tokenizer.eos_ids | prompt.ends,
            # A completion is what is likeliest, unless the request says otherwise.
            defaults=defaults if request.fim is None else {**defaults, "temperature": 0.0},
            context=built.context,
            vocab_size=built.vocab_size,
            max_tokens=max_tokens(request, self._settings.max_tokens),
            stop=prompt.stop,
            constraint=constraint.copy if constraint is not None else None,
        )
        named = request.draft in built.drafters
        infills = prompter.style(words) is not None
        capabilities = replace(built.capabilities, infills=infills, named_draft=named)
        cached = self._caches.wanted(request)
        wanted = needs(request, frozen.sampling, constrained=constraint is not None, cached=cached)
        plan = resolve(wanted, capabilities, ENABLED | self._caches.features | built.features)
        if plan.refusal is not None and not isinstance(request, wire.Explain):
            raise ServeError("bad_request", plan.refusal.text)
        asked = built.drafters if request.draft == "auto" else (request.draft,)
        drafts = frozenset(asked if plan.has(Feature.DRAFTS) else ())
        echo = await prompter.sources(words, request.echo, built.vocab_size) if plan.has(Feature.ECHO) else ()
        return prompt, replace(frozen, drafts=drafts, echo=echo, proposes=plan.has(Feature.GRAMMAR_PROPOSALS)), plan

    # -- the other requests

    async def _clear(self, job: TaskJob) -> None:
        job.answer(await self._caches.clear(job.id))

    async def _explain(self, request: wire.Explain, job: TaskJob) -> None:
        async with self._residency.use(await self._residency.resolve(request.model)) as resident:
            _, frozen, plan = await self._freeze(resident, request, request.seed or 0)
            engine = resident.engine
            space = await self._caches.adopt(resident) if plan.has(Feature.PREFIX_CACHE) else None
            found = self._caches.explain(space, frozen) if space is not None else None
            total = len(frozen.prompt) + len(frozen.forced)
            seconds = expected_s(engine.costs, engine.policy, found.disk if found is not None else 0, total)
            chunks = planned_chunks(frozen, engine.policy)
            job.answer(
                wire.Explained(
                    id=request.id,
                    model=resident.name,
                    prompt=len(frozen.prompt),
                    context=resident.built.context,
                    priority=request.priority or "normal",
                    plan=plan_reply(plan, chunks, frozen.drafts),
                    first_token_ms=None if seconds is None else round(seconds * 1e3, 1),
                    cached=wire.Cached(found.ram, found.disk, found.matched, found.why.value) if found else None,
                )
            )

    async def _tokenize(self, request: wire.Tokenize | wire.Count, job: TaskJob) -> None:
        async with self._residency.use(await self._residency.resolve(request.model)) as resident:
            if request.messages is not None:
                options, tools, thinking = request.template_options, request.tools, request.thinking
                prompt = await self._prompter.chat(resident.words, request.messages, options, tools, thinking)
                seen, tokens = prompt.text, prompt.tokens
            else:
                assert request.text is not None
                seen, tokens = request.text, await self._workers.run(resident.tokenizer.encode, request.text)
        if isinstance(request, wire.Count):
            job.answer(wire.Counted(id=request.id, count=len(tokens)))
        else:
            job.answer(wire.Tokens(id=request.id, tokens=tokens, text="" if request.messages is None else seen))

    async def _models(self, request: wire.Models, job: TaskJob) -> None:
        expand = self._device_name.startswith("cpu") if request.memory else None
        entries = await self._workers.offload(listing, expand)
        default: Resolved | None = None
        try:
            default = await self._residency.resolve(None)
        except ServeError:
            log.debug("there is no default model yet")
        models = [
            wire.ModelEntry(
                name=entry.name,
                source=entry.source,
                path=str(entry.path),
                bytes=entry.bytes,
                resident=entry.path in self._residency.models,
                default=default is not None and entry.path == default.path,
                memory=entry.memory,
            )
            for entry in entries
        ]
        job.answer(wire.ModelList(id=request.id, models=models))

    async def _load(self, request: wire.Load, job: TaskJob) -> None:
        began, told = time.monotonic(), 0.0

        def progress(done: int, total: int) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= PROGRESS_S:
                told = now
                job.say(wire.Progress(id=request.id, phase="load", done=done, total=total))

        async with self._residency.use(await self._residency.resolve(request.model), progress) as resident:
            _keep(resident, request.keep_alive)
            seconds = round(time.monotonic() - began, 3)
            job.answer(wire.Loaded(id=request.id, model=resident.name, bytes=resident.built.bytes, seconds=seconds))

    async def _unload(self, request: wire.Unload, job: TaskJob) -> None:
        resident = await self._residency.unload(await self._residency.resolve(request.model))
        job.answer(wire.Unloaded(id=request.id, model=resident.name))

    async def _probe(self, request: wire.Probe, job: TaskJob) -> None:
        job.answer(wire.Probed(id=request.id, seconds=await self._device.run(probe)))

    # -- what can be told without asking the device

    def _status(self, request_id: int) -> wire.StatusReport:
        engines = [resident.engine for resident in self._residency.models.values()]
        newest = max(engines, key=lambda engine: engine.last_active).report if engines else Report()
        running = sum(engine.running for engine in engines)
        footprint = self._allowance.system.footprint()
        generations = sum(isinstance(job, Generation) for job in self._open)
        return wire.StatusReport(
            id=request_id,
            pid=os.getpid(),
            version=mlxbcd.__version__,
            uptime_s=round(time.monotonic() - self._began, 3),
            state="degraded" if self._faulted or self.stuck else "draining" if self._draining else "ready",
            device=self._device_name,
            connections=0,
            running=running,
            queued=generations - running,
            served=self._served,
            failed=self._failed,
            generated_tokens=self._generated,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            memory_active=newest.active_bytes,
            memory_cache=newest.cache_bytes,
            memory_used=self._residency.budget.used,
            memory_limit=self._residency.budget.limit,
            footprint=footprint.bytes,
            footprint_measure=footprint.measure,
            models=self._processes(),
            loading=[wire.Loading(*loading) for loading in self._residency.progress],
            metrics=self._metrics.report(),
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = [self._blas.detail] if self._blas.kind == "reference" else []
        if self._missing_default and not self._residency.models:
            notes.append(self._missing_default)
        notes += self._configuration.notes()
        if self._manners.reason:
            notes.append(f"background requests wait: {self._manners.reason}")
        if self._manners.refusal:
            notes.append("new requests are refused: the system is out of memory")
        notes += self._caches.notes()
        notes += [f"loading {name}" for name in self._residency.loading]
        if self._device.busy_s > BUSY_S and not self._residency.loading:
            notes.append(f"the device has been busy with one step for {self._device.busy_s:.0f} s")
        return notes

    def _processes(self) -> list[wire.Process]:
        return [self._process(resident) for resident in self._residency.models.values()]

    def _process(self, resident: Resident) -> wire.Process:
        engine, built, keeper = resident.engine, resident.built, self._residency.keeper
        expires = keeper.expires_s(resident)
        return wire.Process(
            model=resident.name,
            path=str(resident.source.path),
            bytes=built.bytes,
            dtype=built.dtype,
            context=built.context,
            kv_bytes=engine.report.kv_bytes,
            running=engine.running,
            queued=engine.queued,
            idle_s=0.0 if resident.busy else round(time.monotonic() - resident.used, 3),
            placement="alone" if built.reason else "continuous",
            reason=built.reason,
            pinned=keeper.pinned(resident),
            expires_s=round(expires, 3) if expires < math.inf else None,
            draft=resident.draft,
        )


def _keep(resident: Resident, seconds: float | None) -> None:
    """A client may say how long a model stays; the last one to say so decides."""
    if seconds is not None:
        resident.keep_alive = math.inf if seconds < 0 else seconds


def _policy(settings: Settings) -> Policy:
    gap = settings.decode_gap_ms / 1e3 if settings.decode_gap_ms else None
    return Policy(max_rows=settings.max_rows, max_piece_s=settings.max_piece_ms / 1e3, decode_gap_s=gap)


def _stopping() -> ServeError:
    return ServeError("shutting_down", "the daemon is stopping; retry once it is back")
