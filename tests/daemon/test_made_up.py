"""The daemon that the benchmarks make up has the real one's outside, whatever becomes of that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.wire import MadeUpDaemon
from mlxbc import Client


@pytest.mark.model
def test_it_answers(model_directory: Path) -> None:
    with MadeUpDaemon(model_directory) as daemon:
        daemon.await_ready()
        with Client(daemon.socket) as client, client.generate("Hello", max_tokens=20) as stream:
            result = stream.wait()
        assert (result.usage.generated, result.reason) == (20, "length")
        assert daemon.processor_s() > 0
