"""Owns what must hold of a prefix index at all times."""

from __future__ import annotations

from collections.abc import Iterable

from mlxbcd.cache.index import Index
from mlxbcd.cache.nodes import Node


def faults(index: Index) -> list[str]:
    """What is wrong with an index; nothing should be."""
    found = []
    seen: dict[str, Node] = {}
    todo: list[Node] = [root for space in index.namespaces.values() for root in space.roots.values()]
    roots = set(todo)
    while todo:
        node = todo.pop()
        after = list(below(node))
        if node.below_ram != sum(each.ram for each in after) or node.below_disk != sum(each.disk for each in after):
            found.append(f"{node} counts what is below wrongly")
        if sorted(tokens for tokens in node.children if tokens) != node.order:
            found.append(f"{node} has lost the order of its children")
        if node not in roots:
            seen[node.id] = node
            if not (node.there or node.children or node.leases):
                found.append(f"{node} is nowhere")
            if node.disk and node.parent not in roots and not (node.parent and node.parent.disk):
                found.append(f"{node} is on disk without its parent")
        todo.extend(node.children.values())
    if seen != index.nodes:
        found.append("the nodes by name are not those of the tree")
    for usage, ram, leaves in ((index.ram, True, index.ram_leaves), (index.disk, False, index.disk_leaves)):
        there = [node for node in seen.values() if size(node, ram=ram)]
        if (usage.nodes, usage.bytes) != (len(there), sum(size(node, ram=ram) for node in there)):
            found.append(f"a tier says {usage}, but holds {len(there)} nodes")
        if leaves != {node for node in there if not any(size(each, ram=ram) for each in below(node))}:
            found.append("a tier's leaves are not its leaves")
    return found


def below(node: Node) -> Iterable[Node]:
    """All nodes after one."""
    for child in node.children.values():
        yield child
        yield from below(child)


def size(node: Node, *, ram: bool) -> int:
    """Bytes of a node in one tier."""
    return (node.nbytes if node.ram else 0) if ram else node.filed
