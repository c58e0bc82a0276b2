"""Owns pieces of state made of nothing but numbers that follow from their tokens: whoever reads one can tell it whole.

Run as a program, it fills a cache directory and says which pieces are there, until it is killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from mlxbcd.cache import keys
from mlxbcd.cache.disk import Directory
from mlxbcd.cache.files import Header
from mlxbcd.cache.index import Index
from mlxbcd.cache.nodes import Node
from mlxbcd.cache.payload import Leaf, Packer, Payload
from mlxbcd.cache.service import PrefixCache

SPACE: Final = "0123456789abcdef"
NUMBERS: Final = 700_000
"""In each piece: more than two slices of a write."""


def payload_of(name: str, numbers: int = NUMBERS) -> Payload:
    """The state of a piece."""
    packer = Packer()
    seed = int(name[:8], 16)
    part = packer.add("uint32", np.arange(seed, seed + numbers, dtype=np.uint64).astype(np.uint32)[None])
    other = packer.add("uint32", np.arange(7, dtype=np.uint32)[None])
    return packer.payload([Leaf((0,), "recurrent", (part, None, other))])


def whole(name: str, payload: Payload) -> bool:
    """Whether a payload is the state of that piece."""
    (leaf,) = payload.leaves
    numbers = payload.array(leaf.parts[0]) if leaf.parts[0] else np.zeros(0)
    wanted = payload_of(name, numbers.size)
    return bytes(payload.bytes()) == bytes(wanted.bytes()) and payload.leaves == wanted.leaves


def header_of(payload: Payload, tokens: Sequence[int], parent: str | None = None, begin: int = 0) -> Header:
    return Header(
        namespace=SPACE,
        trimmable=True,
        converted_at=0,
        parent=parent or keys.root_id(SPACE, 0),
        begin=begin,
        tokens=keys.pack(tokens),
        anchor=False,
        pinned=False,
        session="",
        leaves=payload.leaves,
        size=payload.size,
    )


def put(cache: PrefixCache, ids: Sequence[int], numbers: int = NUMBERS) -> list[Node]:
    """Store a sequence as publishing does, but for where its state comes from; its nodes."""
    tokens = keys.pack(ids)
    with cache.lock:
        space = cache.index.namespace(SPACE, trimmable=True)
        node, gaps = cache.index.gaps(space, 0, tokens, len(ids))
        for gap in gaps:
            piece = keys.span(tokens, gap.begin, gap.end)
            state = payload_of(keys.block_id(node.id, piece), numbers)
            if not cache._make_room(state.nbytes):
                break
            node = cache.index.add(node, piece, nbytes=state.nbytes, payload=state, used=time.monotonic())
        path = node.path
    if cache.tier is not None:
        cache.tier.want(each for each in path if not each.disk)
    return path


def opened(directory: Path | None, *, ram: int = 1 << 30, disk: int = 1 << 40, floor: int = 0) -> PrefixCache:
    """A cache with blocks of four tokens that has taken in what is in the directory."""
    tier = None if directory is None else Directory(directory)
    cache = PrefixCache(ram, tier, disk=disk, floor=floor, index=Index(block=4, least=1))
    cache.recover()
    return cache


@contextmanager
def cache_at(directory: Path | None, **sizes: int) -> Iterator[PrefixCache]:
    """The same, closed in the end."""
    cache = opened(directory, **sizes)
    try:
        yield cache
    finally:
        cache.close(60)


def fill(directory: Path, first: int) -> None:
    """Write sequence after sequence, and say which pieces are on the disk as soon as they are."""
    cache = opened(directory)
    assert cache.tier is not None
    for start in range(first, first + 1000):
        for node in put(cache, [start, start, 1, 2, 3, start % 3, 5, 6, 7]):
            cache.tier.writer.settle(60)
            assert node.disk
            print(node.id, flush=True)


if __name__ == "__main__":
    fill(Path(sys.argv[1]), int(sys.argv[2]))
