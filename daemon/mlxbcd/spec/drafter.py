"""Owns the interface every drafter meets: what a group of rows asks of whoever proposes their next tokens.

What a drafter proposes never changes what is drawn, so anything may stand behind it. A drafter with state of its own
keeps a *companion* of each row, which covers the tokens that the row's state covers; some of them may be *owed*, known
and not yet processed, until the next draft or until the state is wanted whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import mlx.core as mx

from mlxbcd.sampling.sampler import RowSampler, Samplers
from mlxbcd.state.geometry import Key
from mlxbcd.state.layout import Stored
from mlxbcd.state.rows import COLD, PreparedChange, RowState

LOOKUP: Final = "lookup"
"""The drafter that every model has: what followed where the row's newest tokens stand already. See `spec.echo`."""

READ_OF_PROMPT: Final = 256
"""Tokens at the end of a prompt whose hidden states are kept for a drafter that reads them."""


class Selection(Enum):
    """How a drafter's tokens are drawn. One that scores a list of tokens draws of these: see `token_list`."""

    REQUEST = "request"
    """By the row's own rules, with the noise of the draw that each stands for."""
    LIKELIEST = "likeliest"

    def draw(self, logits: mx.array, samplers: Samplers) -> mx.array:
        """A token for each row of logits, [B, V] or as wide as the samplers' list: uint32 [B], lazy."""
        if self is Selection.LIKELIEST:
            return samplers.named(mx.argmax(logits, axis=-1))
        return samplers.draw(logits).tokens


def token_list(ids: Sequence[int], vocab_size: int) -> mx.array:
    """The tokens that a drafter scores, uint32 [K], as `Samplers` takes them.

    Raises:
        ValueError: there are none, some stand there twice, or some are outside the target's vocabulary.
    """
    if not ids or len(set(ids)) < len(ids) or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"the list of {len(ids)} tokens that are scored for drafts must name at least one, each once, "
            f"from 0 to {vocab_size - 1}"
        )
    return mx.array(list(ids), dtype=mx.uint32)


@dataclass(frozen=True, slots=True)
class Asked:
    """A row that wants proposals.

    Attributes:
        pending: its newest token, which no forward has read.
        sampler: how its next tokens will be drawn; to be copied, never advanced.
        most: proposals that it has room for, perhaps none.
    """

    key: Key
    pending: int
    sampler: RowSampler
    most: int


@dataclass(frozen=True, slots=True)
class Covered:
    """Tokens of a row that the target has processed for good."""

    key: Key
    tokens: Sequence[int]


@dataclass(slots=True)
class Companion:
    """A drafter's state of a row outside any group.

    Attributes:
        state: what it has processed.
        owed: tokens behind those that the target has processed and it has not.
        hidden: the target's hidden states for the last n of these, [1, n, D], for a drafter that reads them; see
            `Drafter.commit` for their width.
    """

    state: RowState
    owed: list[int]
    hidden: mx.array | None = None

    @property
    def length(self) -> int:
        """Tokens of the row that it stands for."""
        return self.state.length + len(self.owed)

    @classmethod
    def cold(cls, tokens: Sequence[int], hidden: mx.array | None = None) -> Companion:
        """Of a row whose tokens nothing has been done with."""
        return cls(COLD, list(tokens), hidden)


class Change(Protocol):
    """A drafter's half of a membership change, ready to commit."""

    @property
    def prepared(self) -> Sequence[PreparedChange]:
        """Changes of its collections, to be committed together with the target's."""
        ...

    def commit(self) -> None:
        """What is left to do then. Cannot fail."""
        ...


class Drafter(Protocol):
    """Proposes tokens for the rows of one group. On the device thread.

    Attributes:
        name: what requests call it.
        reads_hidden: it wants the target's hidden states of all tokens that are covered.
        taps: the layers of the target whose hidden states these are, side by side; the final ones without any.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads_hidden(self) -> bool: ...

    @property
    def taps(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes of its state."""
        ...

    @property
    def token_bytes(self) -> float:
        """Bytes of its state per token that a row has room for."""
        ...

    def seconds(self, rows: int, depth: int) -> float:
        """What a draft for so many rows is expected to take; 0 while nobody knows."""
        ...

    def prepare(self, *, keep: Collection[Key], join: Mapping[Key, Companion]) -> Change:
        """Prepare a change: rows not in `keep` leave, those in `join` enter."""
        ...

    def draft(self, rows: Sequence[Asked], depth: int) -> list[list[int]]:
        """Proposals for each row, 0 … min(depth, its `most`) of them. Rows that aren't asked about stay as they are."""
        ...

    def commit(self, covered: Sequence[Covered], hidden: mx.array | None) -> None:
        """Follow the target: what a draft has run ahead is taken back or kept, and what it lacks is owed.

        Args:
            covered: of every row, tokens processed since the last commit.
            hidden: [B, N, D] of these tokens, or [B, N, taps · D], rows in the same order, each from position 0 on;
                None where the drafter does not read it.
        """
        ...

    def capture(self, key: Key) -> Companion:
        """An independent copy of a row's companion, with nothing owed."""
        ...

    @property
    def kept(self) -> Sequence[Stored]:
        """How what `held` gives is stored, layer by layer."""
        ...

    def held(self, key: Key, length: int) -> RowState | None:
        """What a row's companion has to keep for later: its state, of so many of the row's tokens as its `length` says.

        Args:
            length: tokens that the target's state covers.

        Returns:
            Views, until anything of the group changes; None where there is nothing that could be used.
        """
        ...

    def revived(self, state: RowState, tokens: Sequence[int], hidden: mx.array | None) -> Companion:
        """The companion of a row that joins, from what was kept of its first `state.length` tokens.

        Args:
            tokens: that the target covers.
            hidden: of the last n of them, [1, n, D], for a drafter that reads them.
        """
        ...

    def discard(self) -> None:
        """Let all rows go."""
        ...
