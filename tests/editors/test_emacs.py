"""The library in a real Emacs: what is typed, what is shown, and what the daemon hears of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import pytest
from fake_service import FakeDaemon, FakeJob
from listeners import refusing, silent
from real_daemon import Daemon
from real_emacs import LIBRARY, Emacs, emacs, installed

from mlxbc import wire
from mlxbc.framing import Codec
from mlxbc.paths import socket_path

pytestmark = pytest.mark.skipif(not installed(), reason="no emacs and emacsclient on the PATH")

Scripted: TypeAlias = Callable[[], AbstractContextManager[FakeDaemon]]

CODE = "def add(a, b):\n    \n\nprint(add(1, 2))\n"
NEXT_LINE, END_OF_LINE, TAB, BACK = "\x0e", "\x05", "\t", "\x02"
ACCEPT_WORD, ACCEPT_LINE, UNDO, AT_POINT = "\x1bf", "\x1be", "\x1f", "\x1bxcompletion-at-point\r"


@pytest.fixture(scope="module")
def running() -> Iterator[Emacs]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory, emacs(Path(directory)) as editor:
        yield editor


@pytest.fixture
def editor(running: Emacs, socket: Path) -> Emacs:
    running.renew(socket)
    return running


def typing(editor: Emacs, directory: Path, keys: str = "ret") -> None:
    editor.edit(directory / "sums.py", CODE)
    editor.keys(NEXT_LINE + END_OF_LINE + keys)


def suggest(fake: FakeDaemon, job: FakeJob, *pieces: str, reason: wire.FinishReason = "stop") -> None:
    for piece in pieces:
        fake.do(job.token, piece)
    fake.do(job.done, reason)


def new_job(fake: FakeDaemon, count: int) -> FakeJob:
    """The newest job, once there have been so many."""
    fake.until(lambda service: len(service.jobs) >= count)
    return fake.job()


def generate(job: FakeJob) -> wire.Generate:
    assert isinstance(job.request, wire.Generate)
    return job.request


def fim(job: FakeJob) -> wire.Fim:
    around = generate(job).fim
    assert around
    return around


def test_the_library_compiles_without_a_warning(tmp_path: Path) -> None:
    copy = shutil.copy(LIBRARY, tmp_path)
    strict = "(setq byte-compile-error-on-warn t)"
    command = ["emacs", "-Q", "--batch", "--eval", strict, "-f", "batch-byte-compile", copy]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_socket_is_the_one_that_the_client_finds(editor: Emacs) -> None:
    assert editor.text("(progn (setq mlxbc-socket nil) (mlxbc--socket))") == str(socket_path())
    assert editor.text('(let ((process-environment \'("MLXBC_SOCKET=/x/y"))) (mlxbc--socket))') == "/x/y"


def test_a_suggestion_grows_as_it_comes_and_is_accepted_in_parts(
    scripted: Scripted, editor: Emacs, directory: Path
) -> None:
    with scripted() as fake:
        typing(editor, directory)
        job = fake.job()
        assert (generate(job).supersede, generate(job).priority) == ("completion", "interactive")
        assert (generate(job).deadline_ms, generate(job).max_tokens) == (3000, 96)
        assert fim(job) == wire.Fim(
            prefix="def add(a, b):\n    ret", suffix="\n\nprint(add(1, 2))\n", path="sums.py", language="python"
        )
        fake.do(job.token, "urn a")
        editor.until(lambda: editor.ghost() == "urn a")
        suggest(fake, job, " + b\n    # the sum", "\n    # of both\n")
        editor.until(lambda: editor.ghost() == "urn a + b\n    # the sum\n    # of both")
        assert editor.buffer() == CODE.replace("    \n", "    ret\n"), "a ghost is not text"

        editor.keys(ACCEPT_WORD)
        editor.until(lambda: "    return\n" in editor.buffer())
        editor.keys(ACCEPT_LINE)
        editor.until(lambda: "    return a + b\n\nprint" in editor.buffer())
        assert editor.ghost() == "\n    # the sum\n    # of both"
        editor.keys(TAB)
        editor.until(lambda: "    return a + b\n    # the sum\n    # of both\n\nprint" in editor.buffer())
        assert editor.ghost() == ""
        editor.keys("!")
        editor.until(lambda: "    # of both!\n" in editor.buffer())


def test_one_undo_takes_back_what_was_accepted(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        typing(editor, directory)
        suggest(fake, fake.job(), "urn a + b")
        editor.until(editor.ghost)
        editor.keys(TAB)
        editor.until(lambda: "return a + b" in editor.buffer())
        editor.keys(UNDO)
        editor.until(lambda: "    ret\n" in editor.buffer())


def test_typing_along_keeps_the_suggestion_and_asks_nothing(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        typing(editor, directory)
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


def test_a_key_before_anything_came_asks_anew(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        typing(editor, directory)
        first = fake.job()
        editor.keys("u")
        second = new_job(fake, 2)
        assert first.ended
        suggest(fake, second, "rn")
        editor.until(lambda: editor.ghost() == "rn")


def test_another_key_ends_the_request_and_the_next_pause_asks_anew(
    scripted: Scripted, editor: Emacs, directory: Path
) -> None:
    with scripted() as fake:
        typing(editor, directory)
        first = fake.job()
        fake.do(first.token, "urn")
        editor.until(editor.ghost)
        editor.keys("x")
        second = new_job(fake, 2)
        assert first.ended
        assert editor.ghost() == ""
        suggest(fake, second, " = 1")
        editor.until(lambda: editor.ghost() == " = 1")


def test_moving_away_dismisses_and_cancels(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    quitting = '(format "%s" (key-binding (kbd "C-g")))'
    with scripted() as fake:
        typing(editor, directory)
        job = fake.job()
        fake.do(job.token, "urn")
        editor.until(editor.ghost)
        assert editor.text(quitting) == "mlxbc-dismiss"
        editor.keys(BACK)
        fake.until(lambda _: job.cancelled == 1)
        editor.until(lambda: editor.text(quitting) == "keyboard-quit")
        assert editor.ghost() == ""
        assert editor.told() == []


def test_a_suggestion_that_was_cut_ends_with_its_last_whole_line(
    scripted: Scripted, editor: Emacs, directory: Path
) -> None:
    with scripted() as fake:
        typing(editor, directory)
        suggest(fake, fake.job(), "urn a + b\n    # the su", reason="length")
        editor.until(lambda: editor.ghost() == "urn a + b")


def test_what_stands_behind_point_is_not_suggested_again(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.edit(directory / "sums.txt", "print(add())\n")
        editor.keys("\x06" * len("print(add(") + "1")
        suggest(fake, fake.job(), ", 2))")
        editor.until(lambda: editor.ghost() == ", 2")
        editor.keys(TAB)
        editor.until(lambda: editor.buffer() == "print(add(1, 2))\n")


def test_tab_does_what_it_does_where_there_is_no_suggestion(editor: Emacs, directory: Path) -> None:
    editor.edit(directory / "sums.py", "if True:\nx = 1\n")
    editor.keys(NEXT_LINE + TAB)
    editor.until(lambda: editor.buffer() == "if True:\n    x = 1\n")


def test_text_that_is_not_utf8_is_asked_about_as_well(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.eval("(setq coding-system-for-read 'utf-8-unix)")
        editor.edit(directory / "old.txt", "naïve ".encode() + b"caf\xe9 \xf0\x9f\x98\x80\n")
        editor.eval("(setq coding-system-for-read nil)")
        editor.keys(END_OF_LINE + "!")
        assert fim(fake.job()).prefix == "naïve caf\ufffd \U0001f600!"


def test_completion_at_point_waits_and_inserts(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.edit(directory / "sums.txt", "one, two")
        editor.eval(
            '(with-current-buffer "sums.txt" (mlxbc-mode -1) '
            "(setq-local completion-at-point-functions '(mlxbc-completion-at-point)) nil)"
        )
        editor.keys(END_OF_LINE + AT_POINT)
        suggest(fake, fake.job(), ", thr", "ee\n")
        editor.until(lambda: editor.buffer() == "one, two, three")
        editor.eval("(setq mlxbc-deadline-ms 3600000)")
        editor.keys(AT_POINT)
        job = new_job(fake, 2)
        editor.keys("!")
        fake.until(lambda _: job.cancelled == 1)
        editor.until(lambda: editor.buffer() == "one, two, three!")


def test_of_long_lines_only_a_part_is_sent(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.edit(directory / "long.txt", "ä" * 100_000)
        editor.keys("\x1b>!")
        prefix = fim(fake.job()).prefix
        assert prefix == "ä" * (len(prefix) - 1) + "!"
        assert 16384 <= len(prefix) <= 32768


def test_a_prefix_begins_at_a_line_that_moves_in_steps(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.eval("(setq mlxbc-lines-before 4 mlxbc-lines-after 1)")
        editor.edit(directory / "lines.txt", "".join(f"{n}\n" for n in range(12)))
        editor.keys(NEXT_LINE * 2)
        begins = []
        for count, line in enumerate(range(3, 9), 1):
            editor.keys(NEXT_LINE + END_OF_LINE + "!")
            around = fim(new_job(fake, count))
            assert around.prefix.endswith(f"{line}!")
            assert around.suffix == f"\n{line + 1}\n"
            begins.append(around.prefix.split("\n")[0].rstrip("!"))
        assert begins == ["0", "0", "2", "2", "4", "4"]


def test_in_the_middle_of_a_line_one_line_is_asked_for(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        typing(editor, directory)
        assert not fim(fake.job()).single_line
        editor.keys(BACK + "!")
        assert fim(new_job(fake, 2)).single_line


@pytest.mark.parametrize("greeting", [False, True], ids=["starting", "stuck"])
def test_a_daemon_that_says_nothing_holds_nobody_up(
    editor: Emacs, socket: Path, directory: Path, greeting: bool
) -> None:
    end = "(buffer-substring-no-properties (- (point-max) 40) (point-max))"
    with silent(socket, greeting=greeting):
        editor.edit(directory / "long.txt", ("word " * 40 + "\n") * 400)
        editor.keys("\x1b>")
        for count in range(1, 31):
            editor.keys("x")
            editor.until(lambda count=count: editor.text(end).endswith("x" * count))
            editor.until(lambda: editor.text('(if (timerp mlxbc--timer) "" "asked")'))
        assert editor.told() == []


def test_without_a_daemon_one_message_says_what_to_do(editor: Emacs, directory: Path) -> None:
    typing(editor, directory)
    editor.until(editor.told)
    editor.eval("(setq mlxbc--not-before 0)")
    editor.keys("urn")
    editor.until(lambda: "    return\n" in editor.buffer())
    editor.until(lambda: editor.text('(if (> mlxbc--not-before 0) "tried" "")'))
    assert editor.told() == ["mlxbc: no daemon is running; start one with: mlxbc serve --detach"]


def test_a_daemon_that_was_restarted_is_found_again(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        typing(editor, directory)
        fake.do(fake.job().token, "urn")
        editor.until(editor.ghost)
    editor.until(lambda: editor.ghost() == "")
    with scripted() as fake:
        editor.keys("u")
        suggest(fake, fake.job(), "rn b")
        editor.until(lambda: editor.ghost() == "rn b")
    assert editor.told() == []


def test_a_daemon_of_another_version_is_told_of_once(editor: Emacs, socket: Path, directory: Path) -> None:
    with refusing(socket, Codec.JSON):
        typing(editor, directory)
        editor.until(editor.told)
        for _ in range(3):
            editor.eval("(with-current-buffer (window-buffer) (mlxbc-complete) nil)")
            editor.until(lambda: editor.eval("(process-live-p mlxbc--process)") == "nil")
        editor.eval("(progn (mlxbc-status) nil)")
        refusal = "mlxbc: the daemon speaks protocol 9; install one version of both"
        # Once for all that nobody asked for, and once for what somebody did. Emacs counts what it repeats.
        editor.until(lambda: editor.told() == [f"{refusal} [2 times]"])


def test_status_is_one_line(scripted: Scripted, editor: Emacs) -> None:
    with scripted():
        editor.eval("(progn (mlxbc-status) nil)")
        editor.until(editor.told)
        assert editor.told() == ["mlxbc: ready, 1 running, 0 queued, "]


def test_a_chat_streams_into_its_buffer_and_goes_on(scripted: Scripted, editor: Emacs) -> None:
    with scripted() as fake:
        editor.eval('(setq mlxbc-chat-system "Be brief." mlxbc-chat-fields \'(:max_tokens 9))')
        editor.keys("\x1bxmlxbc-chat\rWho are you?\r")
        job = fake.job()
        assert generate(job).messages == [
            wire.Message(role="system", content="Be brief."),
            wire.Message(role="user", content="Who are you?"),
        ]
        assert generate(job).max_tokens == 9
        fake.do(job.token, "let me see", channel="reasoning")
        fake.do(job.token, "A mod")
        editor.until(lambda: editor.buffer().endswith("─── mlxbc ───\nA mod"))
        suggest(fake, job, "el. \U0001f600\nAnd ", "you?")
        editor.until(lambda: editor.buffer().endswith("A model. \U0001f600\nAnd you?\n\n─── you ───\n"))
        editor.keys("A person.\x03\x03")
        messages = generate(new_job(fake, 2)).messages
        assert messages
        assert [message.content for message in messages] == [
            "Be brief.",
            "Who are you?",
            "A model. \U0001f600\nAnd you?",
            "A person.",
        ]


def test_an_answer_can_be_ended_and_keeps_what_came(scripted: Scripted, editor: Emacs) -> None:
    with scripted() as fake:
        editor.keys("\x1bxmlxbc-chat\rCount.\r")
        job = fake.job()
        fake.do(job.token, "one two")
        editor.until(lambda: "one two" in editor.buffer())
        editor.keys("\x03\x0b")
        fake.until(lambda _: job.cancelled == 1)
        editor.until(lambda: editor.buffer().endswith("one two\n\n─── you ───\n"))


def test_a_chat_survives_the_daemon(scripted: Scripted, editor: Emacs) -> None:
    with scripted() as fake:
        editor.keys("\x1bxmlxbc-chat\rHello\r")
        fake.do(fake.job().token, "Hi")
        editor.until(lambda: "Hi" in editor.buffer())
    editor.until(lambda: editor.buffer().endswith("Hi\n\n─── you ───\n"))
    with scripted() as fake:
        editor.keys("Go on.\x03\x03")
        messages = generate(fake.job()).messages
        assert messages
        assert [message.content for message in messages] == ["Hello", "Hi", "Go on."]


def test_rewriting_replaces_the_region_in_one_step(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.edit(directory / "sums.txt", "one\ntwo\nthree\nfour\n")
        editor.keys(NEXT_LINE + "\x00" + NEXT_LINE * 2 + "\x1bxmlxbc-rewrite-region\rin capitals\r")
        job = fake.job()
        messages = generate(job).messages
        assert messages
        assert "in capitals" in messages[-1].content
        assert messages[-1].content.endswith("two\nthree")
        editor.eval('(with-current-buffer "sums.txt" (save-excursion (goto-char 1) (insert "zero\\n")) nil)')
        suggest(fake, job, "```text\nTW", "O\nTHREE\n```")
        editor.until(lambda: editor.buffer() == "zero\none\nTWO\nTHREE\nfour\n")
        editor.keys(UNDO)
        editor.until(lambda: editor.buffer() == "zero\none\ntwo\nthree\nfour\n")


def test_text_that_changed_meanwhile_is_not_overwritten(scripted: Scripted, editor: Emacs, directory: Path) -> None:
    with scripted() as fake:
        editor.edit(directory / "sums.txt", "one\ntwo\n")
        editor.eval('(with-current-buffer "sums.txt" (mlxbc-rewrite-region 1 4 "in capitals") nil)')
        job = fake.job()
        editor.eval('(with-current-buffer "sums.txt" (goto-char 2) (insert "!") nil)')
        suggest(fake, job, "ONE")
        editor.until(editor.told)
        assert editor.buffer() == "o!ne\ntwo\n"
        assert editor.text("(current-kill 0)") == "ONE"


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_model_completes_and_chats(real: Daemon, running: Emacs, directory: Path) -> None:
    running.renew(real.path)
    running.eval("(setq mlxbc-max-tokens 12 mlxbc-deadline-ms 60000)")
    typing(running, directory, "return")
    running.until(running.ghost)
    running.keys(TAB)
    running.until(lambda: not running.buffer().startswith("def add(a, b):\n    return\n"))
    running.keys("\x1bxmlxbc-chat\rWhat is the capital of France?\r")
    running.until(lambda: "Paris" in running.buffer())
    running.keys("\x03\x0b")
    assert running.told() == []
    running.eval("(mlxbc-mode -1)")
    real.until(lambda report: report.running == 0)
