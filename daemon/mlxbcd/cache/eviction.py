"""Owns the choice of what the cache lets go of first. Pure.

The least recently used leaf goes first; pieces where sequences part and beginnings that many requests share count as
younger than they are. Leaves only, so what stays is always a prefix of something.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from mlxbcd.cache.index import Index
from mlxbcd.cache.nodes import Node

_BRANCH: Final = 4.0
_PINNED: Final = 16.0


def age(index: Index, node: Node, now: float) -> float:
    """Seconds since a node was wanted, by what it is worth."""
    weight = (_BRANCH if node.branch else 1.0) * (_PINNED if node.pinned else 1.0)
    return (now - index.last_used(node)) / weight


def from_ram(index: Index, now: float, excess: int) -> list[Node]:
    """Nodes to drop from RAM so that `excess` bytes become free, in order. Leased ones stay, if need be."""
    return _choose(index, now, excess, ram=True)


def from_disk(index: Index, now: float, excess: int) -> list[Node]:
    """The same for the disk."""
    return _choose(index, now, excess, ram=False)


def _choose(index: Index, now: float, excess: int, *, ram: bool) -> list[Node]:
    if excess <= 0:
        return []
    heap = [
        (-age(index, node, now), -node.end, node.id, node)
        for node in (index.ram_leaves if ram else index.disk_leaves)
        if not node.leases
    ]
    heapq.heapify(heap)
    chosen: list[Node] = []
    gone: set[Node] = set()
    while heap and excess > 0:
        *_, node = heapq.heappop(heap)
        chosen.append(node)
        gone.add(node)
        excess -= node.nbytes if ram else node.filed
        above = _next_above(node, ram=ram)
        if above is not None and not above.leases and not any(_in(ram, below) for below in _left(above, gone)):
            heapq.heappush(heap, (-age(index, above, now), -above.end, above.id, above))
    return chosen


def _next_above(node: Node, *, ram: bool) -> Node | None:
    """The nearest node before one that the tier holds."""
    above = node.parent
    while above is not None and above.parent is not None and not _in(ram, above):
        above = above.parent
    return above if above is not None and above.parent is not None else None


def _left(node: Node, gone: set[Node]) -> Iterator[Node]:
    """Nodes after one that haven't been chosen; none after a chosen one, which was a leaf."""
    todo = [*node.children.values()]
    while todo:
        child = todo.pop()
        if child not in gone:
            yield child
            todo += child.children.values()


def _in(ram: bool, node: Node) -> bool:
    return node.ram if ram else node.disk
