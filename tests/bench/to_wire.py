"""Owns how much processor time `mlxbc ask` takes from its start until its question is on the wire.

The daemon is a socket that says welcome, reads the question, and looks up what the client's process has used. Linux
only: it is read from /proc.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from bench.processes import script
from mlxbc import __version__, wire
from mlxbc.framing import Codec, Inbound, frame


def milliseconds(repetitions: int) -> float | None:
    """The median; None where it cannot be measured."""
    if not Path("/proc/self/schedstat").exists():
        return None
    with tempfile.TemporaryDirectory(prefix="mlxbc-bench-") as directory:
        path = f"{directory}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(1)
            environment = {**os.environ, "MLXBC_SOCKET": path}
            # The first one waits for the disk.
            return median([_once(listener, environment) for _ in range(repetitions + 1)][1:])


def _once(listener: socket.socket, environment: dict[str, str]) -> float:
    command = [script("mlxbc"), "ask", "What is the capital of France?"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        connection, _ = listener.accept()
        with connection:
            inbound: Inbound[wire.Request] = Inbound(wire.Request, codec=Codec.MSGPACK, limit=wire.FRAME_CEILING)
            while data := connection.recv(1 << 16):
                for message in inbound.feed(data):
                    if isinstance(message, wire.Generate):
                        used = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e6
                        connection.sendall(frame(_done(message.id), Codec.MSGPACK))
                        process.wait()
                        return used
                    connection.sendall(frame(_WELCOME, Codec.MSGPACK))
        raise RuntimeError(f"{' '.join(command)} exited with {process.wait()} before it asked")


_WELCOME = wire.Welcome(
    proto=wire.PROTOCOL, server="bench", version=__version__, pid=os.getpid(), models=[], max_frame=wire.FRAME_LIMIT
)


def _done(number: int) -> wire.Done:
    return wire.Done(id=number, reason="stop", usage=wire.Usage(prompt=1, generated=0), timings=wire.Timings())
