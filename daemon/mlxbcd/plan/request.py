"""Owns the immutable request: everything that decides a result, validated and frozen at submit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Priority(IntEnum):
    """Classes of requests, the best first."""

    INTERACTIVE = 0
    """Somebody waits for the next token: a keystroke, a question on a terminal."""
    NORMAL = 1
    BACKGROUND = 2
    """Whenever the machine has nothing better to do."""


class Constraint(Protocol):
    """What one row may draw, as its tokens become known: it has accepted every token of the row that was read.

    Attributes:
        fault: why the row can't go on, once it can't.
        complete: the row has said all that it may.
    """

    @property
    def fault(self) -> str: ...

    @property
    def complete(self) -> bool: ...

    @property
    def foresees(self) -> bool:
        """Whether the draw after the next token is free, whatever that token is: it may be made before it is read."""
        ...

    def mask(self) -> NDArray[np.uint32] | None:
        """Which tokens may come next: a bit for each, uint32 [ceil(V / 32)], low bits first. None allows all."""
        ...

    def accept(self, token: int) -> None:
        """Take in the row's next token, which is not an end token."""
        ...

    def forced(self) -> list[int]:
        """The tokens that come next whatever is drawn, as far as they are known; empty where there is a choice."""
        ...

    def retract(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def copy(self) -> Constraint:
        """Another one at the same place."""
        ...


class Keep(Enum):
    """Where a request's states may be kept for others."""

    NOT = "none"
    RAM = "ram"
    DISK = "disk"
    """In RAM, and behind that on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caching:
    """What a request takes from the prefix cache and leaves in it.

    Attributes:
        read: it may be restored from what others left.
        keep: where its own states go.
        session: the conversation it belongs to, for what is let go first; empty for none.
        shared: prompt tokens that many other prompts begin with.
        checkpoints: the state is kept while it is generated, so that it can be continued elsewhere.
    """

    read: bool = False
    keep: Keep = Keep.NOT
    session: str = ""
    shared: int = 0
    checkpoints: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a row's tokens are drawn. Values are in range: the wire has checked them.

    Attributes:
        temperature: 0 is greedy (no noise); the filters below then change nothing.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 is off.
        top_k: keep this many of the likeliest tokens; 0 is off.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the history; 1 is off.
        presence_penalty: subtracted once from the logits of every token in the history; 0 is off.
        frequency_penalty: subtracted per occurrence in the history; 0 is off.
        logit_bias: (token id, added logit) pairs, sorted by id.
        seed: with the draw's index it decides all randomness.
        logprobs: report the log-probability of each sampled token.
        top_logprobs: report this many likeliest alternatives as well.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        """No draw is random."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """The history changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row to be: what to process, how to draw, and when to end.

    Attributes:
        prompt: token ids, at least one.
        candidates: outputs to draw from one prefill, each with noise of its own.
        priority: which class it is scheduled in.
        boundaries: prompt positions, ascending, that are planned ends of its prefill wherever the chunks' own are; its
            state is kept there.
        caching: what it has to do with the prefix cache.
        forced: token ids of an earlier run of the same request; processed like the prompt, but the first new draw has
            index ``len(forced)`` and penalties count them as history.
        max_tokens: draws to make in all, forced ones included.
        eos: ids that end the row and have no text.
        sampling: how tokens are drawn.
        stop: strings that end the row where the text first contains one; matched off the device.
        constraint: makes what rules out tokens, one for each row of this request; it has accepted the forced ones.
        drafts: names of the drafters that may guess its next tokens.
        proposes: what its constraint leaves no choice about is guessed, too.
        echo: texts, as token ids, that it may copy from.
        kind: what sort of request it is: what is learnt from one is believed of the next.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    eos: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()
    constraint: Callable[[], Constraint] | None = None
    candidates: int = 1
    priority: Priority = Priority.NORMAL
    boundaries: tuple[int, ...] = ()
    caching: Caching = Caching()
    drafts: frozenset[str] = frozenset()
    proposes: bool = False
    echo: tuple[tuple[int, ...], ...] = ()
    kind: str = "text"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a request needs at least one prompt token")
        if self.max_tokens < 1:
            raise ValueError("a request needs at least one token to generate")
        if self.candidates < 1 or (self.candidates > 1 and self.forced):
            raise ValueError("a request has one candidate, or several and no forced tokens")

    def __repr__(self) -> str:
        resumed = f"+{len(self.forced)} forced" if self.forced else ""
        return f"Request({len(self.prompt)}{resumed} prompt tokens, max {self.max_tokens}, {self.sampling})"
