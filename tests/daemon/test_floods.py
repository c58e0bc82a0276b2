"""Clients that flood, write byte by byte, never read or vanish: they delay nobody, and what was held is let go."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, Daemon, Frames
from tiny_daemon import STORY, answer, at_rest, serving

from mlxbc import wire
from mlxbc.framing import Codec, frame

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells about processes"),
]


def descriptors(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.popen.pid}/fd"))


def resident(daemon: Daemon) -> int:
    pages = int(Path(f"/proc/{daemon.popen.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_five_hundred_connections_at_once_are_served_or_told_and_all_let_go(tiny: Daemon) -> None:
    alone = answer(tiny)
    at_rest(tiny)
    before = descriptors(tiny)
    clients: list[Frames] = []
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            client = Frames(tiny.path, Codec.MSGPACK)
            stack.callback(client.close)
            client.socket.settimeout(PATIENCE_S)
            client.say(wire.Hello(proto=wire.PROTOCOL, client="flood"), wire.Ping(id=1))
            clients.append(client)
        first = [client.read() for client in clients]
        assert all(isinstance(reply, wire.Welcome) for reply in first), "there is room for that many"
        assert answer(tiny) == alone
    at_rest(tiny)
    # The connection that asked, and a file being written, may be a moment behind.
    deadline = time.monotonic() + PATIENCE_S
    while (left := descriptors(tiny)) > before:
        assert time.monotonic() < deadline, f"{left} descriptors, {before} before"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("count", "slack"),
    [
        (600, 8_000_000),  # so few don't fill the heap's pieces evenly
        pytest.param(10_000, 2_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_thousands_of_requests_leave_nothing_behind(tiny: Daemon, count: int, slack: int) -> None:
    alone = answer(tiny)
    at_rest(tiny)

    def flood(share: int) -> None:
        with tiny.client() as client:
            for _ in range(share // 50):
                streams = [client.generate("x", temperature=0, max_tokens=2) for _ in range(50)]
                for stream in streams:
                    stream.wait()

    def flood_from_all_sides(count: int) -> None:
        threads = [threading.Thread(target=flood, args=(count // 4,), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert answer(tiny, priority="interactive") == alone

    flood_from_all_sides(max(count // 4, 400))  # caches, pools and the heap have their size after that
    before = resident(tiny)
    flood_from_all_sides(count)
    assert answer(tiny) == alone
    at_rest(tiny)
    assert resident(tiny) < before * 1.03 + slack


def test_who_writes_byte_by_byte_who_stops_half_way_and_who_never_reads_delay_nobody(tiny: Daemon) -> None:
    alone = answer(tiny)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            half = stack.enter_context(socket.socket(socket.AF_UNIX))
            half.connect(str(tiny.path))
            half.sendall(frame(wire.Hello(proto=wire.PROTOCOL), Codec.MSGPACK)[:-3])
        deaf = stack.enter_context(tiny.frames())
        deaf.say(*(wire.Generate(id=n, prompt=STORY, max_tokens=200, logprobs=True) for n in range(20)))
        slow = stack.enter_context(tiny.frames())
        asked = wire.Generate(id=1, prompt=STORY, temperature=0.0, max_tokens=12, resumable=True)
        for byte in frame(asked, Codec.MSGPACK):
            slow.raw(bytes([byte]))
        assert answer(tiny) == alone
        told = slow.until_terminal(1)
        assert [token for one in told if isinstance(one, wire.Token) for token in one.ids] == alone
    at_rest(tiny)


def test_clients_that_vanish_while_they_are_restored_from_the_cache_leave_no_lease(
    path: Path, tiny_model: Path
) -> None:
    prompt, chance = STORY * 18, random.Random(0)
    with serving(path, tiny_model, "--set", "cache.mode=ram") as daemon:
        alone = answer(daemon, prompt)
        for _ in range(40):
            with daemon.frames() as frames:
                frames.say(*(wire.Generate(id=n, prompt=prompt, max_tokens=30) for n in range(3)))
                for _ in range(chance.choice([0, 0, 1, 4, 12])):
                    frames.read()
        assert answer(daemon, prompt) == alone
        at_rest(daemon)
        with daemon.client() as client:
            report = client.cache()
        assert report.hits > 0
        assert report.leases == 0


def test_a_flood_of_garbage_ends_its_own_connections_only(tiny: Daemon) -> None:
    alone = answer(tiny)
    for data in (
        b"\x00\x00\x00\x05garbage",
        b"\xff" * 100,
        b"{" * 100_000,
        b"\x00\x00\x40\x00" + b"\x91" * 0x4000,
        b"GET / ",
    ):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(PATIENCE_S)
                client.connect(str(tiny.path))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):
                        pass
    assert answer(tiny) == alone
    at_rest(tiny)
