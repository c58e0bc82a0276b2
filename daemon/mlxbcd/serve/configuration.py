"""Owns the settings in force: who takes them over, reading them again, and what people are told about them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from mlxbc import wire
from mlxbc.errors import ConfigError
from mlxbcd.config.settings import Settings
from mlxbcd.config.sources import Config, entries, reload

Taker: TypeAlias = Callable[[Settings], None]
"""Puts settings into force; called with those of the start, and again when some have changed."""

log = logging.getLogger(__name__)


class Configuration:
    """The settings of a running daemon. Belongs to the event loop's thread.

    Attributes:
        config: what is in force.
        waiting: keys that the file gives another value, which needs another start.
        loads: how often it was read again.
        error: why the file could not be read last time; empty if it could.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.waiting: tuple[str, ...] = ()
        self.error = ""
        self.loads = 0
        self._takers: list[Taker] = []

    def __repr__(self) -> str:
        return (
            f"Configuration({self.config.file}, waiting {list(self.waiting)}{', ' + self.error if self.error else ''})"
        )

    @property
    def settings(self) -> Settings:
        """What is in force."""
        return self.config.settings

    def tell(self, taker: Taker) -> None:
        """Have `taker` put the settings into force, now and after every change."""
        self._takers.append(taker)
        taker(self.settings)

    def reload(self) -> None:
        """Read the file again. If it is wrong, everything stays as it was, and people are told."""
        self.loads += 1
        try:
            found = reload(self.config)
        except ConfigError as error:
            self.error = str(error)
            log.error("the settings stay as they were: %s", error)
            return
        self.error, self.config, self.waiting = "", found.config, found.waiting
        log.info("read the settings again; changed: %s", ", ".join(found.changed) or "nothing")
        if found.waiting:
            log.warning("another start is needed for: %s", ", ".join(found.waiting))
        if found.changed:
            for taker in self._takers:
                taker(self.settings)

    def notes(self) -> list[str]:
        """What a person should know."""
        notes = [f"the settings in force are older than their file, which is wrong: {self.error}"] if self.error else []
        if self.waiting:
            notes.append(f"restart the daemon for the new value of {', '.join(self.waiting)}")
        return notes

    def report(self, request: int) -> wire.Settings:
        """Everything, as the wire tells it."""
        return wire.Settings(
            id=request,
            file=str(self.config.file or ""),
            settings=[wire.Setting(**entry) for entry in entries(self.config)],
            waiting=list(self.waiting),
            loads=self.loads,
            error=self.error,
        )
