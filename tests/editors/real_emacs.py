"""Owns a real Emacs on a pseudo-terminal: keys go in as from a keyboard, and what it shows is asked by emacsclient."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

LIBRARY: Final = Path(__file__).parents[2] / "client" / "editors" / "emacs" / "mlxbc.el"
PATIENCE_S: Final = 30.0

_ON_TERMINAL: Final = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def installed() -> bool:
    return all(shutil.which(name) for name in ("emacs", "emacsclient"))


class Emacs:
    """An editor with the library loaded, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._server = directory / "server"
        start = f'(progn (setq server-socket-dir "{directory}") (server-start))'
        # A terminal that Emacs has no questions to, and waits for no answer from.
        environment = {**os.environ, "TERM": "screen", "LC_ALL": "C.UTF-8"}
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        on_terminal = [sys.executable, "-c", _ON_TERMINAL]
        self.popen = subprocess.Popen(
            [*on_terminal, "emacs", "-nw", "-Q", "-l", str(LIBRARY), "--eval", "(require 'server)", "--eval", start],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.screen = bytearray()
        self._drain = threading.Thread(target=self._read)
        self._drain.start()

    def begin(self) -> None:
        """Wait until it can be asked."""
        self.until(self._server.exists)
        self.eval("(setq make-backup-files nil auto-save-default nil create-lockfiles nil)")

    def renew(self, socket: Path) -> None:
        """As if it had just been started, for a daemon at `socket`."""
        self.eval(f'''(progn
            (when (process-live-p mlxbc--process) (delete-process mlxbc--process))
            (dolist (buffer (buffer-list))
              (when (or (buffer-file-name buffer) (string-search "mlxbc" (buffer-name buffer)))
                (with-current-buffer buffer (set-buffer-modified-p nil))
                (kill-buffer buffer)))
            (with-current-buffer "*Messages*" (let ((inhibit-read-only t)) (erase-buffer)))
            (delete-other-windows)
            (mlxbc--works)
            (setq mlxbc-socket "{socket}" mlxbc-delay 0.05 mlxbc-deadline-ms 3000 mlxbc-max-tokens 96)
            (setq mlxbc-chat-system nil mlxbc-chat-fields nil mlxbc-lines-before 256 mlxbc-lines-after 64)
            nil)''')

    def _read(self) -> None:
        while True:
            try:
                self.screen += os.read(self._ours, 1 << 16)
            except OSError:  # how Linux says that nobody has the other side open
                return

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._drain.join()
        os.close(self._ours)

    def eval(self, code: str) -> str:
        """What an expression is, as Emacs prints it."""
        ended = subprocess.run(
            ["emacsclient", "--socket-name", str(self._server), "--eval", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.rstrip("\n")

    def text(self, code: str) -> str:
        """What an expression is, where it is a string in the window's buffer."""
        quoted = self.eval(f"(with-current-buffer (window-buffer) (json-encode-string {code}))")
        return str(msgspec.json.decode(str(msgspec.json.decode(quoted))))

    def keys(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def edit(self, path: Path, content: str | bytes) -> None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        self.eval(f'(progn (switch-to-buffer (find-file-noselect "{path}")) (mlxbc-mode) nil)')

    def buffer(self) -> str:
        return self.text("(buffer-string)")

    def ghost(self) -> str:
        """The suggestion as it is shown."""
        return self.text('(or (and mlxbc--ghost (overlay-get mlxbc--ghost \'after-string)) "")')

    def told(self) -> list[str]:
        """Every message of ours so far."""
        log = self.text('(with-current-buffer "*Messages*" (buffer-string))')
        return [line for line in log.splitlines() if line.startswith("mlxbc:")]

    def until(self, condition: Callable[[], T]) -> T:
        """Ask until there is an answer that counts."""
        began = time.monotonic()
        while not (answer := condition()):
            assert time.monotonic() < began + PATIENCE_S, bytes(self.screen)
            time.sleep(0.01)
        return answer


@contextmanager
def emacs(directory: Path) -> Iterator[Emacs]:
    editor = Emacs(directory)
    try:
        editor.begin()
        yield editor
    finally:
        editor.close()
