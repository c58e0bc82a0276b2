"""Keys and values in slots and around rings, held against a model that keeps every position of every row."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxbcd.state.geometry import Class
from mlxbcd.state.schemes import Plain
from mlxbcd.state.step import Segment, Step
from mlxbcd.state.store import Heads, Prefix, Store

CAPACITY = 32
SLOTS = 4


@given(
    starts=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    width=st.integers(1, 6),
    ring=st.integers(8, CAPACITY),
    window=st.none() | st.integers(1, 8),
    as_array=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_a_query_sees_exactly_what_it_should(
    starts: list[int], width: int, ring: int, window: int | None, as_array: bool
) -> None:
    if window is not None:
        ring = max(ring, window + width - 1)
    elif max(starts) + width > ring:
        ring = CAPACITY  # Only a window may forget.
    segment = Segment(0, len(starts), Class(CAPACITY))
    step = Step(starts, width, [segment])
    mask = step.mask(segment, ring, window, as_array=as_array)
    reach = step.reach(segment, ring)
    assert not (as_array and isinstance(mask, str))
    for row, start in enumerate(starts):
        held = {position % ring: position for position in range(start + width)}
        for i in range(width):
            query = start + i
            oldest = 0 if window is None else max(0, query - window + 1)
            wanted = [at in held and oldest <= held[at] <= query for at in range(reach)]
            if mask is None:
                assert all(wanted)
            elif isinstance(mask, str):
                assert wanted == [at <= query for at in range(reach)]
            else:
                assert mask[row, 0, i].tolist() == wanted


@dataclass
class Slot:
    """What was written to a slot: a value per position, of which the newest are still there."""

    values: list[float] = field(default_factory=list)
    first: int = 0


class Rings(RuleBasedStateMachine):
    """Every way of writing to a store; whatever a ring should still hold is read back after each."""

    @initialize(ring=st.integers(3, CAPACITY), rows=st.integers(1, SLOTS))
    def begin(self, ring: int, rows: int) -> None:
        self.ring = ring
        self.store = Store.empty(Heads(1, 1, 1, mx.float32), rows, ring, Plain())
        self.slots = [Slot() for _ in range(rows)]
        self.next = 1.0

    @rule(width=st.integers(1, 3), rows=st.integers(1, SLOTS))
    def append(self, width: int, rows: int) -> None:
        rows = min(rows, len(self.slots))
        running = self.slots[:rows]
        width = min(width, self.ring, CAPACITY - max(len(slot.values) for slot in running))
        if width < 1:
            return
        segment = Segment(0, rows, Class(CAPACITY))
        step = Step([len(slot.values) for slot in running], width, [segment])
        new = [[self._fresh() for _ in range(width)] for _ in running]
        written = mx.array(new)[:, None, :, None]
        self.store.append(step, segment, (written, -written))
        for slot, values in zip(running, new, strict=True):
            slot.values += values
        for slot in self.slots[rows:]:
            # A slot past the rows of a step belongs to nobody.
            slot.values, slot.first = [], 0
        self._forget()

    @rule(slot=st.integers(0, SLOTS - 1), length=st.integers(1, CAPACITY), held=st.integers(1, CAPACITY))
    def put(self, slot: int, length: int, held: int) -> None:
        slot %= len(self.slots)
        held = min(held, length, self.ring)
        values = [self._fresh() for _ in range(length)]
        part = mx.array(values[length - held :])[None, None, :, None]
        self.store.put(slot, Prefix((part, -part), length - held, Plain()))
        self.slots[slot] = Slot(values, length - held)

    @rule(slot=st.integers(0, SLOTS - 1), back=st.integers(0, 3))
    def take_back(self, slot: int, back: int) -> None:
        taken = self.slots[slot % len(self.slots)]
        if len(taken.values) - back >= taken.first:
            del taken.values[len(taken.values) - back :]

    @rule(slots=st.integers(1, SLOTS))
    def resize(self, slots: int) -> None:
        self.store = self.store.resized(slots)
        self.slots = [*self.slots[:slots], *(Slot() for _ in range(slots - len(self.slots)))]

    @rule(slot=st.integers(0, SLOTS - 1))
    def scrub(self, slot: int) -> None:
        slot %= len(self.slots)
        self.store.scrub(slot)
        assert not any(mx.any(part[slot]).item() for part in self.store.parts)
        self.slots[slot] = Slot()

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def what_should_be_there_is_there(self) -> None:
        assert self.store.slots == len(self.slots)
        for i, slot in enumerate(self.slots):
            prefix = self.store.read(i, slot.first, len(slot.values))
            keys, values = prefix.parts
            assert prefix.start == slot.first
            assert keys.flatten().tolist() == slot.values[slot.first :]
            assert values.flatten().tolist() == [-value for value in slot.values[slot.first :]]

    def _fresh(self) -> float:
        self.next += 1
        return self.next

    def _forget(self) -> None:
        for slot in self.slots:
            slot.first = max(slot.first, len(slot.values) - self.ring)


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, database=None)
