"""Owns the SSD tier: what is written when, how much of the disk it may take, and what it does when the disk fails.

Writing happens behind everything else, on the writer's thread. What can't be written is not an error of any request: it
is logged, and tried again with other state a minute later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from mlxbcd.cache import eviction
from mlxbcd.cache.disk import Directory, Taken
from mlxbcd.cache.files import Header, Unreadable, Unusable
from mlxbcd.cache.index import Index
from mlxbcd.cache.nodes import Node
from mlxbcd.cache.payload import Payload, resident_bytes
from mlxbcd.cache.writer import Closing, Writer

log = logging.getLogger(__name__)

_AGAIN_S: Final = 60.0
"""Seconds to leave a disk alone that has just refused a write."""
_SMOOTHING: Final = 0.3
_OUTLIER: Final = 3.0
"""A read that takes this many times what was expected counts as no more: the machine was asleep, or busy."""
_FADING: Final = 0.9
"""What is left of a rate each time that it is why nothing was read: what looked too slow is tried again."""
_HEADERS: Final = 16384
"""More than a file's header takes."""


@dataclass(slots=True)
class ReadRate:
    """How fast pieces come back, measured.

    Attributes:
        seconds_per_byte: None before any has been read.
    """

    seconds_per_byte: float | None = None

    def saw(self, nbytes: int, seconds: float) -> None:
        """A read took this long."""
        if not nbytes:
            return
        rate = seconds / nbytes
        before = self.seconds_per_byte
        if before is not None:
            rate = before + _SMOOTHING * (min(rate, _OUTLIER * before) - before)
        self.seconds_per_byte = rate

    def passed_over(self) -> None:
        """Nothing was read, since that would take too long."""
        if self.seconds_per_byte is not None:
            self.seconds_per_byte *= _FADING

    def seconds(self, nbytes: int) -> float:
        """Expected for so many bytes; 0 before anything is known, so that it becomes known."""
        return nbytes * (self.seconds_per_byte or 0.0)


class Tier:
    """The pieces on disk.

    Args:
        lock: guards the index.
        cap: bytes of all files together.
        floor: bytes that must stay free on the file system.
        describe: the header of a node's file.
        let_go: releases a node that has been written, under the lock.

    Attributes:
        written, failed: pieces since the start.
        trouble: why the last write failed; empty while writing works.
    """

    def __init__(
        self,
        directory: Directory,
        index: Index,
        lock: threading.Lock,
        *,
        cap: int,
        floor: int,
        describe: Callable[[Node, Payload], Header],
        let_go: Callable[[Node], None],
    ) -> None:
        self.directory = directory
        self.cap = cap
        self.floor = floor
        self.rate = ReadRate()
        self.writer = Writer()
        self.written = 0
        self.failed = 0
        self.trouble = ""
        self._index = index
        self._lock = lock
        self._describe = describe
        self._let_go = let_go
        self._refused_at = -_AGAIN_S
        self._touched: set[str] = set()
        self._generation = 0

    def __repr__(self) -> str:
        return f"Tier({self._index.disk}, {self.writer})"

    def recover(self) -> None:
        """Take in what an earlier daemon left, as far as it fits. Blocks."""
        found = self.directory.scan()
        now = time.monotonic()
        odd: list[str] = []
        with self._lock:
            for each in found:
                header = each.header
                space = self._index.namespace(header.namespace, trimmable=header.trimmable)
                parent = self._index.nodes.get(header.parent) or space.root(header.converted_at)
                if parent.id != header.parent or (parent.parent is not None and not parent.disk):
                    continue
                try:
                    self._index.add(
                        parent,
                        header.tokens,
                        anchor=header.anchor,
                        nbytes=resident_bytes(header.size),
                        filed=each.bytes,
                        used=now - each.unused_s,
                        session=header.session,
                        pinned=header.pinned,
                    )
                except ValueError:
                    # Whole, but cut as no daemon of this version cuts.
                    odd.append(header.name)
            gone = self._over(0, now)
        if odd:
            log.warning("%d pieces of cached state don't fit the others and are removed", len(odd))
        for name in (*odd, *gone):
            self.directory.remove(name)
        if found:
            log.info("the cache directory holds %d pieces of state, %.1f MB", len(found), self._index.disk.bytes / 1e6)

    def want(self, nodes: Iterable[Node]) -> None:
        """Write these behind everything else, in this order."""
        for node in nodes:
            self.writer.submit(partial(self._save, node))

    def forget(self) -> list[Node]:
        """Under the lock: everything is off the disk, what is being written too; whose files may go."""
        self._generation += 1
        tops = [node for node in self._index.nodes.values() if node.disk and node.begin == 0 and not node.anchor]
        return [gone for node in tops for gone in self._index.unsave(node)]

    def drop(self, nodes: Iterable[Node]) -> None:
        """Remove the files of nodes that are on disk no more."""
        names = [node.id for node in nodes]
        if names:
            self.writer.submit(partial(self._remove, names))

    def touch(self, nodes: Iterable[Node]) -> None:
        """Remember beyond this process that these were wanted now."""
        with self._lock:
            idle = not self._touched
            self._touched.update(node.id for node in nodes if node.disk)
            idle = idle and bool(self._touched)
        if idle:
            self.writer.submit(self._touch)

    def load(self, node: Node) -> Payload:
        """Read a node's state, and measure how long it takes.

        Raises:
            Unreadable: it may be read later.
            Unusable: it is gone, or damaged; the node and everything after it are off the disk then.
        """
        began = time.monotonic()
        try:
            payload = self.directory.get(node.id)
        except Unreadable:
            raise
        except Unusable as error:
            if self.directory.lost:
                with self._lock:
                    self.forget()
                self.writer.submit(self._begin_anew)
                raise
            log.warning("a piece of cached state is of no use and is removed: %s", error)
            with self._lock:
                gone = self._index.unsave(node)
            self.drop(gone)
            raise
        self.rate.saw(payload.size, time.monotonic() - began)
        return payload

    def close(self, patience: float) -> None:
        """Write what is queued, for at most so many seconds, and let the directory go."""
        self.writer.close(patience)
        self._touch()
        self.directory.close()

    # -- on the writer's thread

    def _begin_anew(self) -> None:
        """If somebody has removed or replaced the directory, take what is there now, unless that has just failed."""
        if not self.directory.lost or time.monotonic() < self._refused_at + _AGAIN_S:
            return
        try:
            self.directory.renew()
            with self._lock:
                self.forget()
            log.warning("the cache directory has been removed or replaced; what is there now is used")
            self.recover()
        except Taken as error:
            self._refused(str(error))
        except OSError as error:
            self._refused(error.strerror or str(error))

    def _save(self, node: Node) -> None:
        self._begin_anew()
        with self._lock:
            payload = node.payload
            parent = node.parent
            assert parent is not None
            if payload is None or node.disk or self._index.nodes.get(node.id) is not node:
                return
            if parent.parent is not None and not parent.disk:
                return
            if time.monotonic() < self._refused_at + _AGAIN_S:
                return
            self._index.lease(node)
            gone = self._over(payload.size + _HEADERS, time.monotonic())
            generation = self._generation
        try:
            for name in gone:
                self.directory.remove(name)
            self._write(node, payload, generation)
        except Closing:
            raise
        except OSError as error:
            self._refused(error.strerror or str(error))
        finally:
            with self._lock:
                self._let_go(node)
                gone = self._superseded(node)
            for name in gone:
                self.directory.remove(name)

    def _superseded(self, node: Node) -> list[str]:
        """A longer piece may have come while a piece was being written; the names of files that may go."""
        if self._index.nodes.get(node.id) is not node or not self._index.useless(node):
            return []
        gone = self._index.unsave(node)
        if node.ram:
            self._index.spill(node)
        return [each.id for each in gone]

    def _write(self, node: Node, payload: Payload, generation: int) -> None:
        if self._index.disk.bytes + payload.size + _HEADERS > self.cap:
            return
        if self.directory.free() - payload.size < self.floor:
            self._refused(f"less than {self.floor / 1e9:.1f} GB would stay free")
            return
        nbytes = self.directory.put(self._describe(node, payload), payload, self.writer.breathe)
        self.written += 1
        if self.trouble:
            self.trouble = ""
            log.info("the cache directory can be written again")
        parent = node.parent
        assert parent is not None
        with self._lock:
            kept = generation == self._generation and (parent.parent is None or parent.disk)
            if kept:
                self._index.saved(node, nbytes)
        if not kept:
            self.directory.remove(node.id)

    def _refused(self, why: str) -> None:
        self.failed += 1
        self._refused_at = time.monotonic()
        if why != self.trouble:
            self.trouble = why
            log.warning("the cache directory can't be written (%s); requests are served all the same", why)

    def _over(self, size: int, now: float) -> list[str]:
        """Take the oldest pieces off the disk until `size` bytes more fit under the cap; their names."""
        excess = self._index.disk.bytes + size - self.cap
        return [each.id for node in eviction.from_disk(self._index, now, excess) for each in self._index.unsave(node)]

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with self._lock:
                node = self._index.nodes.get(name)
                back = node is not None and node.disk
            if not back:
                self.directory.remove(name)

    def _touch(self) -> None:
        with self._lock:
            names, self._touched = self._touched, set()
        for name in names:
            self.directory.touch(name)
