"""Owns systemd's notification protocol: single datagrams of NAME=VALUE lines, to the socket that systemd names."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 1.0
"""How long a message may wait for room in systemd's queue: the event loop waits with it."""


class Notifier:
    """Tells the service manager how the daemon is; does nothing where nobody listens.

    No message ever raises: a daemon that cannot be heard still serves.

    Attributes:
        watchdog_s: a heartbeat is expected at least this often, in seconds; None if none is.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        if address and address[0] not in "/@":
            log.warning("the service manager is not told how the daemon is: %s is no Unix socket", address)
            address = None
        self._address = address or None
        self.watchdog_s = watchdog_s if self._address else None

    def __repr__(self) -> str:
        heartbeat = "" if self.watchdog_s is None else f", heartbeat within {self.watchdog_s:g} s"
        return f"Notifier({self._address}{heartbeat})"

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> Notifier:
        """As the service manager says; its variables are taken out, so that no child takes them for its own."""
        names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        address, period, process = (environ.pop(name, "") for name in names)
        watched = period.isdigit() and int(period) > 0 and process in ("", str(os.getpid()))
        return cls(address, int(period) / 1e6 if watched else None)

    @property
    def wanted(self) -> bool:
        """Somebody listens."""
        return self._address is not None

    def ready(self, status: str) -> None:
        """The daemon serves; `status` is for people."""
        self._send("READY=1", _status(status))

    def stopping(self, status: str) -> None:
        """The daemon ends, whoever asked for it."""
        self._send("STOPPING=1", _status(status))

    def status(self, status: str) -> None:
        """Something that people may want to know."""
        self._send(_status(status))

    def alive(self) -> None:
        """A heartbeat."""
        self._send("WATCHDOG=1")

    def extend(self, seconds: float) -> None:
        """What goes on (starting, stopping) takes longer; the next message comes within `seconds`."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messenger:
                messenger.settimeout(_PATIENCE_S)
                messenger.connect(address)
                messenger.send("\n".join(lines).encode())
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error.strerror or error)


def _status(text: str) -> str:
    """One line, whatever is in it: a second one would be a message of its own."""
    return "STATUS=" + " ".join(text.splitlines())
