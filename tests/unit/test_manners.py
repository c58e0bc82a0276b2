"""What the daemon does for the machine: background work waits, memory is given back, and nothing is asked when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mlxbcd.config.settings import Settings
from mlxbcd.machine.memory import Footprint, Pressure
from mlxbcd.machine.power import Condition
from mlxbcd.serve import manners as module
from mlxbcd.serve.manners import Manners, Sample

LIMIT = 800


class FakeMachine:
    """Power, memory and what gives memory back, as the test says; all in one."""

    def __init__(self) -> None:
        self.now = Condition()
        self.level = Pressure.NORMAL
        self.asked = 0
        self.spare = 0
        self.wanted: list[int] = []
        self.told: list[bool] = []
        self.manners = Manners(self, self, self, lambda: LIMIT, self.offload, self.changed)
        self.manners.take(Settings())

    def condition(self) -> Condition:
        self.asked += 1
        return self.now

    def pressure(self) -> Pressure:
        return self.level

    def total(self) -> int:
        return 0

    def available(self) -> int:
        return 0

    def footprint(self, *, exact: bool = False) -> Footprint:
        return Footprint(0, "rss")

    def offload(self, sample: Callable[[], Sample]) -> Awaitable[Sample]:
        return asyncio.to_thread(sample)

    def changed(self) -> None:
        self.told.append(self.manners.background)

    async def relieve(self, wanted: int) -> int:
        self.wanted.append(wanted)
        freed = min(wanted, self.spare)
        self.spare -= freed
        return freed

    def settle(self) -> None:
        pass

    async def look(self) -> None:
        self.manners._looked = -1e9
        await self.manners.look()


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.mark.parametrize(
    ("condition", "key", "reason"),
    [
        (Condition(on_battery=True), "power_battery", "the machine runs on battery"),
        (Condition(low_power=True), "power_low_power", "the machine saves power"),
        (Condition(hot=True), "power_thermal", "the machine is hot"),
    ],
)
async def test_background_requests_wait_unless_the_user_says_otherwise(
    machine: FakeMachine, condition: Condition, key: str, reason: str
) -> None:
    machine.now = condition
    await machine.look()
    assert (machine.manners.background, machine.manners.reason) == (False, reason)
    await machine.look()
    machine.manners.take(Settings(**{key: "ignore"}))
    await machine.look()
    assert (machine.manners.background, machine.manners.reason) == (True, "")
    assert machine.told == [False, True], "only changes are told"


async def test_they_may_start_again_when_the_machine_is_well(machine: FakeMachine) -> None:
    machine.now = Condition(on_battery=True, hot=True)
    await machine.look()
    assert machine.manners.reason == "the machine runs on battery and the machine is hot"
    machine.now = Condition()
    await machine.look()
    assert machine.told == [False, True]


async def test_memory_is_given_back_step_by_step_and_only_then_are_requests_refused(machine: FakeMachine) -> None:
    machine.spare, machine.level = 150, Pressure.WARN
    await machine.look()
    assert machine.wanted == [LIMIT // 8]
    machine.level = Pressure.CRITICAL
    await machine.look()
    assert machine.wanted[1:] == [LIMIT]
    assert machine.manners.refusal == "", "something was given back"
    await machine.look()
    assert "out of memory" in machine.manners.refusal
    machine.level = Pressure.WARN
    await machine.look()
    assert machine.manners.refusal, "it isn't well yet"
    machine.level = Pressure.NORMAL
    await machine.look()
    assert machine.manners.refusal == ""


async def test_the_machine_is_asked_while_requests_are_open_and_never_otherwise(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.1)
    machine.manners.watch()
    machine.manners.watch()
    while machine.asked < 3:
        await asyncio.sleep(0.01)
    machine.manners.rest()
    asked = machine.asked
    await asyncio.sleep(0.3)
    assert machine.asked == asked
    machine.manners.watch()
    while machine.asked == asked:
        await asyncio.sleep(0.01)
    machine.manners.rest()


async def test_requests_that_come_and_go_do_not_ask_each_time(machine: FakeMachine) -> None:
    for _ in range(20):
        machine.manners.watch()
        await machine.manners.look()
        machine.manners.rest()
    assert machine.asked == 1


async def test_a_machine_that_can_not_be_asked_stops_nothing(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.1)

    def fails() -> Condition:
        machine.asked += 1
        raise OSError("odd")

    monkeypatch.setattr(machine, "condition", fails)
    machine.manners.watch()
    while machine.asked < 2:
        await asyncio.sleep(0.01)
    machine.manners.rest()
    assert machine.manners.background
    assert "could not be asked" in caplog.text
