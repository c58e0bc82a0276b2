"""Owns one piece of stored state in the prefix index, and the namespace at the beginning of its sequence. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlxbcd.cache import keys


@dataclass(slots=True, eq=False)
class Node:
    """One stored piece of state; a root stores nothing.

    Attributes:
        parent: what comes before it; None for a root.
        begin, end: its positions; an anchor has none and stands at `end`.
        converted_at: length at which its row was quantised; nothing shorter is reusable. 0 where it never was.
        nbytes: bytes of its state in RAM.
        payload: what the RAM tier holds of it; None if nothing.
        filed: bytes of its file; 0 where the SSD tier doesn't have it.
        leases: who needs it to stay.
        used: when it was last wanted, in seconds of any clock.
        session: the conversation that it belongs to; empty for none.
        pinned: part of a prompt that many requests begin with.
        branch: more than one sequence has continued here.
        full: it is a whole block, so another may follow.
        owner: the namespace of a root.
    """

    id: str
    parent: Node | None
    begin: int
    end: int
    tokens: bytes = b""
    anchor: bool = False
    converted_at: int = 0
    nbytes: int = 0
    payload: Any = None
    filed: int = 0
    leases: int = 0
    used: float = 0.0
    session: str = ""
    pinned: bool = False
    branch: bool = False
    full: bool = False
    owner: Namespace | None = None
    below_ram: int = 0
    below_disk: int = 0
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)

    def __repr__(self) -> str:
        where = "+".join(name for name, there in (("ram", self.payload is not None), ("disk", self.disk)) if there)
        what = f"anchor {self.end}" if self.anchor else f"{self.begin}:{self.end}"
        return f"Node({self.id[:6]} {what} {where or 'nowhere'}{f', {self.leases} leases' if self.leases else ''})"

    @property
    def ram(self) -> bool:
        return self.payload is not None

    @property
    def disk(self) -> bool:
        return self.filed > 0

    @property
    def space(self) -> Namespace:
        """Whose sequence it is part of."""
        node = self
        while node.parent is not None:
            node = node.parent
        assert node.owner is not None
        return node.owner

    @property
    def there(self) -> bool:
        """Its state is somewhere."""
        return self.ram or self.disk

    @property
    def path(self) -> list[Node]:
        """All nodes from the beginning to this one, without the root."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def near(self, tokens: bytes) -> Iterator[tuple[int, Node]]:
        """(tokens in common, block) of the blocks below, those with most in common first."""
        at = bisect(self.order, tokens)
        left, right = at - 1, at
        sides = [keys.common(tokens, self.order[i]) if 0 <= i < len(self.order) else -1 for i in (left, right)]
        while max(sides) >= 0:
            if sides[0] >= sides[1]:
                yield sides[0], self.children[self.order[left]]
                left -= 1
                sides[0] = keys.common(tokens, self.order[left]) if left >= 0 else -1
            else:
                yield sides[1], self.children[self.order[right]]
                right += 1
                sides[1] = keys.common(tokens, self.order[right]) if right < len(self.order) else -1

    def parts(self, tokens: bytes) -> bool:
        """Whether `tokens` part ways with a block below: neither continues the other."""
        at = bisect(self.order, tokens)
        beside = self.order[max(at - 1, 0) : at + 1]
        return any(keys.common(tokens, other) < min(keys.count(tokens), keys.count(other)) for other in beside)


class Namespace:
    """The sequences of one model under one way to store state.

    Args:
        trimmable: all of its layers store by position.
    """

    def __init__(self, name: str, *, trimmable: bool) -> None:
        self.name = name
        self.trimmable = trimmable
        self.roots: dict[int, Node] = {}

    def root(self, converted_at: int) -> Node:
        """Where sequences begin whose state was quantised at that length."""
        if converted_at not in self.roots:
            name = keys.root_id(self.name, converted_at)
            self.roots[converted_at] = Node(name, None, 0, 0, converted_at=converted_at, owner=self)
        return self.roots[converted_at]
