"""Owns daemons that don't: sockets where somebody listens and nobody answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from mlxbc import wire
from mlxbc.framing import Codec, frame

_WELCOME = wire.Welcome(proto=wire.PROTOCOL, server="stuck", version="0", pid=1, models=[], max_frame=wire.FRAME_LIMIT)


@contextmanager
def silent(path: Path, *, greeting: bool = False) -> Iterator[None]:
    """A daemon that reads nothing; with `greeting` it got stuck after it had said welcome, in JSON."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(30)
        accepted: list[socket.socket] = []

        def greet() -> None:
            accepted.append(listener.accept()[0])
            accepted[0].recv(1)
            accepted[0].sendall(frame(_WELCOME, Codec.JSON))

        greeter = Thread(target=greet) if greeting else None
        if greeter:
            greeter.start()
        try:
            yield
        finally:
            if greeter:
                greeter.join()
            for connection in accepted:
                connection.close()
            path.unlink()


@contextmanager
def refusing(path: Path, codec: Codec) -> Iterator[None]:
    """A daemon of another version: it says so to everybody, and hangs up."""
    refusal = wire.Error(code="proto_mismatch", message="the daemon speaks protocol 9; install one version of both")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1)
                    connection.sendall(frame(refusal, codec))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        refuser = Thread(target=refuse)
        refuser.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            refuser.join()
            path.unlink()
