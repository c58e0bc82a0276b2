"""Owns the prefix index: which token sequences have a stored state, and the longest usable one of a prompt. Pure.

A radix tree over token ids whose edges are at most a block long. A node is a *block*, the state of its tokens'
positions, or an *anchor* under a block's end: what the layers hold there that can't be cut back (windows, recurrent
state). Where all layers store by position any length of a block is usable, else only lengths that have an anchor.

A node's state is in RAM, on disk, or in both. A node on disk has its parents there, so that what a restart finds is
whole. Nodes are never changed: lookups consume nothing, and a lease on a node keeps it and everything before it.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from mlxbcd.cache import keys
from mlxbcd.cache.nodes import Namespace, Node

BLOCK: Final = 256
"""Tokens of a full block. A state is kept in blocks, so that prompts which begin alike share them."""
LEAST_HIT: Final = 16
"""A shorter prefix is not worth restoring."""
_SESSIONS: Final = 4096
"""Conversations that are known by name; older ones are as old as their own pieces."""


class Why(Enum):
    """Why a prefix is not longer."""

    WHOLE = "whole"
    """It is all that may be reused: a prompt's last token is always processed."""
    DIVERGES = "diverges"
    """What is stored continues with other tokens, or not at all."""
    UNTRIMMABLE = "untrimmable"
    """A longer one matches, but its state can't be cut back to where the tokens part, and none was kept there."""
    CONVERTED = "converted"
    """A longer one matches up to a point before the one where its keys and values were quantised."""
    ON_DISK = "on_disk"
    """A longer one is on disk alone, and was not read."""
    SHORT = "short"
    """A longer one matches, but for too few tokens to be worth it."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt.

    Attributes:
        node: its last piece; a root where nothing is usable.
        length: tokens it covers: the last piece may be used in part.
        matched: tokens that something stored begins with alike, usable or not.
        why: why it isn't longer.
    """

    node: Node
    length: int
    matched: int
    why: Why

    def __repr__(self) -> str:
        return f"Match({self.length} of {self.matched} matched, {self.why.value})"


@dataclass(frozen=True, slots=True)
class Gap:
    """A piece of a sequence that should be stored and isn't."""

    begin: int
    end: int
    anchor: bool


@dataclass(slots=True)
class Usage:
    """What one tier holds."""

    nodes: int = 0
    bytes: int = 0


class Index:
    """All namespaces of a cache, and what each tier holds of them.

    Args:
        block: tokens of a full block.
        least: tokens of the shortest prefix worth reusing.

    Attributes:
        ram, disk: what the tiers hold.
        ram_leaves, disk_leaves: nodes of a tier with nothing of that tier below: those it may let go of.
        sessions: when a conversation's state was last wanted.
    """

    def __init__(self, *, block: int = BLOCK, least: int = LEAST_HIT) -> None:
        self.block = block
        self.least = least
        self.namespaces: dict[str, Namespace] = {}
        self.nodes: dict[str, Node] = {}
        self.ram = Usage()
        self.disk = Usage()
        self.ram_leaves: set[Node] = set()
        self.disk_leaves: set[Node] = set()
        self.sessions: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Index({len(self.nodes)} nodes, RAM {self.ram}, disk {self.disk})"

    def namespace(self, name: str, *, trimmable: bool) -> Namespace:
        """A namespace, made where it isn't known."""
        if name not in self.namespaces:
            self.namespaces[name] = Namespace(name, trimmable=trimmable)
        return self.namespaces[name]

    # -- what is there

    def match(self, space: Namespace, tokens: bytes, limit: int, *, ram_only: bool = False) -> Match:
        """The longest usable prefix of `tokens`, of at most `limit` of them.

        Args:
            ram_only: what is on disk alone is not usable.
        """
        best = Match(space.root(0), 0, 0, Why.DIVERGES)
        matched, why = 0, Why.DIVERGES
        for converted_at, root in sorted(space.roots.items()):
            found = self._walk(root, tokens, limit, trimmable=space.trimmable, ram_only=ram_only)
            if found.length < max(converted_at, self.least):
                reason = Why.CONVERTED if found.length >= self.least else Why.SHORT if found.length else found.why
                found = Match(root, 0, found.matched, reason)
            if found.length > best.length:
                best = found
            if found.matched > matched:
                matched, why = found.matched, found.why
        if best.length == limit:
            return Match(best.node, best.length, matched, Why.WHOLE)
        if matched <= best.length:
            return Match(best.node, best.length, best.length, Why.DIVERGES)
        return Match(best.node, best.length, matched, why if why is not Why.WHOLE else Why.DIVERGES)

    def gaps(self, space: Namespace, converted_at: int, tokens: bytes, length: int) -> tuple[Node, list[Gap]]:
        """What is missing of the first `length` tokens: the node after which it is missing, and the pieces.

        The last piece ends at `length`; where the namespace can't be trimmed, an anchor stands there.
        """
        node = space.root(converted_at)
        while node.end < length:
            child = node.children.get(keys.span(tokens, node.end, min(node.end + self.block, length)))
            if child is None and space.trimmable:
                child = self._longer(node, tokens, length)
            if child is None or not child.there:
                break
            node = child
        missing = [
            Gap(begin, min(begin + self.block, length), anchor=False)
            for begin in range(min(node.end, length), length, self.block)
        ]
        anchor = node.children.get(b"")
        if not space.trimmable and (missing or anchor is None or not anchor.there):
            missing.append(Gap(length, length, anchor=True))
        return node, missing

    def _longer(self, node: Node, tokens: bytes, length: int) -> Node | None:
        """A block below that holds the rest of the tokens, and more."""
        if length - node.end >= self.block:
            return None
        rest = keys.span(tokens, node.end, length)
        return next((child for same, child in node.near(rest) if same == keys.count(rest) and child.there), None)

    # -- how it changes

    def add(
        self,
        parent: Node,
        tokens: bytes,
        *,
        anchor: bool = False,
        nbytes: int,
        payload: Any = None,
        filed: int = 0,
        used: float = 0.0,
        session: str = "",
        pinned: bool = False,
    ) -> Node:
        """Store a piece after `parent`. What is there already stays, and is somewhere again if it was nowhere.

        Raises:
            ValueError: nothing may follow `parent`, it would be on disk without its parents, or it is nowhere.
        """
        if filed and parent.parent is not None and not parent.disk:
            raise ValueError(f"{parent} is not on disk, so nothing after it can be")
        if (known := parent.children.get(tokens)) is not None:
            if payload is not None and not known.there:
                self.fill(known, payload)
            if filed:
                self.saved(known, filed)
            return known
        if parent.anchor or (parent.parent is not None and not parent.full and not anchor):
            raise ValueError(f"nothing can follow {parent}")
        if not 0 < keys.count(tokens) <= self.block and not (anchor and not tokens):
            raise ValueError(f"a block of {keys.count(tokens)} tokens")
        if payload is None and not filed:
            raise ValueError("a piece of state that is nowhere")
        name = keys.anchor_id(parent.id) if anchor else keys.block_id(parent.id, tokens)
        begin, end = parent.end, parent.end + keys.count(tokens)
        node = Node(name, parent, begin, end, tokens, anchor, parent.converted_at, nbytes)
        node.used, node.session, node.pinned = used, session, pinned
        node.full = end - begin == self.block
        parent.children[tokens] = node
        if not anchor:
            parent.branch = parent.branch or parent.parts(tokens)
            insort(parent.order, tokens)
        self.nodes[name] = node
        if payload is not None:
            self.fill(node, payload)
        if filed:
            self.saved(node, filed)
        return node

    def fill(self, node: Node, payload: Any) -> None:
        """A node's state is in RAM now."""
        fresh = not node.ram
        node.payload = payload
        if fresh:
            self._count(node, ram=1)

    def saved(self, node: Node, nbytes: int) -> None:
        """A node's state is on disk now, in a file of `nbytes`."""
        if not node.disk:
            node.filed = nbytes
            self._count(node, disk=1)

    def spill(self, node: Node) -> None:
        """A node's state is in RAM no more.

        Raises:
            ValueError: it is leased.
        """
        if node.leases:
            raise ValueError(f"{node} is in use")
        if node.payload is not None:
            node.payload = None
            self._count(node, ram=-1)
            self._forget(node)

    def unsave(self, node: Node) -> list[Node]:
        """A node's state is on disk no more, and so nothing after it: the nodes whose files may go."""
        gone = []
        for below in [*self._below(node), node]:
            if below.disk:
                self._count(below, disk=-1)
                below.filed = 0
                self._refresh(below)
                gone.append(below)
                self._forget(below)
        return gone

    def subsumed(self, node: Node) -> list[Node]:
        """Blocks that `node` makes useless: they hold fewer of the same tokens, for layers that can be cut anywhere."""
        assert node.parent is not None
        found = (node.parent.children.get(keys.span(node.tokens, 0, n)) for n in range(1, node.end - node.begin))
        return [other for other in found if other is not None and not other.leases and not other.children]

    def useless(self, node: Node) -> bool:
        """Whether a longer block begins with all of a block's tokens, for layers that can be cut anywhere."""
        assert node.parent is not None
        if not node.space.trimmable or node.leases or node.children:
            return False
        near = ((same, other) for same, other in node.parent.near(node.tokens) if other is not node and other.there)
        same, other = next(near, (0, node))
        return other is not node and same == node.end - node.begin

    def touch(self, node: Node, now: float, session: str = "") -> None:
        """A node's sequence was wanted."""
        for each in node.path:
            each.used = max(each.used, now)
            each.session = each.session or session
        if session:
            self.sessions.pop(session, None)
            self.sessions[session] = now
            if len(self.sessions) > _SESSIONS:
                del self.sessions[next(iter(self.sessions))]

    def pin(self, node: Node, length: int) -> None:
        """Mark the first `length` tokens of a sequence as what many requests begin with."""
        for each in node.path:
            each.pinned = each.pinned or each.begin < length or each.end <= length

    def lease(self, node: Node) -> None:
        """Keep a node and everything before it until `release`."""
        for each in node.path:
            each.leases += 1

    def release(self, node: Node) -> None:
        """Undo one `lease`."""
        for each in node.path:
            each.leases -= 1
        self._forget(node)

    def last_used(self, node: Node) -> float:
        """When a node, or its conversation, was last wanted."""
        return max(node.used, self.sessions.get(node.session, 0.0)) if node.session else node.used

    # -- inside

    def _walk(self, root: Node, tokens: bytes, limit: int, *, trimmable: bool, ram_only: bool) -> Match:
        """The longest usable prefix among the sequences of one root."""
        node, best, length, matched, missing = root, root, 0, 0, False
        while True:
            if not trimmable and (anchor := node.children.get(b"")) is not None and _usable(anchor, ram_only):
                best, length = anchor, node.end
            piece = keys.span(tokens, node.end, min(node.end + self.block, limit))
            if not piece:
                break
            onward = None
            for same, child in node.near(piece):
                whole = same == child.end - child.begin
                matched = max(matched, node.end + same)
                if not _usable(child, ram_only):
                    missing = missing or node.end + same > length
                    continue
                if whole and child.full:
                    onward = child
                if trimmable:
                    if node.end + same > length:
                        best, length = child, node.end + same
                    break
                if whole and (anchor := child.children.get(b"")) is not None:
                    if not _usable(anchor, ram_only):
                        missing = True
                    elif child.end > length:
                        best, length = anchor, child.end
                    break
                if node.end + same < max(length, self.least):
                    break
            if onward is None:
                break
            node = onward
        if length == limit:
            return Match(best, length, length, Why.WHOLE)
        if matched <= length:
            return Match(best, length, length, Why.DIVERGES)
        return Match(best, length, matched, Why.ON_DISK if missing and ram_only else Why.UNTRIMMABLE)

    def _below(self, node: Node) -> list[Node]:
        """All nodes after one, the last first."""
        found = []
        todo = list(node.children.values())
        while todo:
            each = todo.pop()
            found.append(each)
            todo.extend(each.children.values())
        return found[::-1]

    def _count(self, node: Node, ram: int = 0, disk: int = 0) -> None:
        self.ram.nodes += ram
        self.ram.bytes += ram * node.nbytes
        self.disk.nodes += disk
        self.disk.bytes += disk * node.filed
        self._refresh(node)
        above = node.parent
        while above is not None:
            above.below_ram += ram
            above.below_disk += disk
            self._refresh(above)
            above = above.parent

    def _refresh(self, node: Node) -> None:
        (self.ram_leaves.add if node.ram and not node.below_ram else self.ram_leaves.discard)(node)
        (self.disk_leaves.add if node.disk and not node.below_disk else self.disk_leaves.discard)(node)

    def _forget(self, node: Node) -> None:
        """Let go of a node that is nowhere, and of those before it that led only here."""
        while node.parent is not None and not (node.there or node.children or node.leases):
            parent = node.parent
            if parent.children.get(node.tokens) is not node:
                break
            del parent.children[node.tokens]
            if not node.anchor:
                parent.order.remove(node.tokens)
            self.nodes.pop(node.id, None)
            self._refresh(node)
            node = parent


def _usable(node: Node, ram_only: bool) -> bool:
    return node.ram or (node.disk and not ram_only)
