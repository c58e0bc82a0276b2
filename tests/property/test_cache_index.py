"""Whatever is stored, saved, dropped and leased, the index finds the longest usable prefix and counts what it has."""

from __future__ import annotations

import pytest
from cache_integrity import below, faults
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxbcd.cache import eviction, keys
from mlxbcd.cache.index import Index, Match, Why
from mlxbcd.cache.nodes import Namespace, Node

BLOCK = 4
LEAST = 2
sequences = st.lists(st.integers(0, 2), min_size=1, max_size=14)
some = st.integers(0, 1000)


class Machine(RuleBasedStateMachine):
    """An index, and the leases that are out."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(block=BLOCK, least=LEAST)
        self.leased: list[Node] = []
        self.clock = 0.0

    @initialize(trimmable=st.booleans())
    def begin(self, trimmable: bool) -> None:
        self.space = self.index.namespace("model", trimmable=trimmable)
        self.other = self.index.namespace("other", trimmable=trimmable)

    @rule(ids=sequences, other=st.booleans(), converted=st.sampled_from([0, 0, 5]))
    def publish(self, ids: list[int], other: bool, converted: int) -> None:
        if len(ids) < converted:
            return
        space = self.other if other else self.space
        store(self.index, space, ids, converted, self._now())
        found = self.index.match(space, keys.pack(ids), len(ids))
        assert found.length == (len(ids) if len(ids) >= LEAST else 0)
        assert found.node.space is space

    @rule(which=some)
    def save(self, which: int) -> None:
        ready = [node for node in self._nodes() if node.ram and not node.disk and _may_be_saved(node)]
        if ready:
            self.index.saved(ready[which % len(ready)], 7)

    @rule(which=some)
    def lose_a_file(self, which: int) -> None:
        if saved := [node for node in self._nodes() if node.disk]:
            node = saved[which % len(saved)]
            gone = self.index.unsave(node)
            assert node in gone
            assert not any(each.disk for each in below(node))

    @rule(which=some)
    def read_back(self, which: int) -> None:
        if there := [node for node in self._nodes() if node.disk and not node.ram]:
            self.index.fill(there[which % len(there)], "state")

    @rule(excess=st.integers(0, 60))
    def evict_from_ram(self, excess: int) -> None:
        before = self.index.ram.bytes
        for node in eviction.from_ram(self.index, self._now(), excess):
            assert node in self.index.ram_leaves
            self.index.spill(node)
        unleased = any(not node.leases for node in self.index.ram_leaves)
        assert before - self.index.ram.bytes >= excess or not unleased

    @rule(excess=st.integers(0, 60))
    def evict_from_disk(self, excess: int) -> None:
        before = self.index.disk.bytes
        for node in eviction.from_disk(self.index, self._now(), excess):
            assert self.index.unsave(node) == [node]
        assert before - self.index.disk.bytes >= excess or all(node.leases for node in self.index.disk_leaves)

    @rule(ids=sequences, ram_only=st.booleans())
    def lease(self, ids: list[int], ram_only: bool) -> None:
        found = self.index.match(self.space, keys.pack(ids), len(ids), ram_only=ram_only)
        self.index.lease(found.node)
        self.index.touch(found.node, self._now())
        self.leased.append(found.node)

    @rule(which=some)
    def release(self, which: int) -> None:
        if self.leased:
            self.index.release(self.leased.pop(which % len(self.leased)))

    @rule(ids=sequences, limit=st.integers(0, 14), ram_only=st.booleans())
    def look(self, ids: list[int], limit: int, ram_only: bool) -> None:
        limit = min(limit, len(ids))
        found = self.index.match(self.space, keys.pack(ids), limit, ram_only=ram_only)
        usable, matched = by_hand(self.index, self.space, ids[:limit], ram_only=ram_only)
        assert found.length == usable
        assert found.matched == max(matched, found.length)
        _check_reason(found, limit, trimmable=self.space.trimmable, ram_only=ram_only)

    @invariant()
    def whole(self) -> None:
        assert faults(self.index) == []
        held = {node for lease in self.leased for node in lease.path}
        assert {node for node in self._nodes() if node.leases} <= held

    @invariant()
    def what_is_leased_stays(self) -> None:
        assert all(self.index.nodes.get(node.id) is node for lease in self.leased for node in lease.path)

    def teardown(self) -> None:
        for node in self.leased:
            self.index.release(node)
        assert not any(node.leases for node in self._nodes())
        for node in eviction.from_ram(self.index, self._now(), self.index.ram.bytes):
            self.index.spill(node)
        for node in eviction.from_disk(self.index, self._now(), self.index.disk.bytes):
            self.index.unsave(node)
        assert self.index.nodes == {}
        assert faults(self.index) == []

    def _nodes(self) -> list[Node]:
        return sorted(self.index.nodes.values(), key=lambda node: node.id)

    def _now(self) -> float:
        self.clock += 1
        return self.clock


def store(index: Index, space: Namespace, ids: list[int], converted: int, now: float = 0.0) -> Node:
    """Store a sequence in RAM, as publishing does; pieces that it makes useless go."""
    tokens = keys.pack(ids)
    node, gaps = index.gaps(space, converted, tokens, len(ids))
    for gap in gaps:
        piece = keys.span(tokens, gap.begin, gap.end)
        node = index.add(node, piece, anchor=gap.anchor, nbytes=10, payload="state", used=now)
    if gaps and space.trimmable:
        for other in index.subsumed(node):
            index.unsave(other)
            index.spill(other)
    index.touch(node, now)
    return node


def by_hand(index: Index, space: Namespace, ids: list[int], *, ram_only: bool) -> tuple[int, int]:
    """The longest usable prefix and the longest match, by looking at every node."""
    usable = matched = 0
    for node in index.nodes.values():
        path = node.path
        if node.space is not space:
            continue
        reachable = [each for each in path[:-1] if each.ram or (each.disk and not ram_only)] == path[:-1]
        tokens = b"".join(each.tokens for each in path)
        same = keys.common(tokens, keys.pack(ids))
        if reachable:
            matched = max(matched, same)
        if not reachable or not (node.ram or (node.disk and not ram_only)):
            continue
        if not space.trimmable:
            same = node.end if node.anchor and same == node.end else 0
        if same >= max(node.converted_at, LEAST):
            usable = max(usable, same)
    return usable, matched


def _may_be_saved(node: Node) -> bool:
    return node.parent is not None and (node.parent.parent is None or node.parent.disk)


def _check_reason(found: Match, limit: int, *, trimmable: bool, ram_only: bool) -> None:
    assert (found.why is Why.WHOLE) == (found.length == limit)
    if found.why is Why.DIVERGES:
        assert found.matched == found.length
    if found.why is Why.UNTRIMMABLE:
        assert not trimmable
    if found.why is Why.ON_DISK:
        assert ram_only


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = Machine.TestCase


def test_a_block_is_used_in_part_and_an_anchor_whole() -> None:
    for trimmable, length in ((True, 6), (False, 0)):
        index = Index(block=BLOCK, least=LEAST)
        space = index.namespace("model", trimmable=trimmable)
        store(index, space, [1, 2, 3, 4, 5, 6, 7], 0)
        found = index.match(space, keys.pack([1, 2, 3, 4, 5, 6, 9, 9]), 8)
        assert (found.length, found.matched) == (length, 6)
        assert found.why is (Why.DIVERGES if trimmable else Why.UNTRIMMABLE)


def test_an_exact_repeat_is_found_but_for_its_last_token() -> None:
    index = Index(block=BLOCK, least=LEAST)
    space = index.namespace("model", trimmable=True)
    store(index, space, [1, 2, 3, 4, 5], 0)
    found = index.match(space, keys.pack([1, 2, 3, 4, 5]), 4)
    assert (found.length, found.why) == (4, Why.WHOLE)


def test_a_quantised_state_is_not_used_below_where_it_was_quantised() -> None:
    index = Index(block=BLOCK, least=LEAST)
    space = index.namespace("model", trimmable=True)
    store(index, space, [1, 2, 3, 4, 5, 6, 7], 5)
    assert index.match(space, keys.pack([1, 2, 3, 4, 9, 9]), 6).why is Why.CONVERTED
    assert index.match(space, keys.pack([1, 2, 3, 4, 5, 9]), 6).length == 5


def test_nothing_of_another_namespace_is_found() -> None:
    index = Index(block=BLOCK, least=LEAST)
    store(index, index.namespace("one", trimmable=True), [1, 2, 3, 4, 5], 0)
    assert index.match(index.namespace("two", trimmable=True), keys.pack([1, 2, 3, 4, 5]), 5).length == 0


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_longer_state_of_the_same_tokens_replaces_a_shorter_one_where_it_can_be_cut(trimmable: bool) -> None:
    index = Index(block=BLOCK, least=LEAST)
    space = index.namespace("model", trimmable=trimmable)
    store(index, space, [1, 2], 0)
    store(index, space, [1, 2, 3], 0)
    assert len(index.nodes) == (1 if trimmable else 4)


def test_what_many_need_outlives_what_was_used_later() -> None:
    index = Index(block=BLOCK, least=LEAST)
    space = index.namespace("model", trimmable=True)
    store(index, space, [1, 1, 1, 1, 2, 2, 2, 2], 0, now=10)
    store(index, space, [1, 1, 1, 1, 3, 3, 3, 3], 0, now=20)
    store(index, space, [5, 5, 5, 5], 0, now=30)
    store(index, space, [6, 6, 6, 6], 0, now=40)
    index.pin(index.match(space, keys.pack([5, 5, 5, 5]), 4).node, 4)
    order = [node.tokens for node in eviction.from_ram(index, 50, 1000)]
    first, branch, pinned, newest = ([2] * 4, [1] * 4, [5] * 4, [6] * 4)
    assert order[0] == keys.pack(first)
    assert order.index(keys.pack(newest)) < order.index(keys.pack(pinned))
    assert order.index(keys.pack(newest)) < order.index(keys.pack(branch))


def test_a_conversation_ages_as_a_whole() -> None:
    index = Index(block=BLOCK, least=LEAST)
    space = index.namespace("model", trimmable=True)
    index.touch(store(index, space, [1, 2, 3], 0, now=10), 10, "talk")
    store(index, space, [4, 5, 6], 0, now=20)
    index.touch(store(index, space, [7, 8, 9], 0, now=30), 30, "talk")
    assert eviction.from_ram(index, 40, 10)[0].tokens == keys.pack([4, 5, 6])
