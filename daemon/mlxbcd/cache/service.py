"""Owns the prefix cache of all models of a daemon: it finds states that prompts begin with, and takes in new ones.

`Space` is one model's part of it. A lookup gives a `Lease`, which keeps what it found until it is released; `publish`
copies what is new of a row's state out of its buffers. Bookkeeping is under one lock and quick, so any thread may call;
only what touches MLX (`Lease.restore`, `Space.publish`) belongs on the device thread, and what reads the disk
(`Space.fetch`) on none that others wait for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from mlxbcd.cache import eviction, keys
from mlxbcd.cache.disk import Directory
from mlxbcd.cache.files import Header, Unreadable, Unusable
from mlxbcd.cache.index import Gap, Index, Match
from mlxbcd.cache.lookups import Counters, Explained, Lease
from mlxbcd.cache.nodes import Namespace, Node
from mlxbcd.cache.payload import Payload
from mlxbcd.cache.tier import Tier
from mlxbcd.cache.writer import Pace

if TYPE_CHECKING:
    from mlxbcd.state.layout import Stored
    from mlxbcd.state.rows import RowState

log = logging.getLogger(__name__)

LEAST_PUBLISHED: Final = 256
"""Shorter prefixes are processed again sooner than they are found."""


class PrefixCache:
    """The prefix cache of a daemon.

    Args:
        ram: bytes that states in RAM may take; 0 switches the cache off.
        directory: of the SSD tier; None for none.
        disk: bytes its files may take.
        floor: bytes that must stay free on its file system.
        index: an empty one, for tests with blocks of another size.
    """

    def __init__(
        self, ram: int, directory: Directory | None = None, *, disk: int = 0, floor: int = 0, index: Index | None = None
    ) -> None:
        self.ram = ram
        self.counters = Counters()
        self.index = index or Index()
        self.lock = threading.Lock()
        self._leases = 0
        self._closed = False
        self.tier: Tier | None = None
        if directory is not None:
            self.tier = Tier(
                directory, self.index, self.lock, cap=disk, floor=floor, describe=self._describe, let_go=self._let_go
            )
        self._cleared_at = 0.0
        self._promised = 0

    def __repr__(self) -> str:
        return f"PrefixCache({self.index}, {self._leases} leases)"

    @property
    def leases(self) -> int:
        """Prefixes in use."""
        return self._leases

    def space(self, identity: str, *, trimmable: bool) -> Space:
        """The part of a model. `identity` names its weights and everything else that decides what a state means."""
        with self.lock:
            return Space(self, self.index.namespace(identity, trimmable=trimmable))

    def recover(self) -> None:
        """Take in what an earlier daemon left on the disk. Blocks."""
        if self.tier is not None:
            self.tier.recover()

    def set_pace(self, pace: Pace) -> None:
        """How the SSD tier may write from now on."""
        if self.tier is not None:
            self.tier.writer.set_pace(pace)

    def shed(self, nbytes: int) -> int:
        """Free so many bytes of RAM, or as many as nothing uses; how many it were."""
        with self.lock:
            before = self.index.ram.bytes
            self._spill(eviction.from_ram(self.index, time.monotonic(), min(nbytes, before)))
            return before - self.index.ram.bytes

    def clear(self) -> int:
        """Forget everything, on the disk too; bytes freed. What is in use goes when it isn't. Blocks."""
        with self.lock:
            before = self.index.ram.bytes + self.index.disk.bytes
            self._cleared_at = time.monotonic()
            files = self.tier.forget() if self.tier is not None else []
            self._spill(eviction.from_ram(self.index, self._cleared_at, self.index.ram.bytes))
            freed = before - self.index.ram.bytes
        if self.tier is not None:
            for node in files:
                self.tier.directory.remove(node.id)
        return freed

    def release(self, node: Node) -> None:
        """See `Lease.release`."""
        with self.lock:
            self._leases -= 1
            self._let_go(node)
            self._make_room(0)

    def close(self, patience: float = 0.0) -> None:
        """Write what waits to be written, for at most so many seconds. Idempotent."""
        if not self._closed:
            self._closed = True
            if self.tier is not None:
                self.tier.close(patience)

    # -- under the lock

    def _lease(self, match: Match) -> Lease:
        self.index.lease(match.node)
        self._leases += 1
        return Lease(self, match)

    def _let_go(self, node: Node) -> None:
        """Release a node of the index; what was cleared while it was in use goes too."""
        path = node.path
        self.index.release(node)
        for each in reversed(path):
            if each.used <= self._cleared_at and each in self.index.ram_leaves and not each.leases:
                self.index.spill(each)

    def _make_room(self, nbytes: int) -> bool:
        """Drop the oldest states until so many bytes more fit, beside what is being read; whether they do."""
        nbytes += self._promised
        excess = self.index.ram.bytes + nbytes - self.ram
        if excess > 0:
            victims = eviction.from_ram(self.index, time.monotonic(), excess)
            self.counters.evicted += len(victims)
            self._spill(victims)
        return self.index.ram.bytes + nbytes <= self.ram

    def _spill(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.index.spill(node)

    def _describe(self, node: Node, payload: Payload) -> Header:
        assert node.parent is not None
        space = node.space
        return Header(
            namespace=space.name,
            trimmable=space.trimmable,
            converted_at=node.converted_at,
            parent=node.parent.id,
            begin=node.begin,
            tokens=node.tokens,
            anchor=node.anchor,
            pinned=node.pinned,
            session=node.session,
            leaves=payload.leaves,
            size=payload.size,
        )


class Space:
    """One model's part of the cache.

    Attributes:
        companions: the part of what its drafter keeps beside its rows; None where there is nothing of the kind.
    """

    def __init__(self, cache: PrefixCache, names: Namespace) -> None:
        self.cache = cache
        self.companions: Space | None = None
        self._names = names

    def __repr__(self) -> str:
        return f"Space({self._names.name[:12]}, {'trimmable' if self._names.trimmable else 'anchored'})"

    @property
    def name(self) -> str:
        """Names the model, by its contents."""
        return self._names.name

    @property
    def trimmable(self) -> bool:
        """Every prefix of a state is a state."""
        return self._names.trimmable

    def explain(self, ids: Sequence[int]) -> Explained:
        """What a prompt would find, without using it."""
        tokens = keys.pack(ids)
        limit = max(len(ids) - 1, 0)
        with self.cache.lock:
            ram = self.cache.index.match(self._names, tokens, limit, ram_only=True)
            whole = self.cache.index.match(self._names, tokens, limit)
        return Explained(len(ids), ram.length, whole.length, whole.matched, whole.why)

    def take(self, ids: Sequence[int], session: str = "", *, counted: bool = True) -> Lease:
        """The longest usable prefix in RAM, leased. A prompt's last token is never part of it."""
        tokens = keys.pack(ids)
        cache, now = self.cache, time.monotonic()
        with cache.lock:
            match = cache.index.match(self._names, tokens, max(len(ids) - 1, 0), ram_only=True)
            lease = cache._lease(match)
            cache.index.touch(match.node, now, session)
            if counted:
                cache.counters.lookups += 1
                cache.counters.hits += match.length > 0
                cache.counters.tokens += len(ids)
                cache.counters.reused += match.length
        if cache.tier is not None and match.length:
            cache.tier.touch(match.node.path)
        return lease

    def on_disk(self, ids: Sequence[int]) -> int:
        """Bytes that `fetch` would read; 0 where RAM has as much of the prompt as the disk."""
        tokens, limit = keys.pack(ids), max(len(ids) - 1, 0)
        with self.cache.lock:
            whole = self.cache.index.match(self._names, tokens, limit)
            if all(node.ram for node in whole.node.path):
                return 0
            here = self.cache.index.match(self._names, tokens, limit, ram_only=True)
            if here.length >= whole.length:
                return 0
            return sum(node.nbytes for node in whole.node.path if not node.ram)

    def fetch(
        self,
        ids: Sequence[int],
        worth: Callable[[int, int, float], bool],
        session: str = "",
        *,
        counted: bool = True,
    ) -> Lease:
        """The longest usable prefix, read from the disk where that has more than RAM and is worth it. Blocks.

        Args:
            worth: whether to restore tokens [begin, end) in so many seconds, rather than to process them.
        """
        cache = self.cache
        while (tier := cache.tier) is not None:
            tokens, limit = keys.pack(ids), max(len(ids) - 1, 0)
            with cache.lock:
                match = cache.index.match(self._names, tokens, limit)
                missing = [node for node in match.node.path if not node.ram]
                nbytes = sum(node.nbytes for node in missing)
                here = cache.index.match(self._names, tokens, limit, ram_only=True).length
                if not missing or here >= match.length:
                    break
                if not worth(here, match.length, tier.rate.seconds(nbytes)):
                    tier.rate.passed_over()
                    break
                lease = cache._lease(match)
                fits = cache._make_room(nbytes)
                cache._promised += nbytes * fits
            if not fits:
                lease.release()
                break
            try:
                self._read(tier, missing)
            except Unreadable as error:
                log.warning("a cached state can't be read now: %s", error)
                lease.release()
                break
            except Unusable:
                lease.release()
                continue
            except BaseException:
                lease.release()
                raise
            with cache.lock:
                cache.index.touch(match.node, time.monotonic(), session)
                cache.counters.from_disk += (match.length - here) * counted
            tier.touch(match.node.path)
            return lease
        return self.take(ids, session, counted=False)

    def _read(self, tier: Tier, missing: Sequence[Node]) -> None:
        """Read leased nodes whose bytes are promised.

        Raises:
            Unusable: one is gone, damaged, or can't be read now.
        """
        promised = sum(node.nbytes for node in missing)
        try:
            for node in missing:
                payload = tier.load(node)
                with self.cache.lock:
                    self.cache._promised -= node.nbytes
                    promised -= node.nbytes
                    if not node.ram:
                        self.cache.index.fill(node, payload)
        finally:
            with self.cache.lock:
                self.cache._promised -= promised

    def publish(
        self,
        ids: Sequence[int],
        length: int,
        layouts: Sequence[Stored],
        state: RowState,
        *,
        disk: bool,
        session: str = "",
        pinned: int = 0,
    ) -> int:
        """Take in the state of the first `length` tokens of a row; how many pieces were new. On the device thread.

        Args:
            ids: the row's tokens, at least `length`.
            state: may be views of the row's buffers; copies are made before this returns. Where the model can't be
                trimmed it is the state at `length` exactly.
            disk: it may go to the disk.
            pinned: so many of its first tokens are what many requests begin with.
        """
        from mlxbcd.cache import portable

        if not self.trimmable and state.length != length:
            raise ValueError(f"the state of {state.length} tokens has no part for {length}")
        if length > state.length or length < max(state.converted_at, 1):
            raise ValueError(f"a state of {state.length} tokens, converted at {state.converted_at}, cut to {length}")
        cache, tokens = self.cache, keys.pack(ids[:length])
        with cache.lock:
            if cache._closed:
                return 0
            node, gaps = cache.index.gaps(self._names, state.converted_at, tokens, length)
            cache.index.lease(node)
        new: list[Node] = []
        try:
            for gap in gaps:
                if gap.anchor:
                    payload = portable.anchor(layouts, state)
                else:
                    payload = portable.block(layouts, state, gap.begin, gap.end)
                added = self._take_in(node, tokens, gap, payload, session)
                if added is None:
                    break
                node = added
                new.append(node)
        finally:
            with cache.lock:
                cache.index.touch(node, time.monotonic(), session)
                cache.index.pin(node, pinned)
                cache.index.release(node)
                cache.counters.published += len(new)
                dropped = self._subsume(node) if new and self.trimmable else []
                unsaved = [each for each in node.path if not each.disk] if disk and cache.tier is not None else []
        if cache.tier is not None:
            # The longer piece first: a shorter one is of use until it is there.
            cache.tier.want(unsaved)
            cache.tier.drop(dropped)
        return len(new)

    def _take_in(self, parent: Node, tokens: bytes, gap: Gap, payload: Payload, session: str) -> Node | None:
        """Add a piece and move the lease on to it; None if there is no room."""
        cache = self.cache
        with cache.lock:
            if not cache._make_room(payload.nbytes):
                cache.counters.refused += 1
                return None
            node = cache.index.add(
                parent,
                keys.span(tokens, gap.begin, gap.end),
                anchor=gap.anchor,
                nbytes=payload.nbytes,
                payload=payload,
                used=time.monotonic(),
                session=session,
            )
            cache.index.lease(node)
            cache.index.release(parent)
            return node

    def _subsume(self, node: Node) -> list[Node]:
        """Drop shorter pieces that `node` makes useless; those whose files may go."""
        files = []
        for other in self.cache.index.subsumed(node):
            files += self.cache.index.unsave(other)
            if other.ram:
                self.cache.index.spill(other)
        return files
