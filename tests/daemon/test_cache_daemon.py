"""Real daemons with a prefix cache on the real model: chats that go on, all kinds of ends, and answers that survive."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, Daemon, daemon, socket_path
from stories import LONG

from mlxbc import Client, wire
from mlxbc.errors import ConnectionLost
from mlxbc.resume import Resumable

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PREFIX = LONG[: len(LONG) // 6]
"""About 350 tokens."""


def cached(directory: Path) -> list[str]:
    """Arguments of a daemon that keeps its cache there."""
    return ["--set", "cache.mode=disk", "--set", f"cache.directory={directory}", "--cache-disk", "2GB"]


def ask(client: Client, messages: list[wire.Message], tokens: int = 12) -> tuple[str, wire.Usage]:
    with client.generate(messages=messages, temperature=0, max_tokens=tokens) as stream:
        result = stream.wait()
    return result.text, result.usage


def say(role: str, content: str) -> wire.Message:
    return wire.Message(role=role, content=content)


def known(client: Client) -> None:
    """Wait until the daemon has found out which model it is: the first time, it reads all of it."""
    began = time.monotonic()
    while client.explain("x").cached is None:
        assert time.monotonic() < began + PATIENCE_S
        time.sleep(0.01)


def settled(client: Client) -> wire.CacheReport:
    """Wait until everything is written."""
    began = time.monotonic()
    while client.status().running or (report := client.cache()).pending:
        assert time.monotonic() < began + PATIENCE_S
        time.sleep(0.01)
    return report


def test_a_chat_reuses_every_turn_over_restarts_of_every_kind(
    path: Path, tmp_path: Path, model_directory: Path
) -> None:
    messages = [say("user", PREFIX)]
    before = 0
    for end in ("stops", "is killed", "goes on"):
        with daemon(path, model_directory, *cached(tmp_path)) as process, process.client() as client:
            known(client)
            for _ in range(2 if not before else 1):
                text, usage = ask(client, messages)
                if before:
                    assert usage.cached >= 0.95 * before, f"after it {end}"
                before = usage.prompt + usage.generated
                messages += [say("assistant", text), say("user", "Go on.")]
            report = settled(client)
            assert report.disk_entries >= 2
            assert report.trouble == ""
            if end == "stops":
                client.shutdown()
                process.ended()
            elif end == "is killed":
                process.popen.kill()
    assert (tmp_path / "states" / "CACHEDIR.TAG").exists()


def test_primed_cleared_and_explained(path: Path, tmp_path: Path, model_directory: Path) -> None:
    environment = {**os.environ, "MLXBC_SOCKET": str(path)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "mlxbc", "cache", *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        ).stdout

    with daemon(path, model_directory, *cached(tmp_path)) as process, process.client() as client:
        known(client)
        assert re.fullmatch(r"\d+ tokens, 0 of them from the cache\n", run("prime", PREFIX))
        settled(client)
        found = re.match(r"(\d+) of (\d+) tokens would be reused; it is all there", run("explain", PREFIX))
        assert found
        assert int(found[1]) == int(found[2]) - 1
        found = re.match(r"(\d+) of (\d+) tokens .* goes on with other text", run("explain", "Something else."))
        assert found
        assert int(found[1]) < int(found[2]) - 2, "the template's own beginning alone"
        _, usage = ask(client, [say("user", PREFIX)])
        assert usage.cached == usage.prompt - 1
        settled(client)
        shown = run()
        assert str(tmp_path / "states") in shown
        assert re.search(r"hits +1 of 2 requests", shown)
        assert re.fullmatch(r"freed [\d.]+ MB\n", run("clear"))
        assert ask(client, [say("user", PREFIX)])[1].cached == 0


class Supervisor:
    """Starts a daemon, and again whenever it has not ended by itself, as a service manager does."""

    def __init__(self, path: Path, model: Path, *arguments: str) -> None:
        self.path = path
        self.started = 0
        self._make = lambda: Daemon(path, model, *arguments)
        self._over = False
        self.daemon = self._start()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def close(self) -> None:
        self._over = True
        self.daemon.popen.kill()
        self._thread.join()

    def _start(self) -> Daemon:
        self.started += 1
        process = self._make()
        # Nobody reads its log: it must not fill the pipe.
        threading.Thread(target=process.popen.communicate, daemon=True).start()
        return process

    def _watch(self) -> None:
        while True:
            code = self.daemon.popen.wait()
            if self._over or code == 0:
                return
            self.daemon = self._start()


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Supervisor]:
    """One for all tests, since a daemon takes a while to start. No harm done to it lasts."""
    with socket_path() as path:
        running = Supervisor(path, model_directory, *cached(tmp_path_factory.mktemp("cache")))
        yield running
        running.close()


def connected(path: Path) -> Client:
    began = time.monotonic()
    while True:
        try:
            return Client(path, client_name="test", timeout=PATIENCE_S)
        except Exception:
            assert time.monotonic() < began + PATIENCE_S
            time.sleep(0.02)


GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "seed": 11}


@pytest.mark.parametrize(
    ("tokens", "sampler"),
    [
        pytest.param(40, SEEDED, id="seeded"),
        pytest.param(400, GREEDY, id="400-greedy", marks=pytest.mark.slow),
        pytest.param(400, SEEDED, id="400-seeded", marks=pytest.mark.slow),
    ],
)
def test_killed_while_it_answers_the_whole_text_is_that_of_an_uninterrupted_run(
    supervisor: Supervisor, tokens: int, sampler: dict[str, float]
) -> None:
    path, started = supervisor.path, supervisor.started
    fields = {"prompt": "Once upon a time, in a village by the sea,", "logit_bias": {2: -100.0}, "max_tokens": tokens}
    with connected(path) as client, client.generate(**fields, **sampler) as stream:
        alone = stream.wait().text
    pieces: list[str] = []
    with Resumable(lambda: Client(path, timeout=PATIENCE_S), **fields, **sampler) as resumed:
        for event in resumed:
            if isinstance(event, wire.Token):
                pieces.append(event.text)
                if len(pieces) == tokens // 2:
                    supervisor.daemon.popen.send_signal(signal.SIGKILL)
        result = resumed.result
    assert result.text == "".join(pieces) == alone
    assert (result.usage.generated, supervisor.started) == (tokens, started + 1)


def test_ask_goes_on_by_itself_when_its_daemon_is_killed(supervisor: Supervisor) -> None:
    path = supervisor.path
    connected(path).close()
    command = [sys.executable, "-m", "mlxbc", "ask", "--raw", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    command += ["-o", "logit_bias", '{"2": -100}', "The history of bread begins"]
    environment = {**os.environ, "MLXBC_SOCKET": str(path)}
    alone = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as asking:
        assert asking.stdout
        first = asking.stdout.read(40)
        supervisor.daemon.popen.send_signal(signal.SIGKILL)
        rest = asking.stdout.read()
    assert asking.returncode == 0
    assert first + rest == alone


def test_a_kept_answer_is_there_for_the_client_that_comes_back(supervisor: Supervisor) -> None:
    path = supervisor.path
    fields = {"prompt": "A recipe for onion soup. First,", "temperature": 0, "max_tokens": 20, "resumable": True}
    with connected(path) as client, client.generate(**fields) as stream:
        alone = stream.wait()
    client = connected(path)
    gone = client.generate(**fields, on_disconnect="keep", keep_s=60)
    had: list[int] = []
    text = name = ""
    while len(had) < 5:
        event = next(gone)
        if isinstance(event, wire.Accepted):
            name = event.stream
        if isinstance(event, wire.Token):
            had += event.ids
            text += event.text
    client.close()
    with pytest.raises(ConnectionLost):
        gone.wait()
    with connected(path) as client:
        while client.status().running:
            time.sleep(0.01)
        resume = {"stream": name, "tokens": had}
        with client.generate(**fields, seed=alone.seed, resume=resume) as stream:
            result = stream.wait()
    assert (text + result.text, had + result.ids) == (alone.text, alone.ids)
