"""Owns starting the work behind the sockets, in the one order that works: the BLAS before MLX, MLX before the rest."""

from __future__ import annotations

import asyncio

from mlxbcd.config.sources import fixed
from mlxbcd.model.blas import enable
from mlxbcd.residency.names import resolve
from mlxbcd.serve.configuration import Configuration
from mlxbcd.serve.contract import Fault, Service
from mlxbcd.serve.options import Options


async def build_service(options: Options, on_fatal: Fault) -> Service:
    """The service of a daemon. Returns before any model is loaded; loading goes on behind it.

    Raises:
        ServeError: unknown_model, where a default model was named.
    """
    if options.model is not None:
        await asyncio.get_running_loop().run_in_executor(None, resolve, options.model, options.aliases)
    blas = enable(options.blas, options.blas_threads)
    # These import MLX, which binds its BLAS for good.
    from mlxbcd.device import Device
    from mlxbcd.serve.live import LiveService

    device = Device()
    device.start()
    service = LiveService(device, Configuration(options.config or fixed(options)), on_fatal, blas)
    service.warm(preload=options.preload)
    return service
