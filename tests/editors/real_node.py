"""Owns the VS Code extension in a real node, as its host runs it, with a thin stand-in for the editor."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

EXTENSION: Final = Path(__file__).parents[2] / "client" / "editors" / "vscode"
DRIVER: Final = Path(__file__).parent / "vscode" / "driver.js"
TOOLS: Final = EXTENSION / "node_modules" / ".bin"
PATIENCE_S: Final = 30.0


def missing() -> str:
    """Why the extension can't be built here; empty if it can."""
    if not shutil.which("node"):
        return "no node on the PATH"
    return "" if (TOOLS / "tsc").exists() else f"its tools are not here: npm ci --prefix {EXTENSION}"


def package(directory: Path) -> Path:
    """Build the extension's package in a directory, from a copy: nothing is left among the sources."""
    copy = directory / "source"
    copy.mkdir()
    for path in EXTENSION.iterdir():
        if path.name != "out":
            (copy / path.name).symlink_to(path)
    arguments = ["package", "--no-dependencies", "--skip-license", "--allow-missing-repository", "--out"]
    built = directory / "mlxbc.vsix"
    subprocess.run([TOOLS / "vsce", *arguments, built], cwd=copy, check=True, stdin=subprocess.DEVNULL)
    return built


def installed(directory: Path) -> Path:
    """The extension's entry, unpacked from its package as the editor does it."""
    with zipfile.ZipFile(package(directory)) as archive:
        archive.extractall(directory / "installed")
    root = directory / "installed" / "extension"
    return root / str(msgspec.json.decode((root / "package.json").read_bytes())["main"])


class Node:
    """A host with the extension activated. Code is JavaScript, with `vscode` and the stand-in's `host` in scope."""

    def __init__(self, entry: Path, socket: Path) -> None:
        self._process = subprocess.Popen(
            ["node", str(DRIVER), str(entry)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MLXBC_SOCKET": str(socket), "MLXBC_EXTENSION": str(EXTENSION)},
        )
        self._running: dict[int, Future[Any]] = {}
        self._asked = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = msgspec.json.decode(line)
            future = self._running.pop(answer["number"])
            if "error" in answer:
                future.set_exception(RuntimeError(answer["error"]))
            else:
                future.set_result(answer["value"])

    def start(self, code: str) -> Future[Any]:
        """Run code and don't wait for it."""
        assert self._process.stdin
        self._asked += 1
        future: Future[Any] = Future()
        self._running[self._asked] = future
        self._process.stdin.write(msgspec.json.encode({"number": self._asked, "code": code}) + b"\n")
        self._process.stdin.flush()
        return future

    def run(self, code: str) -> Any:
        """What code returns."""
        return self.start(code).result(PATIENCE_S)

    def value(self, expression: str) -> Any:
        return self.run(f"return {expression}")

    def until(self, condition: Callable[[], T]) -> T:
        """Ask until there is an answer that counts."""
        began = time.monotonic()
        while not (answer := condition()):
            assert time.monotonic() < began + PATIENCE_S
            time.sleep(0.005)
        return answer

    def close(self) -> None:
        """End it as its user would, and see that nothing keeps it alive."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            assert self._process.wait(PATIENCE_S) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


@contextmanager
def node(entry: Path, socket: Path) -> Iterator[Node]:
    host = Node(entry, socket)
    try:
        yield host
    finally:
        host.close()
