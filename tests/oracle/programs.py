"""Owns random programs over a crowd, for Hypothesis to find and to shrink."""

from __future__ import annotations

from typing import ClassVar, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from oracle.alone import TEXTS
from oracle.crowd import CHUNK, WIDEST, Crowd, Newcomer, Saved
from oracle.families import load
from oracle.mixed import MixedCrowd, Prompt, packing_of
from oracle.probes import FULL
from oracle.traced import CompiledCrowd

_LONGEST: Final = 26
"""Tokens of the longest prompt: three windows and two."""

_SAVED: Final = 4
"""States kept for later at a time."""

newcomers = st.builds(Newcomer, st.integers(0, TEXTS - 1), st.integers(1, _LONGEST), st.integers(1, 20))


class Programs(RuleBasedStateMachine):
    """Any sequence of what rows of one family may do; whatever runs is checked against what each row gives alone."""

    name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.crowd = Crowd(load(self.name))
        self.saved: list[Saved] = []

    @rule(
        arriving=st.lists(newcomers, min_size=1, max_size=5),
        widths=st.lists(st.integers(1, CHUNK), min_size=1, max_size=3),
    )
    def admit(self, arriving: list[Newcomer], widths: list[int]) -> None:
        arriving = arriving[: FULL - len(self.crowd)]
        if arriving:
            self.crowd.admit(arriving, widths)

    @rule(width=st.integers(1, WIDEST))
    def step(self, width: int) -> None:
        self.crowd.step(width)

    @precondition(lambda self: self.crowd.reversible)
    @rule(width=st.integers(1, WIDEST), data=st.data())
    def step_and_go_back(self, width: int, data: st.DataObject) -> None:
        self.crowd.retire(width)
        rows = len(self.crowd)
        kept = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows), "kept")
        if self.crowd.begins and len({n == 0 for n in kept}) > 1:
            # Recurrent layers can't hold rows that have begun beside ones that have not.
            kept = [max(n, 1) for n in kept]
        self.crowd.step(width, kept)

    @precondition(lambda self: len(self.crowd) > 0)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.crowd.filter(data.draw(st.sets(st.sampled_from(self.crowd.keys)), "staying"))

    @precondition(lambda self: len(self.crowd) > 0)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.crowd.keys), "row")
        length = data.draw(st.integers(self.crowd.rows.retained(key), self.crowd.rows.lengths[key]), "length")
        self.saved = [*self.saved, self.crowd.extract(key, length)][-_SAVED:]

    @precondition(lambda self: len(self.crowd) > 0)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.crowd.keys), "row")
        length = data.draw(st.integers(self.crowd.rows.retained(key), self.crowd.rows.lengths[key]), "length")
        self.crowd.rows.trim(key, length)

    @precondition(lambda self: len(self.saved) > 0)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.saved))), max_size=FULL), "saved")
        cold = data.draw(st.lists(st.integers(0, TEXTS - 1), max_size=2), "cold")
        returning = [self.saved[i] for i in chosen][: FULL - len(self.crowd)]
        self.crowd.restore(returning, cold[: FULL - len(self.crowd) - len(returning)])

    def teardown(self) -> None:
        self.crowd.check_states()


class MixedPrograms(Programs):
    """The same with prompts whose pieces run packed with the running rows, between all the rest."""

    def __init__(self) -> None:
        super().__init__()
        packer = packing_of(self.name).packer
        assert packer is not None
        self.mixed = self.crowd = MixedCrowd(load(self.name), packer)
        self.prompts: list[Prompt] = []

    @precondition(lambda self: len(self.prompts) < 2)
    @rule(newcomer=newcomers)
    def begin(self, newcomer: Newcomer) -> None:
        self.prompts.append(self.mixed.prompt(newcomer))

    @precondition(lambda self: len(self.prompts) > 0)
    @rule(width=st.integers(1, WIDEST), data=st.data())
    def step_beside(self, width: int, data: st.DataObject) -> None:
        self.prompts = self.prompts[: max(FULL - len(self.crowd), 0)]
        pieces = [data.draw(st.integers(1, min(prompt.left, CHUNK)), "piece") for prompt in self.prompts]
        if pieces:
            self.mixed.step_beside(self.prompts, pieces, width)
            self.prompts = [prompt for prompt in self.prompts if prompt.left]


class CompiledPrograms(Programs):
    """The same with all running rows' steps through traced functions, each traced once."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = self.crowd = CompiledCrowd(load(self.name))

    def teardown(self) -> None:
        super().teardown()
        self.compiled.check_traces()


def run_programs(kind: type[Programs], name: str, programs: int) -> None:
    """Run random programs over a family, the same ones each time."""
    run_state_machine_as_test(
        type("Family", (kind,), {"name": name}),
        settings=settings(
            max_examples=programs,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
