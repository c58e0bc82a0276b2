"""Owns the requests about models, texts and the cache that are answered once."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from mlxbc import wire
from mlxbcd.device import Device
from mlxbcd.engine.scheduler import planned_chunks
from mlxbcd.errors import ServeError
from mlxbcd.model.probe import probe
from mlxbcd.plan.freeze import check, check_text
from mlxbcd.plan.resolve import Feature
from mlxbcd.residency.names import Resolved, listing
from mlxbcd.residency.resident import Residency
from mlxbcd.serve.caching import Caches, expected_s
from mlxbcd.serve.explaining import plan_reply, refusal_text
from mlxbcd.serve.generation import PROGRESS_S
from mlxbcd.serve.jobs import TaskJob
from mlxbcd.serve.preparing import Preparation, keep
from mlxbcd.serve.standing import Standing
from mlxbcd.text.workers import TextWorkers

Errand: TypeAlias = (
    wire.Explain | wire.CacheClear | wire.Tokenize | wire.Count | wire.Models | wire.Load | wire.Probe | wire.Unload
)

log = logging.getLogger(__name__)


class Errands:
    """Does what such a request asks, and answers it."""

    def __init__(
        self,
        device: Device,
        residency: Residency,
        caches: Caches,
        preparation: Preparation,
        standing: Standing,
        workers: TextWorkers,
    ) -> None:
        self._device = device
        self._residency = residency
        self._caches = caches
        self._preparation = preparation
        self._standing = standing
        self._workers = workers

    def work(self, request: Errand) -> Callable[[TaskJob], Awaitable[None]]:
        """What there is to do for a request.

        Raises:
            ServeError: bad_request, it makes no sense.
        """
        match request:
            case wire.Explain():
                check(request)
                return lambda job: self._explain(request, job)
            case wire.Tokenize() | wire.Count():
                check_text(request)
                return lambda job: self._tokenize(request, job)
            case wire.CacheClear():
                return self._clear
            case wire.Models():
                return lambda job: self._models(request, job)
            case wire.Load():
                return lambda job: self._load(request, job)
            case wire.Unload():
                return lambda job: self._unload(request, job)
            case wire.Probe():
                return lambda job: self._probe(request, job)

    async def _clear(self, job: TaskJob) -> None:
        job.answer(await self._caches.clear(job.id))

    async def _explain(self, request: wire.Explain, job: TaskJob) -> None:
        async with self._residency.use(await self._residency.resolve(request.model)) as resident:
            _, frozen, plan = await self._preparation.freeze(resident, request, request.seed or 0)
            engine = resident.engine
            space = await self._caches.adopt(resident) if plan.has(Feature.PREFIX_CACHE) else None
            found = self._caches.explain(space, frozen) if space is not None else None
            total = len(frozen.prompt) + len(frozen.forced)
            seconds = expected_s(engine.costs, engine.policy, found.disk if found is not None else 0, total)
            chunks = planned_chunks(frozen, engine.policy)
            drafters = resident.built.drafters
            refusal = "" if plan.refusal is None else refusal_text(plan.refusal, request.draft, drafters)
            job.answer(
                wire.Explained(
                    id=request.id,
                    model=resident.name,
                    prompt=len(frozen.prompt),
                    context=resident.built.context,
                    priority=request.priority or "normal",
                    plan=plan_reply(plan, chunks, frozen.drafts, refusal),
                    first_token_ms=None if seconds is None else round(seconds * 1e3, 1),
                    cached=wire.Cached(found.ram, found.disk, found.matched, found.why.value) if found else None,
                )
            )

    async def _tokenize(self, request: wire.Tokenize | wire.Count, job: TaskJob) -> None:
        async with self._residency.use(await self._residency.resolve(request.model)) as resident:
            if request.messages is not None:
                options, tools, thinking = request.template_options, request.tools, request.thinking
                prompt = await self._preparation.prompter.chat(
                    resident.words, request.messages, options, tools, thinking
                )
                seen, tokens = prompt.text, prompt.tokens
            else:
                assert request.text is not None
                seen, tokens = request.text, await self._workers.run(resident.tokenizer.encode, request.text)
        if isinstance(request, wire.Count):
            job.answer(wire.Counted(id=request.id, count=len(tokens)))
        else:
            job.answer(wire.Tokens(id=request.id, tokens=tokens, text="" if request.messages is None else seen))

    async def _models(self, request: wire.Models, job: TaskJob) -> None:
        expand = self._standing.on_cpu if request.memory else None
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
            keep(resident, request.keep_alive)
            seconds = round(time.monotonic() - began, 3)
            job.answer(wire.Loaded(id=request.id, model=resident.name, bytes=resident.built.bytes, seconds=seconds))

    async def _unload(self, request: wire.Unload, job: TaskJob) -> None:
        resident = await self._residency.unload(await self._residency.resolve(request.model))
        job.answer(wire.Unloaded(id=request.id, model=resident.name))

    async def _probe(self, request: wire.Probe, job: TaskJob) -> None:
        job.answer(wire.Probed(id=request.id, seconds=await self._device.run(probe)))
