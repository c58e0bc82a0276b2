"""Owns reading a generation to its end, whatever brings its frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypeVar

from mlxbc import wire
from mlxbc.errors import MlxbcError
from mlxbc.result import Event, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

S = TypeVar("S", bound="EventStream")


class Outcome:
    """What a generation comes to."""

    def __init__(self) -> None:
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The whole generation, once the stream has ended.

        Raises:
            MlxbcError: it hasn't, or it failed.
        """
        if self._result is None:
            raise MlxbcError("this generation has no result yet: iterate over the stream, or wait()")
        return self._result


class EventStream(Outcome, ABC):
    """One generation: an iterator over its `Accepted`, `Progress` and `Token` frames.

    Leaving its `with` block, or `close`, cancels what still runs. The errors that end a generation are raised
    by whatever waits for it: iterating, `text` or `wait`.
    """

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    @abstractmethod
    def __next__(self) -> Event:
        """The next frame. At the end, `_result` is there."""

    @property
    def text(self) -> Iterator[str]:
        """The model's text as it comes, without its reasoning."""
        for event in self:
            if isinstance(event, wire.Token) and event.channel == "text" and event.text:
                yield event.text

    def wait(self) -> Result:
        """Read to the end.

        Raises:
            MlxbcError: the generation failed, or was closed before its end.
        """
        for _event in self:
            pass
        return self.result

    @abstractmethod
    def cancel(self) -> None:
        """Ask the daemon to end the generation; the stream then ends, with reason `cancelled`.

        Other threads may call this, and so may a signal handler that interrupts the iteration.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel the generation if it still runs, and let it go."""
