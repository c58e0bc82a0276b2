"""Owns logits processors: penalties for tokens a row has seen, and the bias a request adds to some tokens.

A processor works on the rows it is given, element by element: a row comes out the same alone or in any batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from mlxbcd.errors import ServeError

_FORGETTABLE: Final = 64
"""Newest observed tokens that a history can take back: more than any step runs ahead."""


class History:
    """How often one row has seen each token: its prompt, forced tokens and everything sampled since.

    Attributes:
        counts: float32 [V], lazy; exact up to 2**24 occurrences of one token.
    """

    __slots__ = ("_length", "_newest", "counts")

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Count `tokens`: the prompt, forced ids included.

        Raises:
            ServeError: bad_request, an id is outside the vocabulary.
        """
        _check_ids(tokens, vocab_size, "the prompt")
        self._length = len(tokens)
        self._newest: deque[mx.array] = deque(maxlen=_FORGETTABLE)
        self.counts = mx.zeros(vocab_size, dtype=mx.float32)
        if tokens:
            self.counts = self.counts.at[mx.array(list(tokens), dtype=mx.uint32)].add(1.0)

    def __repr__(self) -> str:
        return f"History({self._length} tokens over a vocabulary of {self.counts.shape[0]})"

    def observe(self, token: mx.array) -> None:
        """Add a sampled token, integer [1], which need not be evaluated yet."""
        self._length += 1
        self._newest.append(token)
        self.counts = self.counts.at[token].add(1.0)

    def supposing(self, tokens: Sequence[int]) -> History:
        """Another history: this one and some more tokens, none of which it can take back."""
        twin = History((), 0)
        twin._length = self._length + len(tokens)
        twin.counts = self.counts
        if tokens:
            twin.counts = twin.counts.at[mx.array(list(tokens), dtype=mx.uint32)].add(1.0)
        return twin

    def forget(self, n: int) -> None:
        """Take back the last `n` observed tokens.

        Raises:
            ValueError: fewer than `n` of the newest tokens are still known.
        """
        if n > len(self._newest):
            raise ValueError(f"{self!r} can take back {len(self._newest)} tokens, not {n}")
        for _ in range(n):
            self._length -= 1
            self.counts = self.counts.at[self._newest.pop()].add(-1.0)


def penalise(
    logits: mx.array, counts: mx.array, repetition: mx.array, presence: mx.array, frequency: mx.array
) -> mx.array:
    """Lower (or raise) the logits of tokens in each row's history; float32 [G, V] in and out.

    First the repetition penalty r, as CTRL defines it (Keskar et al. 2019): a seen token's logit is
    divided by r where it is positive and multiplied by r where it is not. Then OpenAI's formula:
    ``logit −= presence · [count > 0] + frequency · count``. All of them count over prompt and output alike.

    Args:
        counts: float32 [G, V], see `History.counts`.
        repetition, presence, frequency: float32 [G, 1].
    """
    seen = counts > 0
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    return mx.where(seen, repeated, logits) - (presence * seen + frequency * counts)


def bias_vector(logit_bias: Sequence[tuple[int, float]], vocab_size: int) -> mx.array:
    """What a request adds to its logits: float32 [V], zero but for the (token id, bias) pairs.

    Raises:
        ServeError: bad_request, an id is outside the vocabulary.
    """
    ids = [token for token, _ in logit_bias]
    _check_ids(ids, vocab_size, "logit_bias")
    added = mx.array([value for _, value in logit_bias], dtype=mx.float32)
    return mx.zeros(vocab_size, dtype=mx.float32).at[mx.array(ids, dtype=mx.uint32)].add(added)


def column(values: list[float]) -> mx.array:
    """One float32 parameter per row, [G, 1]."""
    return mx.array(values, dtype=mx.float32)[:, None]


def _check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    # MLX checks no index: one outside the array would be written all the same, elsewhere.
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ServeError(
            "bad_request",
            f"{where} names token {wrong}, but this model's ids run from 0 to {vocab_size - 1}; "
            "take ids from the tokenizer of the model you ask",
        )
