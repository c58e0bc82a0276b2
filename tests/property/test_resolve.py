"""Every combination of needs, model and features has exactly one plan, and each "no" in it a reason of its kind."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.plan.resolve import (
    ALL,
    Capabilities,
    Draft,
    Feature,
    Kind,
    Mechanism,
    Method,
    Needs,
    Plan,
    Reason,
    resolve,
)

needs = st.builds(
    Needs,
    media=st.booleans(),
    adapter=st.booleans(),
    grammar=st.booleans(),
    logprobs=st.booleans(),
    penalised=st.booleans(),
    biased=st.booleans(),
    candidates=st.integers(1, 3),
    draft=st.sampled_from(Draft),
    echo=st.booleans(),
    cached=st.booleans(),
    resumable=st.booleans(),
)
models = st.builds(
    Capabilities,
    samples=st.booleans(),
    batches=st.booleans(),
    restorable=st.booleans(),
    reversible=st.booleans(),
    fixed_shapes=st.booleans(),
    drafts=st.booleans(),
    named_draft=st.booleans(),
    media=st.booleans(),
    adapters=st.booleans(),
)
enabled = st.frozensets(st.sampled_from(Feature))
many = settings(derandomize=True, deadline=None, max_examples=400)


@many
@given(needs, models, enabled)
def test_each_no_has_a_reason_of_its_kind(asks: Needs, model: Capabilities, on: frozenset[Feature]) -> None:
    plan = resolve(asks, model, on)
    assert resolve(asks, model, on) == plan
    assert (plan.mechanism is Mechanism.UNSUPPORTED) == (plan.refusal is not None)
    assert (plan.mechanism is Mechanism.ALONE) == (plan.placement is not None)
    assert plan.refusal is None or plan.refusal.kind is Kind.REFUSAL
    assert plan.placement is None or plan.placement.kind is Kind.PLACEMENT
    assert all(reason.kind is Kind.OFF for reason in plan.off.values())
    for feature in Feature:
        assert plan.has(feature) == (plan.refusal is None and feature not in plan.off)
    assert {feature for feature in Feature if plan.has(feature)} <= on


@many
@given(needs, models, enabled)
def test_the_method_follows_from_the_request_and_the_model_alone(
    asks: Needs, model: Capabilities, on: frozenset[Feature]
) -> None:
    plan = resolve(asks, model, on)
    assert (plan.method is Method.DENOISING) == (not model.samples)
    proposes = any(f not in plan.off for f in (Feature.DRAFTS, Feature.ECHO, Feature.GRAMMAR_PROPOSALS))
    assert (plan.method is Method.SPECULATIVE) == proposes
    if plan.method is Method.SPECULATIVE:
        assert model.reversible


@many
@given(needs, models, enabled)
def test_what_the_request_did_not_ask_for_is_off_whatever_the_model(
    asks: Needs, model: Capabilities, on: frozenset[Feature]
) -> None:
    off = resolve(asks, model, on).off
    assert asks.cached or off[Feature.PREFIX_CACHE] is Reason.OPTED_OUT
    assert asks.echo or off[Feature.ECHO] is Reason.NOT_ASKED
    assert asks.resumable or off[Feature.CHECKPOINTS] is Reason.NOT_ASKED
    assert asks.draft is not Draft.OFF or off[Feature.DRAFTS] is Reason.OPTED_OUT
    for feature in (Feature.GRAMMAR_JUMP, Feature.GRAMMAR_PROPOSALS):
        assert asks.grammar or off[feature] is Reason.NO_GRAMMAR


@many
@given(needs, models, st.sampled_from(Feature))
def test_enabling_a_feature_takes_no_other_away(asks: Needs, model: Capabilities, feature: Feature) -> None:
    without, full = resolve(asks, model, ALL - {feature}), resolve(asks, model, ALL)
    assert set(full.off) <= set(without.off)
    assert {f: r for f, r in without.off.items() if f is not feature} == {
        f: r for f, r in full.off.items() if f is not feature
    }
    assert (without.mechanism, without.refusal) == (full.mechanism, full.refusal)


@many
@given(needs, models, enabled)
def test_batching_decides_where_it_runs_and_nothing_else_of_its_method(
    asks: Needs, model: Capabilities, on: frozenset[Feature]
) -> None:
    asks = replace(asks, candidates=1)
    alone, shared = (resolve(asks, replace(model, batches=batches), on) for batches in (False, True))
    assert alone.refusal == shared.refusal
    if shared.refusal is None:
        assert (alone.mechanism, shared.mechanism) == (Mechanism.ALONE, Mechanism.CONTINUOUS)


def plan_of(on: frozenset[Feature] = ALL, model: Capabilities | None = None, **asks: object) -> Plan:
    return resolve(Needs(**asks), model or Capabilities(drafts=True, named_draft=True), on)


def test_off_until_proven() -> None:
    off = {
        (Feature.ECHO, "logprobs"): Reason.BESIDE_LOGPROBS,
        (Feature.ECHO, "grammar"): Reason.BESIDE_GRAMMAR,
        (Feature.COMPILED_DECODE, "echo"): Reason.BESIDE_ECHO,
        (Feature.CHECKPOINTS, "grammar"): Reason.BESIDE_GRAMMAR,
        (Feature.CHECKPOINTS, "logprobs"): Reason.BESIDE_LOGPROBS,
    }
    for (feature, beside), reason in off.items():
        asks = {"echo": feature is Feature.ECHO, "resumable": True} | {beside: True}
        assert plan_of(**asks).off[feature] is reason
    grammar = plan_of(grammar=True, logprobs=True)
    assert grammar.off[Feature.GRAMMAR_JUMP] is Reason.BESIDE_LOGPROBS
    assert plan_of(grammar=True, draft=Draft.NAMED).off[Feature.GRAMMAR_PROPOSALS] is Reason.BESIDE_DRAFTS


def test_a_draft_that_cannot_serve_drops_to_plain_decoding_and_says_so() -> None:
    plan = plan_of(logprobs=True)
    assert plan.method is Method.AUTOREGRESSIVE
    assert plan.off[Feature.DRAFTS] is Reason.BESIDE_LOGPROBS
    # Forced tokens can be proposed with no drafter at all.
    assert plan_of(model=Capabilities(), grammar=True).method is Method.SPECULATIVE


def test_refusals() -> None:
    assert plan_of(media=True).refusal is Reason.NO_MEDIA
    assert plan_of(adapter=True).refusal is Reason.NO_ADAPTERS
    assert plan_of(model=Capabilities(samples=False), logprobs=True).refusal is Reason.NEEDS_SAMPLING
    assert plan_of(model=Capabilities(batches=False), candidates=2).refusal is Reason.CANDIDATES_ALONE
    assert plan_of(model=Capabilities(), draft=Draft.NAMED).refusal is Reason.NO_SUCH_DRAFTER
