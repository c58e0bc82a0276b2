"""How `mlxbc ask` ends: its exit codes, closed pipes, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import pytest
from command_line import OnTerminal
from fake_daemon import FakeDaemon, Session, accepted, done

from mlxbc import wire


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


# ------------------------------------------------------------ how it ends


def test_without_a_daemon_one_line_says_how_to_start_it(path: Path) -> None:
    ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (69, b"", 1)
    assert b"mlxbc serve --detach" in ended.stderr


def late(session: Session) -> None:
    while True:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once"), done(request, "deadline"))


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("ask", "-q", "?"), 124),
        (("ask", "--no-stream", "?"), 124),
        (("fim", "--insert", "-"), 124),
        (("chat",), 0),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_an_answer_cut_by_its_deadline_says_so_whoever_looks(
    path: Path, arguments: tuple[str, ...], exit_code: int
) -> None:
    with FakeDaemon(path, late):
        ended = command_line.run(path, *arguments, "-o", "deadline_ms", "50", stdin=b"There was")
    assert ended.returncode == exit_code
    assert ended.stdout.endswith(b"Once") or ended.stdout == b"Once\n"
    assert ended.stderr == b"mlxbc: the deadline passed after 3 tokens; -o deadline_ms N allows more time\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("bad_request", 2),
        ("queue_full", 75),
        ("shutting_down", 75),
        ("out_of_memory", 75),
        ("unknown_model", 78),
        ("timeout", 124),
        ("device_error", 1),
        ("context_too_long", 1),
        ("proto_mismatch", 76),
    ],
)
def test_every_failure_has_its_exit_code(path: Path, code: wire.ErrorCode, exit_code: int) -> None:
    def script(session: Session) -> None:
        session.send(wire.Error(id=session.receive(wire.Generate).id, code=code, message="because"))

    with FakeDaemon(path, script):
        ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stderr) == (exit_code, b"mlxbc: because\n")


def test_a_lost_connection_keeps_the_text_before_it(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        asked.append(request.resume)
        if request.resume is None:
            session.send(accepted(request), wire.Token(id=request.id, text="half", ids=[7]))

    asked: list[wire.Resume | None] = []
    with FakeDaemon(path, script):
        ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stdout) == (74, b"half\n")
    assert asked == [None, wire.Resume(stream="0f" * 16, tokens=[7])], "once it was tried again"


def test_an_answer_goes_on_where_it_was_when_the_daemon_comes_back(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        known = [] if request.resume is None else request.resume.tokens
        session.send(accepted(request))
        for token, text in enumerate(("one ", "two ", "three"), start=1):
            if token > len(known):
                session.send(wire.Token(id=request.id, text=text, ids=[token]))
            if token == 2 and not known:
                return
        session.send(done(request))

    with FakeDaemon(path, script):
        ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"one two three\n", b"")


def test_a_daemon_of_another_protocol_is_told_apart(path: Path) -> None:
    def script(session: Session) -> None:
        session.send(wire.Error(code="proto_mismatch", message="speak 2"))

    with FakeDaemon(path, script, greet=False):
        ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stderr) == (76, b"mlxbc: speak 2\n")


def test_a_socket_path_that_cannot_work_is_a_configuration_error(path: Path) -> None:
    assert command_line.run(path / ("x" * 120), "ask", "?").returncode == 78


def test_a_reader_that_leaves_ends_it_quietly_and_cancels(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request))
        while True:
            session.send(wire.Token(id=request.id, text="more and "))

    def until_hung_up(session: Session) -> None:
        with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):
            script(session)

    with FakeDaemon(path, until_hung_up), command_line.start(path, "ask", "?", stdin=subprocess.DEVNULL) as process:
        assert process.stdout.read(1) == b"m"
        process.stdout.close()
        assert process.wait(10) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_io_error(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="text"), done(request))

    with FakeDaemon(path, script), Path("/dev/full").open("wb") as full:
        ended = command_line.run(path, "ask", "?", stdout=full)
    assert ended.returncode == 74
    assert b"No space left" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", ["ask hi", "log path", "config path", "completion bash"])
def test_a_closed_standard_output_is_an_io_error(path: Path, arguments: str) -> None:
    command = f"exec {sys.executable} -m mlxbc {arguments} <&- >&-"
    ended = subprocess.run(
        ["sh", "-c", command], env=command_line.environment(path), stderr=subprocess.PIPE, check=False
    )
    assert (ended.returncode, ended.stderr) == (74, b"mlxbc: standard output is closed\n")


def test_what_no_message_can_say_is_a_usage_error(path: Path) -> None:
    """Texts that are not UTF-8, and values without a bottom."""
    deep = '{"a":' * 9000 + "1" + "}" * 9000
    odd = [["?", b"\xff"], ["-s", b"\xff", "?"], ["-o", "stop", b"\xff", "?"], ["-o", "schema", deep, "?"]]
    for arguments in odd:
        with FakeDaemon(path, lambda session: None):
            ended = command_line.run(path, "ask", *arguments)
        assert ended.returncode == 2, ended.stderr
        said = ended.stderr.decode()
        assert "is not UTF-8" in said or "nested too deeply" in said
        assert "Traceback" not in said


# ------------------------------------------------------------ Ctrl-C


def storyteller(session: Session) -> None:
    request = session.receive(wire.Generate)
    session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
    assert session.receive(wire.Cancel).id == request.id
    session.send(wire.Token(id=request.id, text=" a"), done(request, "cancelled"))


def test_ctrl_c_cancels_and_keeps_the_text(path: Path) -> None:
    with FakeDaemon(path, storyteller), command_line.start(path, "ask", "?", stdin=subprocess.DEVNULL) as process:
        assert process.stdout.read(9) == b"Once upon"
        command_line.interrupt(process)
        assert process.stdout.read() == b" a\n"
        assert process.stderr.read() == b""
        assert process.wait(10) == 130


def test_ctrl_c_works_from_the_keyboard_too(path: Path) -> None:
    with FakeDaemon(path, storyteller), OnTerminal(path, "ask", "?") as terminal:
        terminal.see("Once upon")
        terminal.interrupt()
        terminal.see(" a")
        assert terminal.end() == 130


def test_a_second_ctrl_c_does_not_wait_for_the_daemon(path: Path) -> None:
    cancelled = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
        session.receive(wire.Cancel)
        cancelled.set()
        session.until_gone()

    with FakeDaemon(path, script), command_line.start(path, "ask", "?", stdin=subprocess.DEVNULL) as process:
        assert process.stdout.read(9) == b"Once upon"
        command_line.interrupt(process)
        assert cancelled.wait(10)
        command_line.interrupt(process)
        assert process.wait(10) == 130


@pytest.mark.parametrize("arguments", [(), ("--md",), ("--log",)])
def test_ctrl_c_twice_at_the_keyboard_leaves_at_once_and_the_terminal_as_it_was(
    path: Path, arguments: tuple[str, ...]
) -> None:
    cancelled = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
        session.receive(wire.Cancel)
        cancelled.set()
        session.until_gone()

    home = {"HOME": str(path.parent)}
    with FakeDaemon(path, script), OnTerminal(path, "ask", *arguments, "?", **home) as terminal:
        terminal.see("Once upon")
        terminal.interrupt()
        assert cancelled.wait(10)
        terminal.interrupt()
        assert terminal.end() == 130
        assert b"\x1b[?25l" not in terminal.screen
        assert b"Traceback" not in terminal.screen


def test_an_ignored_interrupt_stays_ignored(path: Path) -> None:
    interrupted = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once"))
        assert interrupted.wait(10)
        session.send(wire.Token(id=request.id, text=" upon"), done(request))

    command = f"trap '' INT; exec {sys.executable} -m mlxbc ask hi"
    with (
        FakeDaemon(path, script),
        subprocess.Popen(
            ["sh", "-c", command],
            env=command_line.environment(path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout.read(4) == b"Once"
        command_line.interrupt(process)
        interrupted.set()
        assert process.stdout.read() == b" upon\n"
        assert process.wait(10) == 0
