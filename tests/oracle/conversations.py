"""Owns requests that find, restore and publish states as an engine would, every logit checked against a cold run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import mlx.core as mx

from mlxbcd.cache.disk import Directory
from mlxbcd.cache.index import Index
from mlxbcd.cache.lookups import Lease
from mlxbcd.cache.service import PrefixCache, Space
from mlxbcd.state.composition import Composition
from mlxbcd.state.geometry import capacity_for
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit
from mlxbcd.state.schemes import Quantised
from oracle.alone import Conversion, Text
from oracle.families import Family

BLOCK: Final = 8
"""Tokens of a block in these tests: a text of a few dozen already spans several."""
CHUNK: Final = 8
"""Planned ends are multiples of this."""
ROOMY: Final = 1 << 30


def cache_of(directory: Path | None = None, *, ram: int = ROOMY, disk: int = ROOMY) -> PrefixCache:
    """A prefix cache with small blocks, that has taken in what is in the directory."""
    tier = None if directory is None else Directory(directory)
    cache = PrefixCache(ram, tier, disk=disk, index=Index(block=BLOCK, least=2))
    cache.recover()
    return cache


@contextmanager
def caching(directory: Path | None = None) -> Iterator[PrefixCache]:
    """The same, closed in the end when everything is on the disk."""
    cache = cache_of(directory)
    try:
        yield cache
    finally:
        cache.close(60)
        assert cache.leases == 0


def space_of(cache: PrefixCache, composition: Composition, identity: str = "tiny") -> Space:
    """A model's part of a cache."""
    trimmable = all(layout.positional for layout in composition.layouts(1))
    return cache.space(identity, trimmable=trimmable)


class Conversation:
    """Requests to one family that share a part of a cache.

    Args:
        read: also look on the disk.
    """

    def __init__(
        self, family: Family, space: Space, *, composition: Composition | None = None, read: bool = False
    ) -> None:
        self.family = family
        self.space = space
        self.composition = composition or family.composition
        self.read = read

    def find(self, ids: Sequence[int]) -> Lease:
        """The prefix that a prompt is restored from."""
        if self.read:
            return self.space.fetch(ids, lambda begin, end, seconds: True)
        return self.space.take(ids)

    def request(self, ids: Sequence[int], prompt: int, boundaries: Sequence[int] = ()) -> int:
        """Process a prompt, the first `prompt` of the ids, and "generate" the others; tokens that were restored.

        States are published at the boundaries, at the last token but one of the prompt, and at the end.
        """
        ids = tuple(ids)
        lease = self.find(ids[:prompt])
        rows = Rows(self.composition, widest=CHUNK)
        state = lease.restore(rows.layouts, capacity_for(len(ids))) if lease.length else COLD
        assert state.length == lease.length
        commit(rows.prepare(join=[Joiner("row", state, len(ids))]))
        mx.eval([layout.arrays() for layout in rows.layouts])
        lease.release()
        stops = {*boundaries, prompt - 1}
        logits, at = [], state.length
        ends = sorted({n for n in (*range(CHUNK, prompt, CHUNK), *stops, prompt) if at < n <= prompt})
        for end in (*ends, *range(prompt + 1, len(ids) + 1)):
            logits.append(self.advance(rows, ids[at:end]))
            at = end
            if at in stops or at == len(ids):
                self.publish(rows, ids)
        if logits:
            self._text(rows, ids).check_logits(state.length, mx.concatenate(logits))
        self._text(rows, ids).check_state(at, rows.extract("row").layers)
        return state.length

    def publish(self, rows: Rows, ids: Sequence[int]) -> None:
        """Store the state that the only row has now."""
        length = rows.lengths["row"]
        if length:
            self.space.publish(ids, length, rows.layouts, rows.read("row"), disk=True)

    def advance(self, rows: Rows, ids: Sequence[int]) -> mx.array:
        """Process tokens of the only row; their logits, [n, vocabulary]."""
        turn = rows.begin(len(ids))
        with turn.forward() as caches:
            hidden = self.family.forward.hidden(mx.array([ids]), caches)
        logits = self.family.forward.head(hidden)[0]
        mx.eval(logits, turn.arrays())
        turn.resolve()
        return logits

    def _text(self, rows: Rows, ids: tuple[int, ...]) -> Text:
        converted = rows.reusable_from("row")
        kv = self.composition.kv
        if not converted or kv is None:
            return Text(self.family, ids)
        assert isinstance(kv.scheme, Quantised)
        return Text(self.family, ids, Conversion(kv.scheme, converted))


def settled(cache: PrefixCache) -> None:
    """Wait until everything is written."""
    assert cache.tier is not None
    assert cache.tier.writer.settle(60), "writing takes too long"


def restored_state(lease: Lease, composition: Composition) -> RowState:
    """What a lease restores, evaluated."""
    state = lease.restore(Rows(composition).layouts)
    mx.eval(state.arrays)
    return state
