"""Owns starting the work behind the sockets, in the one order that works: the BLAS before MLX, MLX before the rest."""

from __future__ import annotations

from mlxbcd.model.blas import enable
from mlxbcd.serve.contract import Fault, Service
from mlxbcd.serve.options import Options


async def build_service(options: Options, on_fatal: Fault) -> Service:
    """The service of a daemon. Returns before any model is loaded; loading goes on behind it."""
    blas = enable()
    # These import MLX, which binds its BLAS for good.
    from mlxbcd.device import Device
    from mlxbcd.serve.live import LiveService

    device = Device()
    device.start()
    service = LiveService(device, options.model, on_fatal, blas)
    service.warm(preload=options.preload)
    return service
