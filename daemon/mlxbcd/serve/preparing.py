"""Owns what comes between a request and the engine: its model, its prompt, its plan, what is cached of it."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from mlxbc import wire
from mlxbcd.cache.lookups import Lease
from mlxbcd.cache.service import Space
from mlxbcd.config.settings import Settings
from mlxbcd.errors import ServeError
from mlxbcd.plan.freeze import freeze, needs
from mlxbcd.plan.request import Request
from mlxbcd.plan.resolve import Feature, Plan, resolve
from mlxbcd.residency.names import Resolved
from mlxbcd.residency.resident import Residency, Resident
from mlxbcd.serve import logs
from mlxbcd.serve.caching import Caches
from mlxbcd.serve.explaining import refusal_text
from mlxbcd.serve.generation import Generation
from mlxbcd.serve.jobs import internal
from mlxbcd.serve.prompting import Prompt, Prompter, max_tokens
from mlxbcd.serve.prompts import TOKEN_BYTES, Prompts
from mlxbcd.serve.resuming import Recording
from mlxbcd.text.workers import TextWorkers

_ENABLED: Final[frozenset[Feature]] = frozenset(
    {Feature.INFILLING, Feature.DRAFTS, Feature.ECHO, Feature.GRAMMAR_PROPOSALS}
)
"""Features that this daemon has."""


class Preparation:
    """Makes requests ready.

    Args:
        prompts: the texts that are held, which a generation's tokens replace.
        look: asks the machine whether it is a good time for background work.

    Attributes:
        prompter: makes prompts as the settings in force say.
    """

    def __init__(
        self,
        residency: Residency,
        caches: Caches,
        prompts: Prompts,
        workers: TextWorkers,
        look: Callable[[], Awaitable[None]],
        settings: Settings,
    ) -> None:
        self._residency = residency
        self._caches = caches
        self._prompts = prompts
        self._workers = workers
        self._look = look
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Go by these settings from now on."""
        self.prompter = Prompter(self._workers, settings.fim)
        self._max_tokens = settings.max_tokens

    async def prepare(self, generation: Generation, client: str) -> None:
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
            await self._look()
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
            keep(resident, request.keep_alive)
            prompt, frozen, plan = await self.freeze(resident, request, seed)
            self._prompts.replace(generation, TOKEN_BYTES * len(frozen.prompt))
            stages = await self.prompter.stages(resident.words, request, prompt, frozen, stream)
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
        known = await self.prompter.stable(resident.words, request, prompt, next_turn=not trimmable)
        frozen = self._caches.plan(space, request, frozen, known, trimmable=trimmable, checkpoints=checkpoints)
        if space is None:
            return frozen, None
        return frozen, await self._caches.hold(space, frozen, resident.engine.costs, resident.engine.policy)

    async def freeze(self, resident: Resident, request: wire.Generate, seed: int) -> tuple[Prompt, Request, Plan]:
        """The prompt, the immutable request, and its plan.

        Raises:
            ServeError: it can't run, or not as asked.
        """
        words, built, prompter = resident.words, resident.built, self.prompter
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
            max_tokens=max_tokens(request, self._max_tokens),
            stop=prompt.stop,
            constraint=constraint.copy if constraint is not None else None,
        )
        named = request.draft in built.drafters
        infills = prompter.style(words) is not None
        capabilities = replace(built.capabilities, infills=infills, named_draft=named)
        cached = self._caches.wanted(request)
        wanted = needs(request, frozen.sampling, constrained=constraint is not None, cached=cached)
        plan = resolve(wanted, capabilities, _ENABLED | self._caches.features | built.features)
        if plan.refusal is not None and not isinstance(request, wire.Explain):
            raise ServeError("bad_request", refusal_text(plan.refusal, request.draft, built.drafters))
        asked = built.drafters if request.draft == "auto" else (request.draft,)
        drafts = frozenset(asked if plan.has(Feature.DRAFTS) else ())
        echo = await prompter.sources(words, request.echo, built.vocab_size) if plan.has(Feature.ECHO) else ()
        return prompt, replace(frozen, drafts=drafts, echo=echo, proposes=plan.has(Feature.GRAMMAR_PROPOSALS)), plan


def keep(resident: Resident, seconds: float | None) -> None:
    """A client may say how long a model stays; the last one to say so decides."""
    if seconds is not None:
        resident.keep_alive = math.inf if seconds < 0 else seconds
