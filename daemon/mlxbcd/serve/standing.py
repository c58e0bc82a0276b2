"""Owns what the daemon says of itself, `status` and `ps`, without ever asking the device."""

from __future__ import annotations

import math
import os
import time
from typing import Final

import mlxbcd
from mlxbc import wire
from mlxbcd.device import Device
from mlxbcd.engine.runner import Report
from mlxbcd.model.blas import BlasReport
from mlxbcd.residency.resident import Residency, Resident
from mlxbcd.serve.allowance import Allowance
from mlxbcd.serve.caching import Caches
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.generation import Generation
from mlxbcd.serve.manners import Manners
from mlxbcd.serve.metrics import Metrics

BUSY_S: Final = 10.0
"""A device job that takes longer is worth a note in `status`."""
STUCK_S: Final = 60.0
"""One that takes longer than this, and isn't a load, may never return."""
_GOOD_ENDS: Final = frozenset({"stop", "length", "cancelled", "superseded", "deadline"})


class Standing:
    """Looks at everything, and counts the generations that have ended.

    Attributes:
        device_name: what MLX runs on.
        missing_default: why there is no default model, if there should be one.
        draining: no more requests are taken.
        faulted: the device has failed.
        served: generations that ended as they should.
    """

    def __init__(
        self,
        device: Device,
        residency: Residency,
        caches: Caches,
        allowance: Allowance,
        manners: Manners,
        configuration: Configuration,
        blas: BlasReport,
    ) -> None:
        self._device = device
        self._residency = residency
        self._caches = caches
        self._allowance = allowance
        self._manners = manners
        self._configuration = configuration
        self._blas = blas
        self._metrics = Metrics()
        self._began = time.monotonic()
        self.device_name = "starting"
        self.missing_default = ""
        self.draining = False
        self.faulted = False
        self.served = 0
        self.failed = 0
        self._generated = 0
        self._drafted = self._accepted = 0

    @property
    def on_cpu(self) -> bool:
        """MLX runs on the processor."""
        return self.device_name.startswith("cpu")

    @property
    def stuck(self) -> bool:
        """See `contract.Service.stuck`."""
        return self._device.busy_s > STUCK_S and not self._residency.loading

    def count(self, generation: Generation) -> None:
        """A generation has ended."""
        if generation.ended_with in _GOOD_ENDS:
            self.served += 1
        else:
            self.failed += 1
        usage = generation.usage
        self._generated += generation.generated
        self._drafted += usage.drafted
        self._accepted += usage.accepted
        self._metrics.see(generation.ended_with or "", usage, generation.clock.timings())

    def report(self, request_id: int, generations: int) -> wire.StatusReport:
        """The answer to `status`.

        Args:
            generations: requests that wait or run.
        """
        engines = [resident.engine for resident in self._residency.models.values()]
        newest = max(engines, key=lambda engine: engine.last_active).report if engines else Report()
        running = sum(engine.running for engine in engines)
        footprint = self._allowance.system.footprint()
        return wire.StatusReport(
            id=request_id,
            pid=os.getpid(),
            version=mlxbcd.__version__,
            uptime_s=round(time.monotonic() - self._began, 3),
            state="degraded" if self.faulted or self.stuck else "draining" if self.draining else "ready",
            device=self.device_name,
            connections=0,
            running=running,
            queued=generations - running,
            served=self.served,
            failed=self.failed,
            generated_tokens=self._generated,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            memory_active=newest.active_bytes,
            memory_cache=newest.cache_bytes,
            memory_used=self._residency.budget.used,
            memory_limit=self._residency.budget.limit,
            footprint=footprint.bytes,
            footprint_measure=footprint.measure,
            models=self.processes(),
            loading=[wire.Loading(*loading) for loading in self._residency.progress],
            metrics=self._metrics.report(),
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = [self._blas.detail] if self._blas.kind == "reference" else []
        if self.missing_default and not self._residency.models:
            notes.append(self.missing_default)
        notes += self._configuration.notes()
        if self._manners.reason and not self.draining:
            notes.append(f"background requests wait: {self._manners.reason}")
        if self._manners.refusal:
            notes.append("new requests are refused: the system is out of memory")
        notes += self._caches.notes()
        notes += [f"loading {name}" for name in self._residency.loading]
        if self._device.busy_s > BUSY_S and not self._residency.loading:
            notes.append(f"the device has been busy with one step for {self._device.busy_s:.0f} s")
        return notes

    def processes(self) -> list[wire.Process]:
        """The answer to `ps`."""
        return [self._process(resident) for resident in self._residency.models.values()]

    def _process(self, resident: Resident) -> wire.Process:
        engine, built, keeper = resident.engine, resident.built, self._residency.keeper
        expires = keeper.expires_s(resident)
        return wire.Process(
            model=resident.name,
            path=str(resident.source.path),
            bytes=built.bytes,
            dtype=built.dtype,
            context=built.context,
            kv_bytes=engine.report.kv_bytes,
            running=engine.running,
            queued=engine.queued,
            idle_s=0.0 if resident.busy else round(time.monotonic() - resident.used, 3),
            placement="alone" if built.reason else "continuous",
            reason=built.reason,
            pinned=keeper.pinned(resident),
            expires_s=round(expires, 3) if expires < math.inf else None,
            draft=resident.draft,
        )
