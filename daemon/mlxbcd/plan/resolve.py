"""Owns the plan: how a request runs, decided once from what it needs, what the model can do and what is enabled. Pure.

Every "no" has a `Reason`: a *refusal* (this model can't run the request), a *placement* (it runs alone) or an *off* (it
runs without that feature). Nothing downstream decides again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final


class Method(Enum):
    """How tokens come about."""

    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    DENOISING = "denoising"


class Mechanism(Enum):
    """Where it runs."""

    CONTINUOUS = "continuous"
    """In one batch with others."""
    ALONE = "alone"
    UNSUPPORTED = "unsupported"


class Feature(Enum):
    """What may apply to a request besides its method."""

    PREFIX_CACHE = "prefix cache"
    CHECKPOINTS = "checkpoints"
    DRAFTS = "drafts"
    ECHO = "echo"
    GRAMMAR_JUMP = "grammar jump"
    GRAMMAR_PROPOSALS = "grammar proposals"
    COMPILED_DECODE = "compiled decode"
    INFILLING = "infilling"


class Kind(Enum):
    """What a reason means for the request."""

    REFUSAL = "refusal"
    PLACEMENT = "placement"
    OFF = "off"


class Reason(Enum):
    """Why not: the kind, and the words for a person."""

    NO_MEDIA = (Kind.REFUSAL, "this model takes no images or sound; send text only")
    NO_ADAPTERS = (Kind.REFUSAL, "adapters can't be applied to this model; leave adapter out")
    NEEDS_SAMPLING = (
        Kind.REFUSAL,
        "this model doesn't sample tokens one by one; leave out penalties, logit_bias, logprobs, grammars, n, drafts",
    )
    CANDIDATES_ALONE = (Kind.REFUSAL, "n candidates share a batch, which this model can't; ask n times")
    NO_SUCH_DRAFTER = (
        Kind.REFUSAL,
        "this model has no such drafter; with draft: auto it takes what it has",
    )
    SHARES_NO_BATCH = (Kind.PLACEMENT, "this model's state can't be kept beside another request's")
    NOT_ENABLED = (Kind.OFF, "not enabled in this daemon")
    NOT_ASKED = (Kind.OFF, "the request doesn't ask for it")
    OPTED_OUT = (Kind.OFF, "the request turned it off")
    SAMPLES_NO_TOKENS = (Kind.OFF, "this method samples no tokens")
    STATE_NOT_RESTORABLE = (Kind.OFF, "this model's state can't be stored and restored")
    STATE_NOT_REVERSIBLE = (Kind.OFF, "this model's state can't take tokens back")
    RUNS_ALONE = (Kind.OFF, "the request runs alone")
    NO_DRAFTER = (Kind.OFF, "this model has no drafter")
    NO_MIDDLE = (
        Kind.OFF,
        "this model has no tokens for a middle: it goes on from the text before the cursor",
    )
    NO_GRAMMAR = (Kind.OFF, "the request has no grammar")
    BESIDE_MEDIA = (Kind.OFF, "not proven beside images or sound")
    BESIDE_GRAMMAR = (Kind.OFF, "not proven beside a grammar")
    BESIDE_LOGPROBS = (Kind.OFF, "not proven beside logprobs")
    BESIDE_ADAPTER = (Kind.OFF, "not proven beside an adapter")
    BESIDE_ECHO = (Kind.OFF, "not proven beside echo")
    BESIDE_DRAFTS = (Kind.OFF, "not proven beside a draft that was asked for")
    BESIDE_CANDIDATES = (Kind.OFF, "not proven beside several candidates")
    STATE_OF_ITS_OWN = (Kind.OFF, "this model's state is not of fixed shape")

    @property
    def kind(self) -> Kind:
        return self.value[0]

    @property
    def text(self) -> str:
        return self.value[1]


class Draft(Enum):
    """What a request says about drafts."""

    AUTO = "auto"
    OFF = "off"
    NAMED = "named"
    """It names a drafter, and is refused where there is none of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a request asks for, as far as the plan depends on it."""

    media: bool = False
    adapter: bool = False
    grammar: bool = False
    fim: bool = False
    logprobs: bool = False
    penalised: bool = False
    biased: bool = False
    candidates: int = 1
    draft: Draft = Draft.AUTO
    echo: bool = False
    cached: bool = True
    resumable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a loaded model can do.

    Attributes:
        samples: it draws tokens one by one.
        batches: rows can share a batch.
        restorable: the state of a row can be kept and put back.
        reversible: tokens can be taken back.
        fixed_shapes: a decode step's arrays have shapes that depend on the batch and its capacity alone.
        drafts: it has a drafter, or prompt lookup serves it.
        named_draft: the drafter that the request names, if it names one, is among them.
        media, adapters: it takes these.
        infills: it has tokens to fill in a middle with.
    """

    samples: bool = True
    batches: bool = True
    restorable: bool = True
    reversible: bool = True
    fixed_shapes: bool = True
    drafts: bool = False
    named_draft: bool = False
    media: bool = False
    adapters: bool = False
    infills: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request runs.

    Attributes:
        placement: why it doesn't share a batch; None where it does.
        refusal: why it can't run at all; None where it can.
        off: the features that don't apply, each with its reason; the others do.
    """

    method: Method = Method.AUTOREGRESSIVE
    mechanism: Mechanism = Mechanism.CONTINUOUS
    placement: Reason | None = None
    refusal: Reason | None = None
    off: Mapping[Feature, Reason] = field(default_factory=lambda: MappingProxyType({}))

    def has(self, feature: Feature) -> bool:
        """Whether a feature applies."""
        return self.refusal is None and feature not in self.off


ALL: Final = frozenset(Feature)


def resolve(needs: Needs, model: Capabilities, enabled: frozenset[Feature]) -> Plan:
    """The one plan of a request."""
    method = _method(needs, model, enabled)
    refusal = _refusal(needs, model)
    off = {feature: reason for feature in Feature if (reason := _off(feature, method, needs, model, enabled))}
    if refusal is not None:
        return Plan(method, Mechanism.UNSUPPORTED, None, refusal, MappingProxyType(off))
    if not model.batches:
        return Plan(method, Mechanism.ALONE, Reason.SHARES_NO_BATCH, None, MappingProxyType(off))
    return Plan(method, Mechanism.CONTINUOUS, None, None, MappingProxyType(off))


def _method(needs: Needs, model: Capabilities, enabled: frozenset[Feature]) -> Method:
    """By the request's features, then by what the model can do; never by where it could run."""
    if not model.samples:
        return Method.DENOISING
    proposing = (Feature.DRAFTS, Feature.ECHO, Feature.GRAMMAR_PROPOSALS)
    if any(_off(feature, Method.SPECULATIVE, needs, model, enabled) is None for feature in proposing):
        return Method.SPECULATIVE
    return Method.AUTOREGRESSIVE


def _refusal(needs: Needs, model: Capabilities) -> Reason | None:
    if needs.media and not model.media:
        return Reason.NO_MEDIA
    if needs.adapter and not model.adapters:
        return Reason.NO_ADAPTERS
    token_level = needs.grammar or needs.logprobs or needs.penalised or needs.biased or needs.candidates > 1
    if not model.samples and (token_level or needs.draft is Draft.NAMED or needs.echo):
        return Reason.NEEDS_SAMPLING
    if needs.candidates > 1 and not model.batches:
        return Reason.CANDIDATES_ALONE
    if needs.draft is Draft.NAMED and not model.named_draft:
        return Reason.NO_SUCH_DRAFTER
    return None


def _off(
    feature: Feature, method: Method, needs: Needs, model: Capabilities, enabled: frozenset[Feature]
) -> Reason | None:
    """Why a feature doesn't apply; None where it does. The request's own wish comes first."""
    asked = _unasked(feature, needs)
    if asked is not None:
        return asked
    if feature not in enabled:
        return Reason.NOT_ENABLED
    match feature:
        case Feature.PREFIX_CACHE:
            return None if model.restorable else Reason.STATE_NOT_RESTORABLE
        case Feature.CHECKPOINTS:
            return _checkpoints(method, needs, model)
        case Feature.DRAFTS:
            return _drafts(needs, model)
        case Feature.ECHO:
            return _echo(needs, model)
        case Feature.GRAMMAR_JUMP:
            return Reason.SAMPLES_NO_TOKENS if not model.samples else Reason.BESIDE_LOGPROBS if needs.logprobs else None
        case Feature.GRAMMAR_PROPOSALS:
            return _grammar_proposals(needs, model)
        case Feature.COMPILED_DECODE:
            return _compiled(needs, model)
        case Feature.INFILLING:
            return None if model.infills else Reason.NO_MIDDLE


def _unasked(feature: Feature, needs: Needs) -> Reason | None:
    if feature is Feature.PREFIX_CACHE and not needs.cached:
        return Reason.OPTED_OUT
    if feature is Feature.CHECKPOINTS and not needs.resumable:
        return Reason.NOT_ASKED
    if feature is Feature.DRAFTS and needs.draft is Draft.OFF:
        return Reason.OPTED_OUT
    if feature is Feature.ECHO and not needs.echo:
        return Reason.NOT_ASKED
    if feature is Feature.INFILLING and not needs.fim:
        return Reason.NOT_ASKED
    if feature in (Feature.GRAMMAR_JUMP, Feature.GRAMMAR_PROPOSALS) and not needs.grammar:
        return Reason.NO_GRAMMAR
    return None


def _checkpoints(method: Method, needs: Needs, model: Capabilities) -> Reason | None:
    if method is Method.DENOISING:
        return Reason.SAMPLES_NO_TOKENS
    if not model.restorable:
        return Reason.STATE_NOT_RESTORABLE
    return _beside(needs, media=True, grammar=True, logprobs=True, candidates=True)


def _drafts(needs: Needs, model: Capabilities) -> Reason | None:
    no = _speculates(model)
    if no is not None:
        return no
    if not (model.drafts or (needs.draft is Draft.NAMED and model.named_draft)):
        return Reason.NO_DRAFTER
    return _beside(needs, media=True, adapter=True, logprobs=True, grammar=True)


def _echo(needs: Needs, model: Capabilities) -> Reason | None:
    return _speculates(model) or _beside(needs, media=True, adapter=True, grammar=True, logprobs=True)


def _grammar_proposals(needs: Needs, model: Capabilities) -> Reason | None:
    no = _speculates(model)
    if no is not None:
        return no
    if needs.draft is Draft.NAMED:
        return Reason.BESIDE_DRAFTS
    return _beside(needs, media=True, adapter=True, logprobs=True)


def _compiled(needs: Needs, model: Capabilities) -> Reason | None:
    if not model.samples:
        return Reason.SAMPLES_NO_TOKENS
    if not model.batches:
        return Reason.RUNS_ALONE
    if not model.fixed_shapes:
        return Reason.STATE_OF_ITS_OWN
    return Reason.BESIDE_ECHO if needs.echo else _beside(needs, adapter=True, grammar=True)


def _speculates(model: Capabilities) -> Reason | None:
    if not model.samples:
        return Reason.SAMPLES_NO_TOKENS
    if not model.batches:
        return Reason.RUNS_ALONE
    return None if model.reversible else Reason.STATE_NOT_REVERSIBLE


def _beside(
    needs: Needs,
    *,
    media: bool = False,
    adapter: bool = False,
    grammar: bool = False,
    logprobs: bool = False,
    candidates: bool = False,
) -> Reason | None:
    """The first of the named companions that the request has."""
    if media and needs.media:
        return Reason.BESIDE_MEDIA
    if adapter and needs.adapter:
        return Reason.BESIDE_ADAPTER
    if grammar and needs.grammar:
        return Reason.BESIDE_GRAMMAR
    if logprobs and needs.logprobs:
        return Reason.BESIDE_LOGPROBS
    if candidates and needs.candidates > 1:
        return Reason.BESIDE_CANDIDATES
    return None
