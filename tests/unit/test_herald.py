"""A service manager hears that the daemon is ready, a heartbeat while the device moves, and that it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxbcd.serve.herald import Herald
from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.notify import Notifier

PATIENCE_S = 10.0
OFTEN_S = 0.02
NEVER_S = 1000.0


class Patient:
    """Something that can hang; each look at it is counted."""

    def __init__(self) -> None:
        self.hangs = False
        self.looks = 0

    @property
    def stuck(self) -> bool:
        self.looks += 1
        return self.hangs

    async def looked_at(self, times: int) -> None:
        wanted = self.looks + times
        async with asyncio.timeout(PATIENCE_S):
            while self.looks < wanted:
                await asyncio.sleep(0)


class Manager:
    """The service manager's end."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.address = str(path)

    async def hears(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await asyncio.get_running_loop().sock_recv(self.socket, 1000)).decode()

    def rest(self) -> list[str]:
        """What it has heard and not been asked about."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(1000).decode())
            except BlockingIOError:
                return found


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "n")
    yield made
    made.socket.close()


READY = "READY=1\nSTATUS=serving on /run/s"
STOPPING = "STOPPING=1\nSTATUS=stopping: running requests finish first"
EXTEND = "EXTEND_TIMEOUT_USEC=30000000"


def herald(manager: Manager, watchdog_s: float | None, patient: Patient, lifecycle: Lifecycle) -> Herald:
    return Herald(Notifier(manager.address, watchdog_s), lifecycle, patient, "/run/s")


async def test_ready_comes_first_then_a_heartbeat_and_another(manager: Manager) -> None:
    async with herald(manager, OFTEN_S, Patient(), Lifecycle()):
        assert [await manager.hears() for _ in range(4)] == [READY, *["WATCHDOG=1"] * 3]


async def test_the_end_is_told_when_it_is_asked_for_with_more_time_for_it(manager: Manager) -> None:
    lifecycle = Lifecycle()
    async with herald(manager, NEVER_S, Patient(), lifecycle):
        assert [await manager.hears() for _ in range(2)] == [READY, "WATCHDOG=1"]
        lifecycle.stop(drain=True)
        assert [await manager.hears() for _ in range(3)] == [STOPPING, "WATCHDOG=1", EXTEND]
    assert manager.rest() == []


async def test_a_daemon_that_ends_at_once_tells_it_all_the_same(manager: Manager) -> None:
    async with herald(manager, None, Patient(), Lifecycle()):
        pass
    assert manager.rest() == [READY, STOPPING]


async def test_time_is_asked_for_as_long_as_stopping_takes(manager: Manager) -> None:
    lifecycle = Lifecycle()
    async with herald(manager, OFTEN_S, Patient(), lifecycle):
        lifecycle.stop(drain=True)
        while await manager.hears() != STOPPING:
            pass
        assert [await manager.hears() for _ in range(6)] == ["WATCHDOG=1", EXTEND] * 3


async def test_a_device_that_hangs_stops_the_heartbeat_and_people_see_why(manager: Manager) -> None:
    patient = Patient()
    async with herald(manager, OFTEN_S, patient, Lifecycle()):
        assert [await manager.hears() for _ in range(2)] == [READY, "WATCHDOG=1"]
        patient.hangs = True
        while (heard := await manager.hears()) == "WATCHDOG=1":
            pass
        assert heard == "STATUS=the device does not move"
        await patient.looked_at(3)
        assert manager.rest() == []


async def test_a_device_that_moves_again_is_alive_again(manager: Manager) -> None:
    patient = Patient()
    patient.hangs = True
    async with herald(manager, OFTEN_S, patient, Lifecycle()):
        assert [await manager.hears() for _ in range(2)] == [READY, "STATUS=the device does not move"]
        patient.hangs = False
        assert [await manager.hears() for _ in range(2)] == ["STATUS=serving on /run/s", "WATCHDOG=1"]


async def test_a_device_that_hangs_while_stopping_gets_no_more_time(manager: Manager) -> None:
    patient, lifecycle = Patient(), Lifecycle()
    patient.hangs = True
    async with herald(manager, OFTEN_S, patient, lifecycle):
        lifecycle.stop(drain=True)
        while await manager.hears() != STOPPING:
            pass
        await patient.looked_at(3)
        assert manager.rest() == []


async def test_without_heartbeats_nothing_is_looked_at_while_serving(manager: Manager) -> None:
    patient = Patient()
    async with herald(manager, None, patient, Lifecycle()):
        assert await manager.hears() == READY
        await asyncio.sleep(0)
        assert patient.looks == 0


async def test_without_a_manager_no_task_runs() -> None:
    before = asyncio.all_tasks()
    async with Herald(Notifier(None, 1.0), Lifecycle(), Patient(), "/run/s"):
        assert asyncio.all_tasks() == before


async def test_leaving_leaves_no_task(manager: Manager) -> None:
    before = asyncio.all_tasks()
    async with herald(manager, OFTEN_S, Patient(), Lifecycle()):
        await manager.hears()
    assert asyncio.all_tasks() == before
