"""Takes the pictures of client/editors/pictures: real editors in a real terminal, with a real daemon and its model.

    python tests/editors/pictures.py

Needs tmux, nvim, emacs, asciinema, svg-term (`npm install svg-term-cli`), `pip install rich`, and the default model.
What the model says is what it said.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).parents[2]
EDITORS: Final = ROOT / "client" / "editors"
PICTURES: Final = EDITORS / "pictures"
COLUMNS, ROWS = 88, 22
PATIENCE_S: Final = 120.0

SOURCE: Final = '''\
def factorial(n):
    """The product of the numbers from 1 to n."""
    if n == 0:
        return 1
    return n * factorial(n - 1)


def fibonacci(n):
    """The n-th Fibonacci number."""
'''


class Terminal:
    """A program in tmux."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        self._tmux = ["tmux", "-S", str(directory / f"tmux-{time.monotonic_ns()}"), "-f", "/dev/null"]
        start = ["new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), shlex.join(command)]
        options = ["set", "-g", "status", "off", ";", "set", "-g", "default-terminal", "tmux-256color", ";"]
        subprocess.run([*self._tmux, *options, *start], check=True, cwd=directory)

    def keys(self, *keys: str) -> None:
        """Press named keys, or type what is no name."""
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def type(self, text: str) -> None:
        """Type a text as a person does."""
        for character in text:
            subprocess.run([*self._tmux, "send-keys", "-l", character], check=True)
            time.sleep(0.04)

    def screen(self, *, colours: bool = False) -> str:
        """What is shown."""
        arguments = ["capture-pane", "-p", *(["-e"] if colours else [])]
        return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True).stdout

    def until(self, condition: Callable[[str], bool]) -> None:
        """Wait until what is shown is as wanted, and stays so for a second."""
        began = time.monotonic()
        last = ""
        while not (condition(screen := self.screen()) and screen == last):
            assert time.monotonic() < began + PATIENCE_S, screen
            last = screen
            time.sleep(1)

    def picture(self, name: str, title: str) -> None:
        """Write what is shown as an SVG."""
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(self.screen(colours=True)), end="", no_wrap=True, crop=True)
        svg = console.export_svg(title=title)
        # The reader's own monospaced font: a picture fetches nothing.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
        svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
        (PICTURES / name).write_text(svg)
        print(PICTURES / name)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


def neovim(directory: Path) -> None:
    (directory / "numbers.py").write_text(SOURCE)
    setup = "require('mlxbc').setup({ completion = { deadline_ms = 60000, max_tokens = 64 } })"
    plugin = f"set rtp^={EDITORS / 'nvim'} | syntax on | set number"
    settings = f"runtime plugin/mlxbc.lua | lua {setup}"
    options = ["-u", "NONE", "-i", "NONE", "-n", "--cmd", plugin, "-c", settings, "-c", "set noshowcmd ft=python"]
    terminal = Terminal(directory, ["nvim", *options, "numbers.py"])
    try:
        terminal.until(lambda screen: "fibonacci" in screen)
        terminal.keys("G", "o")
        terminal.type("if n")
        terminal.until(lambda screen: "return" in screen.partition("fibonacci")[2])
        terminal.picture("neovim-completion.svg", "nvim numbers.py")
        terminal.keys("Escape", "u")
        terminal.type(":Mlxbc chat What is a Fibonacci number, in one sentence?")
        terminal.keys("Enter")
        terminal.until(lambda screen: screen.count("── you ──") == 2)
        terminal.picture("neovim-chat.svg", ":Mlxbc chat")
    finally:
        terminal.close()


def emacs(directory: Path) -> None:
    (directory / "numbers.py").write_text(SOURCE)
    settings = "(setq mlxbc-deadline-ms 60000 mlxbc-max-tokens 64 python-indent-guess-indent-offset nil)"
    options = ["-nw", "-Q", "-l", str(EDITORS / "emacs" / "mlxbc.el"), "--eval", settings]
    terminal = Terminal(directory, ["emacs", *options, "numbers.py", "-f", "mlxbc-mode", "-f", "end-of-buffer"])
    try:
        terminal.until(lambda screen: "fibonacci" in screen)
        terminal.type("    if n")
        terminal.until(lambda screen: "return" in screen.partition("fibonacci")[2])
        terminal.picture("emacs-completion.svg", "emacs numbers.py")
    finally:
        terminal.close()


def session(directory: Path) -> None:
    """A shell session, recorded by asciinema while somebody types."""
    cast = PICTURES / "session.cast"
    shell = "bash --noprofile --norc"
    command = ["asciinema", "rec", "--overwrite", "--quiet", "--idle-time-limit", "2", "--command", shell, str(cast)]
    terminal = Terminal(directory, ["env", "PS1=$ ", *command])
    ends = 0
    try:
        terminal.until(lambda screen: screen.startswith("$"))
        for line in (
            "mlxbc ask 'What is the capital of France?'",
            "mlxbc ask -o choice yes -o choice no 'Is Paris in France?'",
            "printf 'one\\ntwo\\nthree\\n' | mlxbc ask --raw -o max_tokens 8",
            "mlxbc ps",
        ):
            terminal.type(line)
            terminal.keys("Enter")
            ends += 1
            terminal.until(lambda screen, ends=ends: len(re.findall(r"^\$", screen, re.MULTILINE)) > ends)
        terminal.type("exit")
        terminal.keys("Enter")
        time.sleep(2)
    finally:
        terminal.close()
    film = PICTURES / "session.svg"
    subprocess.run(["svg-term", "--in", cast, "--out", film, "--window", "--no-cursor"], check=True)
    print(film)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as made:
        directory = Path(made)
        os.environ |= {"MLXBC_SOCKET": str(directory / "s"), "LC_ALL": "C.UTF-8", "COLORTERM": "truecolor"}
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        daemon = subprocess.Popen([sys.executable, "-m", "mlxbcd.serve.main"], stderr=subprocess.DEVNULL)
        try:
            while subprocess.run(["mlxbc", "load", "smollm2"], capture_output=True).returncode:
                time.sleep(1)
            for scene in (neovim, emacs, session):
                if len(sys.argv) == 1 or scene.__name__ in sys.argv:
                    scene(directory)
        finally:
            daemon.terminate()
            daemon.wait()


if __name__ == "__main__":
    main()
