"""Owns `mlxbcd`, the daemon's process: from its command line to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from mlxbc import variables
from mlxbc.errors import ConfigError
from mlxbcd.errors import ServeError
from mlxbcd.serve import activation, logs, takeover
from mlxbcd.serve.contract import Build, Fault, Service
from mlxbcd.serve.limits import Limits
from mlxbcd.serve.listen import AlreadyRunning, Listener, adopt, listen
from mlxbcd.serve.notify import Notifier
from mlxbcd.serve.options import Options, parse

log = logging.getLogger("mlxbcd.serve.main")

_OTHER_FILES: Final = 256
"""Descriptors for all that isn't a connection: weights, caches, logs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon, or start one in the background; the exit code, with which a daemon ends the process itself.

    0 means that nothing should be started again: told to stop, or another daemon serves already. 78 is a
    setting that can't work, 70 a failure after which a service manager should start the daemon again.
    """
    os.umask(0o077)
    try:
        command = parse(argv)
        doubts = variables.doubts(os.environ)
        if command.detach:
            for doubt in doubts:
                sys.stderr.write(f"mlxbcd: {doubt}\n")
            return _detach(command.options, wait=command.wait)
        logs.start(command.options.log_level, command.options.log_file, command.options.log_format)
        for doubt in doubts:
            log.warning("%s", doubt)
    except (ConfigError, OSError) as error:
        return _complain(error)
    faulthandler.enable()
    return _end(run(command.options, _service))


def run(options: Options, build: Build, limits: Limits | None = None) -> int:
    """Serve on `options.socket` with the service that `build` makes, until told to stop; the exit code.

    The socket listens before the service is built, so that a client that comes early waits instead of
    failing, and the loser of a race for the socket has not loaded anything. A socket that a service manager
    passes is used instead, wherever it is.
    """
    limits = limits or Limits()
    notifier = Notifier.from_environment()
    try:
        inherited = activation.inherited()
        predecessor = takeover.ask_for(options.socket) if options.replace and inherited is None else None
        if inherited is None:
            listener = listen(options.socket, replacing=predecessor is not None)
        else:
            listener = adopt(inherited)
    except AlreadyRunning as error:
        # To systemd, a service that ends before it was ready has failed, and would be started again.
        notifier.ready(str(error))
        sys.stderr.write(f"mlxbcd: {error}\n")
        return os.EX_OK
    except ConfigError as error:
        return _complain(error)
    import uvloop

    with listener:
        _allow_files(limits.connections + _OTHER_FILES)
        try:
            code: int = uvloop.run(_serve(options, build, limits, listener, notifier, predecessor))
            return code
        except ServeError as error:
            log.error("cannot serve: %s", error.message)
            return os.EX_CONFIG
        except Exception:
            # It comes from starting or stopping, never from a request: the message quotes no prompt.
            log.exception("cannot serve")
            return os.EX_SOFTWARE


async def _serve(
    options: Options,
    build: Build,
    limits: Limits,
    listener: Listener,
    notifier: Notifier,
    predecessor: int | None = None,
) -> int:
    from mlxbcd.serve.herald import Herald
    from mlxbcd.serve.lifecycle import Lifecycle
    from mlxbcd.serve.server import Server

    started = time.monotonic()
    loop = asyncio.get_running_loop()
    lifecycle = Lifecycle()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.signalled, limits.drain_s)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log.info("listening on %s (pid %d)", listener.path, os.getpid())
    if listener.inherited and not _same(listener.path, options.socket):
        log.warning("that is the service manager's socket, but clients look for %s", options.socket)

    def on_fatal(error: BaseException) -> None:
        loop.call_soon_threadsafe(lifecycle.fail, error)

    service = await lifecycle.unless_asked(_build_after(predecessor, build, options, on_fatal), limits.close_s)
    if service is not None:
        loop.add_signal_handler(signal.SIGHUP, service.reload)
        log.info("ready after %.2f s", time.monotonic() - started)
        async with Herald(notifier, lifecycle, service, str(listener.path)):
            await Server(service, lifecycle, limits=limits, path=listener).serve(listener.socket)
    log.info("stopped")
    if lifecycle.fault is not None or lifecycle.stuck:
        _leave(listener, lifecycle.exit_code)
    return lifecycle.exit_code


async def _build_after(predecessor: int | None, build: Build, options: Options, on_fatal: Fault) -> Service:
    """The service, once a daemon that has handed over has ended: its memory may be what the models need."""
    if predecessor is not None:
        log.info("taking over from process %d, which finishes what runs there", predecessor)
        await takeover.gone(predecessor)
    return await build(options, on_fatal)


async def _service(options: Options, on_fatal: Fault) -> Service:
    from mlxbcd.serve.service import build_service

    return await build_service(options, on_fatal)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _leave(listener: Listener, code: int) -> NoReturn:
    """End the process now: leaving the loop would wait for threads that may never return."""
    listener.close()
    _end(code)


def _end(code: int) -> NoReturn:
    """End the process without taking the interpreter down first.

    A thread that has used MLX destroys its part of MLX after Python has joined it, and needs the interpreter for that:
    one that is being taken down meanwhile would abort the process.
    """
    logging.shutdown()
    os._exit(code)


def _detach(options: Options, *, wait: bool) -> int:
    from mlxbcd.serve.detach import detach

    assert options.log_file is not None
    # -P: the directory that the daemon is started in must not be able to replace its modules.
    command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", *options.arguments()]
    return detach(command, options.socket, options.log_file, wait=wait, replace=options.replace)


def _allow_files(wanted: int) -> None:
    """Raise the soft limit on open files, which is 256 under some service managers, as far as is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning("the limit of %d open files is too low for limits.connections; %d would do", hard, wanted)


def _complain(error: Exception) -> int:
    sys.stderr.write(f"mlxbcd: {error}\n")
    return os.EX_CONFIG


if __name__ == "__main__":
    sys.exit(main())
