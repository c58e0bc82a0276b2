"""Owns the soak: mixed load on a real daemon for a long time, and what must be as it was when the load is gone.

```
python tests/bench/soak.py [--minutes 20] [--model NAME --model NAME]
```

Interactive and background requests, cancels, clients that vanish, long prompts and counts, over two models, of which
the second is loaded and dropped again and again: the default model and a tiny one, unless told which. Every text is
compared with what its request says alone. The load pauses four times; between the first pause, which ends the warm-up,
and the last, nothing may have grown: memory of the process by more than 3 %, descriptors, threads, live arrays.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from tiny_directory import write_model

from mlxbc import Client, wire
from mlxbc.errors import MlxbcError

PATIENCE_S = 120.0
PAUSES = 4
SETTLE_S = 1.2
"""How long after its last long text a daemon gives memory back, and a little more."""
LOOKS = 2
POOL_THREADS = 4
"""Threads of pools that may not have been needed before the first pause."""
GROWTH = 0.03
"""By how much the process may grow after the warm-up."""
SLACK_BYTES = 4_000_000
"""What a small process may gain in whole pages and arenas without losing anything."""

_PROMPTS = ("Once upon a time", "The answer to the question is", "In the beginning there was", "A list of colours:")
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3},
)
_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Sample:
    """What a daemon holds while nothing runs."""

    rss: int
    descriptors: int
    threads: int
    active: int
    kv: int


@dataclass(slots=True)
class Outcome:
    """How a soak went.

    Attributes:
        done: what was asked, by kind.
        wrong: texts that were not what they are alone, and errors that should not have come.
        samples: at each pause.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def complaints(self, slack: int = SLACK_BYTES) -> list[str]:
        """Everything that was not as it should be.

        Args:
            slack: bytes that the process may gain beside that share: a C library's heap is never twice the same.
        """
        found = list(self.wrong[:10])
        first, last = self.samples[0], self.samples[-1]
        if last.rss > first.rss * (1 + GROWTH) + slack:
            found.append(f"the process has grown from {first.rss / 1e6:.1f} to {last.rss / 1e6:.1f} MB")
        for name, allowed in (("descriptors", 0), ("threads", POOL_THREADS), ("active", 0), ("kv", 0)):
            before, after = getattr(first, name), getattr(last, name)
            if after > before + allowed:
                found.append(f"{name} went from {before} to {after}")
        return found


class Soak:
    """The load on the daemon that listens on `path` and has process id `pid`."""

    def __init__(self, path: Path, pid: int, models: Sequence[str], report: Callable[[str], None] = print) -> None:
        self.outcome = Outcome()
        self._path = path
        self._pid = pid
        self._models = models
        self._report = report
        self._alone: dict[tuple[str, str, int], list[int]] = {}
        self._go = threading.Event()
        self._over = threading.Event()
        self._busy = 0
        self._lock = threading.Condition()

    def run(self, seconds: float) -> Outcome:
        """Load it for this long."""
        self._learn()
        kinds = (self._answered, self._answered, self._background, self._cancelled, self._vanished, self._counted)
        threads = [
            threading.Thread(target=self._work, args=(kind, number), daemon=True) for number, kind in enumerate(kinds)
        ]
        self._go.set()
        for thread in threads:
            thread.start()
        try:
            for pause in range(1, PAUSES + 1):
                self._over.wait(seconds / PAUSES)
                self.outcome.samples.append(self._pause())
                self._report(f"pause {pause}: {self.outcome.samples[-1]}, {dict(self.outcome.done)}")
        finally:
            self._over.set()
            self._go.set()
            for thread in threads:
                thread.join(PATIENCE_S)
        return self.outcome

    def _learn(self) -> None:
        """What each request says when it has the daemon to itself."""
        with self._client() as client:
            for model, prompt in itertools.product(self._models, _PROMPTS):
                for number, settings in enumerate(_SETTINGS):
                    stream = client.generate(prompt, model=model, max_tokens=_TOKENS, resumable=True, **settings)
                    self._alone[model, prompt, number] = stream.wait().ids

    def _work(self, kind: Callable[[random.Random], None], number: int) -> None:
        chance = random.Random(number)
        while not self._over.is_set():
            self._go.wait()
            with self._lock:
                self._busy += 1
            try:
                kind(chance)
                self.outcome.done[kind.__name__.lstrip("_")] += 1
            except Exception as error:
                self.outcome.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                time.sleep(0.1)  # a daemon that is gone would fill the list at once
            finally:
                with self._lock:
                    self._busy -= 1
                    self._lock.notify_all()

    def _pause(self) -> Sample:
        """Let everything end, and look."""
        self._go.clear()
        with self._lock:
            if not self._lock.wait_for(lambda: self._busy == 0, PATIENCE_S):
                self.outcome.wrong.append("a request hangs")
        deadline = time.monotonic() + PATIENCE_S
        with self._client() as client:
            while time.monotonic() < deadline:
                report = client.status()
                kv = sum(model.kv_bytes for model in report.models)
                quiet = report.running + report.queued + report.connections == 1
                # The model that takes turns has to be gone, or two pauses could not be compared.
                if quiet and not kv and len(report.models) == 1 and not report.loading:
                    break
                time.sleep(0.05)
            else:
                self.outcome.wrong.append(f"it does not come to rest: {report}")
            looks = [self._look(client) for _ in range(LOOKS)]
        if not self._over.is_set():
            self._go.set()
        # What is given back a moment later is not lost, so the least of a few looks counts.
        return Sample(*(min(getattr(look, each.name) for look in looks) for each in fields(Sample)))

    def _look(self, client: Client) -> Sample:
        time.sleep(SETTLE_S)
        client.generate("x", model=self._models[0], max_tokens=1).wait()  # what is alive is told after a step
        report = client.status()
        return Sample(
            rss=_resident(self._pid),
            descriptors=len(os.listdir(f"/proc/{self._pid}/fd")),
            threads=len(os.listdir(f"/proc/{self._pid}/task")),
            active=report.memory_active,
            kv=sum(model.kv_bytes for model in report.models),
        )

    # -- kinds of work

    def _answered(self, chance: random.Random, **fields: Any) -> None:
        model, prompt, number = self._pick(chance)
        with self._client() as client:
            stream = client.generate(prompt, resumable=True, **self._fields(model, number), **fields)
            result = stream.wait()
        self._check(model, prompt, number, result.ids)

    def _background(self, chance: random.Random) -> None:
        self._answered(chance, priority="background")

    def _cancelled(self, chance: random.Random) -> None:
        model, prompt, number = self._pick(chance)
        wanted = chance.randrange(_TOKENS)
        with self._client() as client:
            stream = client.generate(prompt, resumable=True, **self._fields(model, number))
            ids: list[int] = []
            for event in stream:
                ids += event.ids if isinstance(event, wire.Token) else []
                if len(ids) >= wanted:
                    stream.cancel()
        self._check(model, prompt, number, ids, whole=False)

    def _vanished(self, chance: random.Random) -> None:
        model, prompt, number = self._pick(chance)
        client = self._client()
        stream = client.generate(prompt, **self._fields(model, number))
        for _ in range(chance.randrange(1, 8)):
            next(stream, None)
        client.close()

    def _counted(self, chance: random.Random) -> None:
        with self._client() as client:
            words = chance.randrange(1000, 60_000)
            if client.count("word " * words, model=self._models[0]) < words:
                raise AssertionError("tokens are missing")

    # -- small things

    def _client(self) -> Client:
        return Client(self._path, client_name="soak", timeout=PATIENCE_S)

    def _pick(self, chance: random.Random) -> tuple[str, str, int]:
        return chance.choice(self._models), chance.choice(_PROMPTS), chance.randrange(len(_SETTINGS))

    def _fields(self, model: str, number: int) -> dict[str, Any]:
        # The second model is dropped with its last request, and loaded again for the next one.
        keep = {} if model == self._models[0] else {"keep_alive": 0.0}
        return {"model": model, "max_tokens": _TOKENS, **_SETTINGS[number], **keep}

    def _check(self, model: str, prompt: str, number: int, ids: list[int], *, whole: bool = True) -> None:
        alone = self._alone[model, prompt, number]
        if ids != (alone if whole else alone[: len(ids)]):
            self.outcome.wrong.append(f"{model}, {prompt!r}, settings {number}: {ids} instead of {alone}")


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def daemon(models: Sequence[str]) -> Iterator[tuple[Path, int]]:
    """A daemon of its own with these models; its socket and process id."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        path = Path(directory) / "s"
        command = [sys.executable, "-P", "-m", "mlxbcd.serve.main", "--socket", str(path), "--model", models[0]]
        with subprocess.Popen([*command, "--log-level", "warning"], stdin=subprocess.DEVNULL) as process:
            try:
                _await(path, process)
                yield path, process.pid
            finally:
                process.terminate()


def _await(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with Client(path, timeout=PATIENCE_S) as client:
                client.load()
                return
        except MlxbcError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    """Soak, and say how it went; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", action="append", help="twice: the one that stays, and the one that takes turns")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="mlxbc-") as directory:
        models = args.model or ["smollm2", str(write_model(Path(directory) / "tiny"))]
        with daemon(models) as (path, pid):
            outcome = Soak(path, pid, models).run(args.minutes * 60)
    complaints = outcome.complaints()
    for complaint in complaints:
        print(f"WRONG: {complaint}")
    print(f"{sum(outcome.done.values())} pieces of work, {len(outcome.wrong)} wrong")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
