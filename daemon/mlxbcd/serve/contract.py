"""Owns the seam between the front and the work: what a session may ask of the service behind the sockets.

The front (sockets, framing, backpressure) is written against these protocols alone, so it is tested with a
scripted service and real sockets, and the service is tested without either. Everything here happens on the
loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from mlxbc import wire

if TYPE_CHECKING:
    from mlxbcd.serve.options import Options

Work: TypeAlias = (
    wire.Generate
    | wire.Explain
    | wire.Tokenize
    | wire.Count
    | wire.Models
    | wire.Load
    | wire.Unload
    | wire.Status
    | wire.Ps
    | wire.Watch
    | wire.Trace
    | wire.Config
    | wire.Probe
    | wire.Prime
    | wire.Cache
    | wire.CacheClear
)
"""The requests that a service answers; the front answers the others itself."""

Cause: TypeAlias = Literal["cancelled", "superseded", "disconnected"]
"""Why a request is ended early: by its client, by a newer one with the same key, or because the client has gone."""

Send: TypeAlias = Callable[[wire.Reply], None]
"""Takes the replies to one request. Never blocks; may be called from within `submit` and `cancel`."""

Fault: TypeAlias = Callable[[BaseException], None]
"""Says that the device can no longer be trusted. May be called from any thread."""


class Job(Protocol):
    """One submitted request."""

    def cancel(self, reason: Cause = "cancelled") -> None:
        """End it early. Idempotent; the terminal reply still comes."""


class Service(Protocol):
    """Everything behind the sockets."""

    @property
    def stuck(self) -> bool:
        """The device has been at one step for so long that it may never return; never while a model loads."""

    def resident(self) -> list[str]:
        """Names of the resident models."""

    def submit(self, request: Work, reply: Send, client: str) -> Job:
        """Start `request` and return at once.

        Replies arrive during the call or later and end with exactly one terminal reply (`wire.TERMINAL`),
        also after `Job.cancel`. `client` names who asks, for fairness between clients.

        Raises:
            ServeError: the request is refused; the front sends the terminal reply.
        """

    def reload(self) -> None:
        """The settings may have changed: read them again. Never raises."""

    async def drain(self) -> None:
        """Refuse new requests with `shutting_down`; return when none is running. May be cancelled."""

    async def close(self) -> None:
        """Fail what still runs with `shutting_down`, free the models and stop the device's thread."""


class Build(Protocol):
    """Makes the service of a daemon; cancelled if the daemon is told to stop before it is ready."""

    def __call__(self, options: Options, on_fatal: Fault) -> Awaitable[Service]: ...
