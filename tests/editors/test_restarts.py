"""A real daemon is killed under each editor, and another one takes its place: the next key finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pytest
import real_emacs
import real_node
from real_daemon import daemon
from real_neovim import neovim, programs

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

Complete: TypeAlias = Callable[[], None]
"""Types something, and waits for a suggestion."""

CODE = "def add(a, b):\n    return"


@contextmanager
def in_neovim(socket: Path, directory: Path) -> Iterator[Complete]:
    with neovim(programs()["system"], socket, directory) as editor:
        editor.setup("{ completion = { max_tokens = 4, deadline_ms = 60000 } }")
        editor.edit("sums.py", CODE)

        def complete() -> None:
            editor.keys("<Esc>GA ")
            editor.until(editor.ghost)

        yield complete
        assert editor.told() == []


@contextmanager
def in_emacs(socket: Path, directory: Path) -> Iterator[Complete]:
    with real_emacs.emacs(directory) as editor:
        editor.renew(socket)
        editor.eval("(setq mlxbc-max-tokens 4 mlxbc-deadline-ms 60000)")
        editor.edit(directory / "sums.py", CODE)
        editor.eval("(with-current-buffer (window-buffer) (goto-char (point-max)) nil)")

        def complete() -> None:
            editor.keys(" ")
            editor.until(editor.ghost)

        yield complete
        assert editor.told() == []


@contextmanager
def in_vscode(socket: Path, directory: Path) -> Iterator[Complete]:
    with real_node.node(real_node.installed(directory), socket) as editor:
        editor.run("host.settings['mlxbc.completion.maxTokens'] = 4")
        editor.run("host.settings['mlxbc.completion.deadlineMs'] = 60000")
        editor.run(f"host.open('sums.py', {CODE!r})")

        def complete() -> None:
            editor.run("host.documents[0].text += ' '")
            assert editor.run(
                "return (await host.provider.provideInlineCompletionItems(host.documents[0],"
                "host.documents[0].validatePosition({ line: 9, character: 0 }), { triggerKind: 1 },"
                "new vscode.CancellationTokenSource().token)).length"
            )

        yield complete
        assert editor.value("host.told") == []


EDITORS = {
    "neovim": (in_neovim, "" if "system" in programs() else "no nvim on the PATH"),
    "emacs": (in_emacs, "" if real_emacs.installed() else "no emacs and emacsclient on the PATH"),
    "vscode": (in_vscode, real_node.missing()),
}


@pytest.mark.parametrize("name", EDITORS)
def test_the_next_daemon_is_found(name: str, model_directory: Path, socket: Path) -> None:
    editor, missing = EDITORS[name]
    if missing:
        pytest.skip(missing)
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory, editor(socket, Path(directory)) as complete:
        for _ in range(2):
            with daemon(socket, model_directory) as serving:
                complete()
                serving.popen.kill()
