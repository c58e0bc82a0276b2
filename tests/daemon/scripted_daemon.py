"""A daemon process in which everything is real except the work; `--model` says how the service behaves."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))

from fake_service import FakeJob, FakeService

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.serve import logs
from mlxbcd.serve.contract import Fault, Send, Work
from mlxbcd.serve.limits import Limits
from mlxbcd.serve.main import run
from mlxbcd.serve.options import Options, parse

LIMITS = Limits(close_s=0.2, linger_s=0.5)
IMPATIENT = Limits(close_s=0.2, linger_s=0.5, drain_s=0.1)


class ScriptedService(FakeService):
    """Counting the text `release` ends every running request, also while draining."""

    def __init__(self, on_fatal: Fault, script: str | None) -> None:
        super().__init__(on_fatal)
        self._script = script

    @property
    def stuck(self) -> bool:
        return self._script == "hangs"

    def submit(self, request: Work, reply: Send, client: str) -> FakeJob:
        match request:
            case wire.Count(text="release"):
                for job in list(self.running):
                    job.done()
                return self._answer(request, reply, client)
            case wire.Generate(prompt="fault"):
                # Like a device thread that never comes back: it must not keep the process alive.
                threading.Thread(target=threading.Event().wait, daemon=False).start()
        return super().submit(request, reply, client)

    def _answer(self, request: wire.Count, reply: Send, client: str) -> FakeJob:
        job = FakeJob(self, request, reply, client)
        job.send(wire.Counted(id=request.id, count=0))
        return job

    async def close(self) -> None:
        if self._script == "never closes":
            await asyncio.Event().wait()
        await super().close()


async def build(options: Options, on_fatal: Fault) -> ScriptedService:
    loop = asyncio.get_running_loop()
    match options.model:
        case "loads on a line":
            await loop.run_in_executor(None, sys.stdin.readline)
        case "never loads":
            await asyncio.Event().wait()
        case "ignores the end":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
        case "unknown":
            raise ServeError("unknown_model", "there is no model 'unknown': run `mlxbc pull`")
        case "broken":
            raise RuntimeError("the weights are odd")
        case "killed":
            sys.exit(9)
    return ScriptedService(on_fatal, options.model)


if __name__ == "__main__":
    command = parse()
    logs.start(command.options.log_level, command.options.log_file)
    sys.exit(run(command.options, build, IMPATIENT if command.options.model == "impatient" else LIMITS))
