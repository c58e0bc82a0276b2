"""Owns what rows take from the prefix cache and leave in it. On the device thread.

Nothing here may fail a request: a state that can't be restored is computed, and one that can't be kept is not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from mlxbcd.cache.service import Space
from mlxbcd.errors import outline
from mlxbcd.methods.autoregressive import Row
from mlxbcd.plan.request import Caching, Keep, Request
from mlxbcd.plan.snapshots import LEAST
from mlxbcd.spec.drafter import Companion, Drafter
from mlxbcd.state.geometry import Key, capacity_for
from mlxbcd.state.layout import Stored
from mlxbcd.state.rows import COLD, Joiner, Rows, RowState, commit

log = logging.getLogger(__name__)


class Reuse:
    """The executor's side of one model's part of the prefix cache.

    Attributes:
        space: that part; None while the model's identity isn't known, or where its states can't be kept.
    """

    def __init__(self) -> None:
        self.space: Space | None = None

    def __repr__(self) -> str:
        return f"Reuse({self.space})"

    def begin(self, key: Key, request: Request, tokens: Sequence[int], rows: Rows) -> int:
        """Let a row join an empty collection, with as much of its prompt as is known; how many tokens that are."""
        if self.space is not None and request.caching.read:
            lease = self.space.take(tokens, request.caching.session)
            try:
                if lease.length:
                    state = lease.restore(rows.layouts, capacity_for(len(tokens)))
                    commit(rows.prepare(join=[Joiner(key, state, len(tokens))]))
                    mx.eval([layout.arrays() for layout in rows.layouts])
                    return lease.length
            except ValueError as error:
                log.error("a cached state could not be restored: %s", outline(error))
            finally:
                lease.release()
        commit(rows.prepare(join=[Joiner(key, COLD, len(tokens))]))
        return 0

    def companion(self, row: Row, drafter: Drafter, hidden: mx.array | None) -> Companion:
        """What a drafter starts from for a row that joins: as much as is known of its text."""
        tokens, caching = row.sequence[:-1], row.request.caching
        space = self.space.companions if self.space is not None else None
        if space is not None and caching.read and drafter.name in row.request.drafts:
            lease = space.take(tokens, caching.session, counted=False)
            try:
                if lease.length:
                    state = lease.restore(drafter.kept, capacity_for(len(tokens) + 1))
                    return drafter.revived(state, tokens, hidden)
            except ValueError as error:
                log.error("a cached companion could not be restored: %s", outline(error))
            finally:
                lease.release()
        return Companion.cold(tokens, hidden)

    def prompt_done(self, key: Key, request: Request, tokens: Sequence[int], rows: Rows) -> None:
        """A row in preparation has processed its prompt. Its whole state is kept where it can be cut as needed."""
        if self.space is not None and self.space.trimmable:
            self.keep(key, request, tokens, len(tokens), rows)

    def left(self, row: Row, rows: Rows, drafter: Drafter | None = None) -> None:
        """A row of the decode group has ended, or may have to be continued elsewhere, and nothing of it is in flight:
        keep what its state covers of its tokens, and its companion.

        A state that has read more, tokens that nobody was sent, is cut back, or not kept.
        """
        tokens, covered = row.sequence, rows.lengths[row.key]
        length = min(len(tokens), covered)
        self.keep(row.key, row.request, tokens, length, rows)
        if drafter is not None and drafter.name in row.request.drafts:
            self._keep_companion(row, tokens, length, drafter)

    def keep(self, key: Key, request: Request, tokens: Sequence[int], length: int, rows: Rows) -> None:
        """Keep the state of a row's first `length` tokens for others, where the request and the model allow it."""
        space = self.space
        if space is None or request.caching.keep is Keep.NOT or length < LEAST or length < rows.reusable_from(key):
            return
        if not space.trimmable and length != rows.lengths[key]:
            return
        try:
            _publish(space, request.caching, tokens, length, rows.layouts, rows.read(key))
        except Exception as error:
            log.error("a state could not be kept: %s", outline(error))

    def _keep_companion(self, row: Row, tokens: Sequence[int], length: int, drafter: Drafter) -> None:
        caching = row.request.caching
        space = self.space.companions if self.space is not None else None
        if space is None or caching.keep is Keep.NOT:
            return
        try:
            state = drafter.held(row.key, length)
            if state is not None and state.length >= LEAST:
                _publish(space, caching, tokens, state.length, drafter.kept, state)
        except Exception as error:
            log.error("a companion could not be kept: %s", outline(error))


def _publish(
    space: Space, caching: Caching, tokens: Sequence[int], length: int, layouts: Sequence[Stored], state: RowState
) -> None:
    disk = caching.keep is Keep.DISK
    space.publish(tokens, length, layouts, state, disk=disk, session=caching.session, pinned=caching.shared)
