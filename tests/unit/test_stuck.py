"""When the service says that its device hangs, which is when its heartbeat stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn

import pytest
import pytest_asyncio

from mlxbcd.config.settings import Settings
from mlxbcd.config.sources import fixed
from mlxbcd.device import Device
from mlxbcd.model.blas import BlasReport
from mlxbcd.residency.resident import Residency
from mlxbcd.serve import standing
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.live import LiveService


def never(error: BaseException) -> NoReturn:
    raise error


@pytest_asyncio.fixture
async def service() -> AsyncIterator[LiveService]:
    device = Device()
    device.start()
    configuration = Configuration(fixed(Settings(cache_mode="none", cache_disk=0)))
    service = LiveService(device, configuration, never, BlasReport("reference", "for a test"))
    yield service
    await service.close()


@pytest.mark.parametrize(("busy_s", "stuck"), [(0.0, False), (standing.STUCK_S, False), (standing.STUCK_S + 1, True)])
async def test_a_device_hangs_that_has_been_at_one_step_for_long(
    service: LiveService, monkeypatch: pytest.MonkeyPatch, busy_s: float, stuck: bool
) -> None:
    monkeypatch.setattr(Device, "busy_s", busy_s)
    assert service.stuck is stuck


async def test_loading_may_take_as_long_as_it_takes(service: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "busy_s", 10 * standing.STUCK_S)
    monkeypatch.setattr(Residency, "loading", ["a large model"])
    assert not service.stuck
