"""`mlxbc chat`, on a terminal and behind a pipe."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import pytest
from command_line import OnTerminal
from fake_daemon import FakeDaemon, Session, accepted, done

from mlxbc import wire

PROMPT = ">>> "


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


class Partner:
    """Answers every question with its number, and remembers the conversations it was shown."""

    def __init__(self) -> None:
        self.requests: list[wire.Generate] = []

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            self.requests.append(request)
            answer = wire.Token(id=request.id, text=f"answer {len(self.requests)}")
            session.send(accepted(request), answer, done(request))

    @property
    def said(self) -> list[list[str]]:
        return [[message.content for message in request.messages or ()] for request in self.requests]


def test_a_pipe_is_one_question_a_line_and_the_conversation_grows(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        ended = command_line.run(path, "chat", "-s", "Be brief.", stdin=b"one\n\ntwo")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"answer 1\nanswer 2\n", b"")
    assert partner.said == [["Be brief.", "one"], ["Be brief.", "one", "answer 1", "two"]]
    assert [message.role for message in partner.requests[-1].messages or ()] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_options_go_with_every_question(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", "-m", "tiny", "-o", "seed", "3", stdin=b"one\ntwo\n")
    assert [(request.model, request.seed) for request in partner.requests] == [("tiny", 3)] * 2


def test_a_failure_in_a_pipe_ends_it_because_the_rest_was_written_for_an_answer(path: Path) -> None:
    def script(session: Session) -> None:
        session.send(wire.Error(id=session.receive(wire.Generate).id, code="queue_full", message="later"))

    with FakeDaemon(path, script):
        ended = command_line.run(path, "chat", stdin=b"one\ntwo\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (75, b"", b"mlxbc: later\n")


def test_without_a_daemon_it_says_so_before_the_first_question(path: Path) -> None:
    with OnTerminal(path, "chat") as terminal:
        assert terminal.end() == 69
        assert b"mlxbc serve --detach" in terminal.screen
        assert PROMPT.encode() not in terminal.screen


def test_a_conversation_on_a_terminal_ends_with_ctrl_d(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.type("one\n")
        terminal.see("answer 1")
        terminal.see(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert partner.said == [["one"]]
    assert partner.requests[0].priority == "interactive"


@pytest.mark.parametrize("keys", ["/exit\n", "/quit\n", "/bye\n", "\x04"])
def test_it_can_be_left_at_once(path: Path, keys: str) -> None:
    with FakeDaemon(path, Partner()), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.type(keys)
        assert terminal.end() == 0


def test_a_conversation_is_one_session_of_the_daemons_cache(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", stdin=b"one\ntwo\n")
        command_line.run(path, "chat", stdin=b"three\n")
    first, again, other = (request.session for request in partner.requests)
    assert first
    assert first == again != other


def test_clear_forgets_all_but_the_system_prompt(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", "-s", "Be brief.", stdin=b"one\n/clear\ntwo\n")
    assert partner.said == [["Be brief.", "one"], ["Be brief.", "two"]]


def test_help_lists_the_commands_and_asks_nothing(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.type("/help\n")
        terminal.see("/clear")
        terminal.see(PROMPT)
        terminal.type("\x04")
        terminal.end()
    assert partner.said == []


def test_a_command_that_there_is_not_asks_nothing_and_a_path_is_no_command(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner), OnTerminal(path, "chat") as terminal:
        terminal.see("/exit or Ctrl-D leaves")
        terminal.see(PROMPT)
        terminal.type("/retyr\n")
        terminal.see("there is no /retyr")
        terminal.see(PROMPT)
        terminal.type("/etc/hosts\n")
        terminal.see("answer 1")
        terminal.see(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert partner.said == [["/etc/hosts"]]


def test_three_quotes_make_a_message_of_several_lines(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", stdin=b'"""first\n\nsecond\n"""\nalone\n"""open\nend')
    assert [conversation[-1] for conversation in partner.said] == ["first\n\nsecond", "alone", "open\nend"]


def test_ctrl_c_ends_the_answer_keeps_it_and_stays(path: Path) -> None:
    seen: list[wire.Generate] = []

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        seen.append(request)
        session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
        if len(seen) == 1:
            assert session.receive(wire.Cancel).id == request.id
            session.send(done(request, "cancelled"))
        else:
            session.send(done(request))

    with FakeDaemon(path, lambda session: script(session)), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.type("a story\n")
        terminal.see("Once upon")
        terminal.interrupt()
        terminal.see(PROMPT)
        terminal.type("go on\n")
        terminal.see("Once upon")
        terminal.see(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [message.content for message in seen[1].messages or ()] == ["a story", "Once upon", "go on"]


def test_ctrl_c_again_leaves(path: Path) -> None:
    with FakeDaemon(path, Partner()), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.type("half a li")
        terminal.see("half a li")
        terminal.interrupt()
        terminal.see("Ctrl-C again")
        terminal.see(PROMPT)
        terminal.interrupt()
        assert terminal.end() == 130


def test_two_interrupts_with_a_question_between_them_are_not_two_in_a_row(path: Path) -> None:
    with FakeDaemon(path, Partner()), OnTerminal(path, "chat") as terminal:
        terminal.see(PROMPT)
        terminal.interrupt()
        terminal.see(PROMPT)
        terminal.type("one\n")
        terminal.see("answer 1")
        terminal.see(PROMPT)
        terminal.interrupt()
        terminal.see("Ctrl-C again")
        terminal.see(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_conversation_outlives_a_restart_of_the_daemon(path: Path) -> None:
    first, second = Partner(), Partner()
    with OnTerminalAfter(path, first) as (daemon, terminal):
        terminal.type("one\n")
        terminal.see("answer 1")
        terminal.see(PROMPT)
        daemon.close()
        terminal.type("lost\n")
        terminal.see("mlxbc serve --detach")
        terminal.see(PROMPT)
        with FakeDaemon(path, second):
            terminal.type("two\n")
            terminal.see("answer 1")
            terminal.see(PROMPT)
            terminal.type("\x04")
            assert terminal.end() == 0
    assert second.said == [["one", "answer 1", "two"]]


class OnTerminalAfter:
    """A daemon and a chat with it, at its first prompt."""

    def __init__(self, path: Path, script: Partner) -> None:
        self._daemon = FakeDaemon(path, script)
        self._path = path

    def __enter__(self) -> tuple[FakeDaemon, OnTerminal]:
        self._daemon.__enter__()
        self._terminal = OnTerminal(self._path, "chat")
        self._terminal.see(PROMPT)
        return self._daemon, self._terminal

    def __exit__(self, *error: object) -> None:
        self._terminal.__exit__(None, None, None)
        self._daemon.__exit__(None, None, None)


def test_with_its_output_in_a_pipe_the_prompt_is_not_among_the_answers(path: Path) -> None:
    with FakeDaemon(path, Partner()), OnTerminal(path, "chat", pipe_stdout=True) as terminal:
        terminal.see(PROMPT)
        terminal.type("one\n")
        terminal.see(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
        assert terminal.stdout == b"answer 1\n"


def test_a_closed_standard_input_is_the_end_of_input(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        command = ["sh", "-c", 'exec "$0" -m mlxbc chat <&-', sys.executable]
        ended = subprocess.run(command, env=command_line.environment(path), capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_another_answer_can_be_asked_for(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run = command_line.run(path, "chat", "-o", "seed", "3", stdin=b"/retry\none\n/retry\ntwo\n")
    assert run.stdout == b"answer 1\nanswer 2\nanswer 3\n"
    assert partner.said == [["one"], ["one"], ["one", "answer 2", "two"]]
    assert [request.seed for request in partner.requests] == [3, None, 3]


def test_another_answer_can_be_drawn_at_another_temperature(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", "-o", "temperature", "0", stdin=b"one\n/retry 0.8\n/retry hot\n/retry\n")
    assert partner.said == [["one"]] * 3
    assert [request.temperature for request in partner.requests] == [0, 0.8, 0]


def test_who_gets_the_same_answer_again_hears_what_would_change_it(path: Path) -> None:
    def script(session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            text = "another" if request.temperature else "the same"
            session.send(accepted(request), wire.Token(id=request.id, text=text), done(request))

    with FakeDaemon(path, script), OnTerminal(path, "chat") as terminal:
        for line in ("one\n", "/retry\n", "/retry 0.8\n", "/exit\n"):
            terminal.see(PROMPT)
            terminal.type(line)
        assert terminal.end() == 0
    assert terminal.screen.count(b"that is the same answer") == 1


def test_the_model_and_the_system_prompt_can_be_changed(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        talk = b"one\n/system Be long.\n/model other\ntwo\n/system\n/model\nthree\n"
        command_line.run(path, "chat", "-s", "Be brief.", stdin=talk)
    assert [said[0] for said in partner.said] == ["Be brief.", "Be long.", "one"]
    assert [request.model for request in partner.requests] == [None, "other", None]


def test_what_only_looks_like_a_command_is_a_message(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", stdin=b"/usr/bin is what?\n/cleared\n")
    assert partner.said[-1] == ["/usr/bin is what?", "answer 1", "/cleared"]


def test_files_go_with_the_first_message(path: Path) -> None:
    partner = Partner()
    (path.parent / "notes").write_text("Notes.\n")
    with FakeDaemon(path, partner):
        command_line.run(path, "chat", "-f", "notes", stdin=b"one\ntwo\n", cwd=path.parent)
    assert partner.said[-1] == ["Notes.\n\none", "answer 1", "two"]


@pytest.mark.parametrize("keeps", [True, False])
def test_the_arrow_key_brings_back_what_was_typed_in_a_chat_that_was_kept(path: Path, keeps: bool) -> None:
    partner = Partner()
    home = {"HOME": str(path.parent)}
    with FakeDaemon(path, partner):
        with OnTerminal(path, "chat", *(["--log"] if keeps else []), **home) as terminal:
            terminal.see(PROMPT)
            terminal.type("a question\n")
            terminal.see("answer 1")
            terminal.see(PROMPT)
            terminal.type("\x04")
            assert terminal.end() == 0
        with OnTerminal(path, "chat", "--log", **home) as terminal:
            terminal.see(PROMPT)
            terminal.type("\x1b[A")
            if keeps:
                terminal.see("a question")
            terminal.type("!\n")
            terminal.see("answer 2")
            terminal.see(PROMPT)
            terminal.type("\x04")
            assert terminal.end() == 0
    assert partner.said[-1] == ["a question!" if keeps else "!"]
    modes = {file.stat().st_mode & 0o777 for file in path.parent.rglob("typed")}
    assert modes == {0o600}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_was_typed_is_kept_also_when_the_window_is_closed(path: Path, number: signal.Signals) -> None:
    with (
        FakeDaemon(path, Partner()),
        OnTerminal(path, "chat", "--log", HOME=str(path.parent)) as terminal,
    ):
        terminal.see(PROMPT)
        terminal.type("a question\n")
        terminal.see("answer 1")
        terminal.see(PROMPT)
        terminal.kill(number)
        assert terminal.end() == 128 + number
    (file,) = path.parent.rglob("typed")
    assert file.read_text() == "a question\n"
