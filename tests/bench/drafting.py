"""Owns the rows of `spec` with a draft model: ours beside mlx-lm's `speculative_generate_step`, on the same arrays.

The model drafts for itself, always right and as deep on both sides, which tells what a round costs beside its forwards.
Then its first layers draft for it, which seldom pays: mlx-lm drafts on as it was told, ours as deep as pays. Times are
of whole answers, since both sides' drafters read the prompt too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step

from bench import inprocess
from bench.answers import answer
from bench.machine import peer_version
from bench.registry import Settings
from bench.table import Row, compare
from mlxbcd.engine.executor import Executor
from mlxbcd.model.forward import Forward
from mlxbcd.model.load import read_config
from mlxbcd.plan.request import Request
from mlxbcd.residency.build import Built
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import MOST_DRAFTED
from mlxbcd.spec.draft_model import ModelDrafter
from mlxbcd.spec.statistics import total
from mlxbcd.state.composition import inspect

_SHARE = 2 / 3
"""Of the layers: fewer of them are hardly ever right."""
_PEERS_DEPTH = 2
"""mlx-lm's default."""


def rows(settings: Settings, built: Built, requests: Sequence[Request]) -> list[Row]:
    """Rows `spec/self/B=1` and `spec/layers/B=1`."""
    model = built.executor.forward.model
    layers = round(len(model.layers) * _SHARE)
    asked = [replace(request, drafts=frozenset({"model"}), max_tokens=settings.pick(96, 12)) for request in requests]
    if settings.quick:
        asked = asked[:1]
    whole = inprocess.twin(settings.model, model)
    # Nobody knows what verifying costs: drafts are always as deep as they may be.
    always = _executor(settings, built, whole, VerifyCosts())
    adapting = _executor(
        settings, built, inprocess.twin(settings.model, model, layers), built.executor.verify or VerifyCosts()
    )
    part = inprocess.twin(settings.model, model, layers)
    return [
        _row("spec/self/B=1", always, _Peer(whole, inprocess.twin(settings.model, model), MOST_DRAFTED), asked),
        _row("spec/layers/B=1", adapting, _Peer(whole, part, _PEERS_DEPTH), asked),
    ]


def _executor(settings: Settings, built: Built, drafting: Any, verify: VerifyCosts) -> Executor:
    """The built model's arrays, with a drafter."""
    ours = built.executor
    composition = inspect(drafting, str(read_config(settings.model)["model_type"]))
    drafter = ModelDrafter(Forward(drafting), composition, built.vocab_size)
    return Executor(ours.forward, ours.composition, ours.vocab_size, ours.ahead, verify=verify, drafter=drafter)


class _Peer:
    """mlx-lm's own loop of two models."""

    def __init__(self, model: Any, draft: Any, depth: int) -> None:
        self._model = model
        self._draft = draft
        self._depth = depth

    def answer(self, request: Request) -> list[int]:
        """The tokens of an answer."""
        drawn = speculative_generate_step(
            mx.array(request.prompt),
            self._model,
            self._draft,
            num_draft_tokens=self._depth,
            max_tokens=request.max_tokens,
        )
        tokens = (int(token) for token, _, _ in drawn)
        told = list(takewhile(lambda token: token not in request.eos, tokens))
        # The token that ends an answer is one of its tokens here.
        return told if len(told) == request.max_tokens else [*told, min(request.eos)]


def _row(name: str, ours: Executor, peer: _Peer, requests: Sequence[Request]) -> Row:
    """All requests on both sides, by turns."""
    rates: list[float] = []
    peer_rates: list[float] = []
    figures = []
    same = 0
    for number, request in enumerate(requests):
        answers: dict[bool, list[int]] = {}

        def run_ours(request: Request = request) -> list[int]:
            outcome = answer(ours, [request])
            figures.append(outcome.statistics)
            return outcome.tokens[0]

        def run_peer(request: Request = request) -> list[int]:
            return peer.answer(request)

        sides: list[tuple[bool, Callable[[], list[int]]]] = [(True, run_ours), (False, run_peer)]
        for mine, run in sides if number % 2 == 0 else sides[::-1]:
            began = perf_counter()
            answers[mine] = run()
            (rates if mine else peer_rates).append(len(answers[mine]) / (perf_counter() - began))
        same += answers[True] == answers[False]
    counted = total(figures)
    note = (
        f"{counted.tokens_per_forward:.2f} tokens per forward, {counted.accepted} of {counted.drafted} right, "
        f"{same} of {len(requests)} answers equal"
    )
    return compare(name, median(rates), median(peer_rates), "tok/s", "higher", peer_version=peer_version(), note=note)
