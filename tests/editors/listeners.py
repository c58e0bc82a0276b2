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
