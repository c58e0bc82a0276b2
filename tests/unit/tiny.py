"""Owns tiny models with random weights, and an oracle that generates from them without any cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map

from mlxbcd.engine.executor import Executor
from mlxbcd.engine.runner import Leaving, Report
from mlxbcd.engine.scheduler import Iteration, Piece
from mlxbcd.methods.autoregressive import Ahead
from mlxbcd.methods.events import Drawn, Event, Failed
from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward
from mlxbcd.model.packed import Packer
from mlxbcd.plan.request import Request, Sampling
from mlxbcd.sampling.sampler import RowSampler, sample
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.state import packing
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.geometry import Key

VOCABULARY: Final = 200
LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1000,
}
QWEN3: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 1000,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
CONFIGS: Final = {"llama": LLAMA, "qwen3": QWEN3, "shallow": LLAMA | {"hidden_size": 32, "num_hidden_layers": 1}}


def make_model(config: dict[str, Any], seed: int = 0) -> Any:
    """A model of the zoo with larger random weights than it makes itself, so that its top tokens are well apart."""
    mx.disable_compile()
    zoo.bind()
    model_class, args_class = zoo.model_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda array: array * 2.5 if array.ndim > 1 else array, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


@cache
def parts(name: str) -> tuple[Forward, Composition]:
    """A model behind its seams; shared by all tests, which must leave it as it was."""
    config = CONFIGS[name]
    model = make_model(config)
    return Forward(model), inspect(model, config["model_type"])


@cache
def packer(name: str) -> Packer:
    """What runs packed forwards of a shared model."""
    found = packing.inspect(*parts(name)).packer
    assert found is not None
    return found


def make_executor(
    name: str = "llama",
    *,
    ahead: Ahead = Ahead.BUILD,
    alone: bool = False,
    packs: bool = False,
    verify: VerifyCosts | None = None,
) -> Executor:
    forward, composition = parts(name)
    if alone:
        composition = dataclasses.replace(composition, reason="told to")
    return Executor(forward, composition, VOCABULARY, ahead, verify=verify, packer=packer(name) if packs else None)


def make_request(prompt: Sequence[int], max_tokens: int = 8, eos: Sequence[int] = (), **settings: Any) -> Request:
    forced = tuple(settings.pop("forced", ()))
    constraint = settings.pop("constraint", None)
    sampling = Sampling(**settings)
    return Request(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        eos=frozenset(eos),
        sampling=sampling,
        forced=forced,
        constraint=constraint,
    )


def oracle(request: Request, name: str = "llama") -> list[int]:
    """The tokens of a request by a shared model."""
    return generate(parts(name)[0].model, request, VOCABULARY)


def generate(model: Any, request: Request, vocabulary: int) -> list[int]:
    """The tokens of a request, each from a forward over the whole text so far. The end token is included."""
    tokens = [*request.prompt, *request.forced]
    constraint = request.constraint() if request.constraint is not None else None
    sampler = RowSampler(request.sampling, tokens, vocabulary, len(request.forced), constraint=constraint)
    drawn: list[int] = []
    while len(request.forced) + len(drawn) < request.max_tokens:
        (best,) = sample(model(mx.array([tokens]))[:, -1], [sampler]).read()
        drawn.append(best.token)
        tokens.append(best.token)
        if best.token in request.eos:
            break
        if constraint is not None:
            constraint.accept(best.token)
            if constraint.complete:
                break
    return drawn


class Driver:
    """Runs an executor by hand, and keeps what it tells."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.events: list[Event] = []
        self.report = Report()

    def iterate(
        self,
        *,
        decode: bool = True,
        piece: tuple[Key, int] | None = None,
        start: Sequence[tuple[Key, Request]] = (),
        leave: Sequence[Key | Leaving] = (),
        packed: bool = False,
        step_s: float = math.inf,
        beside: Sequence[tuple[Key, int]] = (),
    ) -> Report:
        planned = Piece(*piece, ends=True) if piece is not None else None
        others = tuple(Piece(*other, ends=True) for other in beside)
        parting = [each if isinstance(each, Leaving) else Leaving(each) for each in leave]
        iteration = Iteration(decode, planned, packed=packed, step_s=step_s, beside=others)
        self.report = self.executor.iterate(iteration, start, parting, self.events.extend)
        return self.report

    def step(
        self,
        *,
        decode: bool,
        piece: tuple[Key, int, bool] | None,
        start: Sequence[tuple[Key, Request]],
        leave: Sequence[Leaving],
        beside: Sequence[tuple[Key, int, bool]] = (),
        packed: bool = False,
    ) -> Report:
        """One iteration, all of it said: a piece is (key, width, whether it is up to a planned end)."""
        planned = None if piece is None else Piece(*piece)
        iteration = Iteration(decode, planned, packed=packed, beside=tuple(Piece(*other) for other in beside))
        self.report = self.executor.iterate(iteration, start, leave, self.events.extend)
        return self.report

    def prefill(self, key: Key, request: Request, widths: Sequence[int] = (), *, decode: bool = True) -> None:
        """Process a whole prompt, in pieces of the given widths and then the rest at once."""
        left = len(request.prompt) + len(request.forced)
        start = [(key, request)]
        for width in [*widths, left]:
            width = min(width, left)
            if width:
                self.iterate(decode=decode, piece=(key, width), start=start)
                start, left = [], left - width

    def finish(self) -> None:
        """Decode until no row is left."""
        self.iterate()
        while self.report.running:
            self.iterate()

    def tokens(self, key: Key) -> list[int]:
        return [event.sample.token for event in self.events if isinstance(event, Drawn) and event.key == key]

    def ends(self, key: Key) -> list[str]:
        """How a row ended, as often as it did: a reason or an error's code."""
        drawn = [e.ended for e in self.events if isinstance(e, Drawn) and e.key == key and e.ended]
        return [*drawn, *(e.error.code for e in self.events if isinstance(e, Failed) and e.key == key)]
