"""The real daemon, whose device fails as the text of `MLXBC_TEST_FAULT` says, at a prompt of so many tokens.

`raises 7`, `dies 7` and `hangs 7` do it in the first forward of a prompt of 7 tokens; `slow 7` takes a while for each
piece and each step from then on. `loads 0` never comes to the end of loading a model.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import Any

from mlxbcd.model.blas import enable

enable()

from mlxbcd.engine.executor import Executor
from mlxbcd.residency import resident
from mlxbcd.serve import main as process
from mlxbcd.serve import standing

WHAT, LENGTH = os.environ.pop("MLXBC_TEST_FAULT").split()
SLOW_S = 0.05
_advance, _iterate = Executor._advance, Executor.iterate
_slow = threading.Event()


def advance(self: Executor, offered: Any, *rest: Any) -> Any:
    if len(offered.preparing.tokens) == int(LENGTH):
        match WHAT:
            case "raises":
                raise RuntimeError("an odd shape")
            case "dies":
                raise RuntimeError("[METAL] Command buffer execution failed: GPU Timeout Error")
            case "hangs":
                threading.Event().wait()
            case "slow":
                _slow.set()
    return _advance(self, offered, *rest)


def iterate(self: Executor, *arguments: Any, **fields: Any) -> Any:
    if _slow.is_set():
        time.sleep(SLOW_S)
    return _iterate(self, *arguments, **fields)


def build(*arguments: Any) -> Any:
    threading.Event().wait()


if WHAT == "loads":
    resident.build = build
Executor._advance, Executor.iterate = advance, iterate
process.Limits = partial(process.Limits, close_s=0.5)
standing.STUCK_S = standing.BUSY_S = 0.3


if __name__ == "__main__":
    sys.exit(process.main())
