"""A round needs no copy of the keys and values, whatever of its windows is taken back, with few layers or many."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxbcd.methods.autoregressive import Ahead, Row
from mlxbcd.methods.events import Speculated
from mlxbcd.methods.proposing import Speculation
from mlxbcd.methods.speculative import WIDEST, SpeculativeGroup
from mlxbcd.model import zoo
from mlxbcd.model.forward import Forward, Group
from mlxbcd.plan.request import Request
from mlxbcd.sampling.sampler import RowSampler, Sample
from mlxbcd.spec.costs import VerifyCosts
from mlxbcd.spec.depth import Depth
from mlxbcd.state.composition import Composition, inspect
from mlxbcd.state.rows import COLD, Joiner, Rows, commit
from oracle.families import CONFIGS
from oracle.guesses import Guesses, always

ROWS = 8
DEPTH = 3
ROUNDS = 6
PIECE = 500
PLAIN = "llama"
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 128,
}
"""Wide keys, so that activations are small beside them: scores of a window are as long as the text."""


@pytest.mark.parametrize("layers", [1, 2, 30])
def test_a_round_needs_no_copy_of_the_keys_and_values(layers: int) -> None:
    assert max(shares_of_state(layers)) <= 0.05


def test_that_measurement_would_see_a_copy() -> None:
    assert max(shares_of_state(1, hold_a_view=True)) > 0.3


def shares_of_state(layers: int, *, hold_a_view: bool = False) -> Iterator[float]:
    """For each of some rounds: the peak of memory over what was active, as a share of the state's bytes."""
    config = CONFIGS[PLAIN] | SHAPE | {"num_hidden_layers": layers}
    model_class, args_class = zoo.model_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.eval(model.parameters())
    forward, composition = Forward(model), inspect(model, zoo.module_name(config))
    state = Rows(composition, widest=WIDEST)
    drafter, depth = Guesses(always(1)), Depth(DEPTH, VerifyCosts())
    group = SpeculativeGroup(forward, state, Ahead.BUILD, costs=VerifyCosts(), drafter=drafter, depth=depth)
    fill(group, forward, composition, 3000 if layers < 3 else 1000)
    told: list[object] = []
    for _ in range(2):
        group.step(told.extend)
    for _ in range(ROUNDS):
        view = state.layouts[0].arrays()[0][:1] if hold_a_view else None
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        group.step(told.extend)
        del view
        yield (mx.get_peak_memory() - active) / group.nbytes
    rounds = [event for event in told if isinstance(event, Speculated)]
    assert len(rounds) == ROWS * (2 + ROUNDS)
    assert rounds[-1].statistics.drafted == DEPTH * (2 + ROUNDS)


def fill(group: SpeculativeGroup, forward: Forward, composition: Composition, length: int) -> None:
    """Let rows of somewhat different lengths join, all with prefixes of one long text, and room for what they draw."""
    rows = Rows(composition)
    commit(rows.prepare(join=[Joiner("long", COLD, length)]))
    for _ in range(length // PIECE):
        turn = rows.begin(PIECE)
        forward.run([Group(mx.zeros((1, PIECE), mx.int32), turn.caches)])
        mx.eval(turn.arrays())
        turn.resolve()
    request = Request(prompt=(1,), max_tokens=1000, eos=frozenset())
    for key in range(ROWS):
        row = Row(key, request, RowSampler(request.sampling, request.prompt, CONFIGS[PLAIN]["vocab_size"]))
        row.take(Sample(1, finite=True))
        own = length - 5 * key
        joiner = Joiner(key, rows.extract("long", own), own + 1 + (DEPTH + 1) * (2 + ROUNDS))
        group.join(row, joiner, Speculation(drafts=True))
