"""Owns taking a path over from a running daemon: it gives the path up, finishes what runs and ends; ours waits.

From the moment that ours listens, clients reach it and wait; no connection is ever refused. The old daemon's memory is
free before the new one loads a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Final

from mlxbc import wire
from mlxbc.errors import ConfigError
from mlxbc.framing import Codec, FrameError, Inbound, frame
from mlxbcd import __version__

_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.1
_ID: Final = 1

log = logging.getLogger(__name__)


def ask_for(path: Path) -> int | None:
    """Have the daemon that serves `path` give it up; its process id, or None if no daemon runs, or none any more.

    Raises:
        ConfigError: it can't, or doesn't answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise ConfigError(f"cannot connect to {path}: {error.strerror or error}") from None
        hello = wire.Hello(proto=wire.PROTOCOL, client="mlxbcd", version=__version__)
        shutdown = wire.Shutdown(id=_ID, handover=True)
        try:
            connection.sendall(frame(hello, Codec.MSGPACK) + frame(shutdown, Codec.MSGPACK))
            return _answer(connection)
        except (BrokenPipeError, ConnectionResetError):
            # It has died, or ended by itself: its place is free, or another's already.
            return None
        except (OSError, FrameError):
            raise ConfigError(f"the daemon on {path} does not answer; end it with: mlxbc stop --now") from None


def _answer(connection: socket.socket) -> int:
    replies: Inbound[wire.Reply] = Inbound(wire.Reply, codec=Codec.MSGPACK)
    pid = 0
    while data := connection.recv(65536):
        for reply in replies.feed(data):
            match reply:
                case wire.Welcome():
                    pid = reply.pid
                case wire.Bye():
                    return pid
                case wire.Error():
                    raise ConfigError(f"the running daemon does not hand over ({reply.message}); mlxbc stop ends it")
    raise ConnectionResetError("it hung up")


async def gone(pid: int) -> None:
    """Wait until process `pid` has ended."""
    loop = asyncio.get_running_loop()
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            ended = loop.create_future()
            loop.add_reader(descriptor, ended.cancel)
            try:
                # A descriptor that stays readable would call again and again: cancelling may be repeated.
                await asyncio.wait([ended])
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(_POLL_S)
