"""What `mlxbc ask` can be asked with and what it can make of an answer: files, templates, code, Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_line
import msgspec
import pytest
from command_line import OnTerminal
from fake_daemon import FakeDaemon, Session, accepted, answering, done

from mlxbc import wire


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


class Recorder:
    """A script that keeps the requests and answers each with the same text, in pieces."""

    def __init__(self, text: str = "ok", size: int = 7) -> None:
        self.requests: list[wire.Generate] = []
        self._pieces = [text[i : i + size] for i in range(0, len(text), size)]

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Generate)
            self.requests.append(request)
            session.send(accepted(request), *(wire.Token(id=request.id, text=piece) for piece in self._pieces))
            session.send(done(request))

    @property
    def said(self) -> list[tuple[str, str]]:
        (request,) = self.requests
        return [(message.role, message.content or "") for message in request.messages or ()]


# ------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        (["-f", "a.txt", "Why?"], b"", "A\n\nWhy?"),
        (["-f", "a.txt", "-f", "b.txt", "Why?"], b"", "--- a.txt\nA\n\n--- b.txt\nB1\nB2\n\nWhy?"),
        (["-f", "a.txt"], b"piped\n", "piped\n\nA"),
        (["--raw", "-f", "a.txt", "-f", "b.txt", "end"], b"", "A\nB1\nB2\nend"),
    ],
)
def test_files_go_before_the_arguments(path: Path, arguments: list[str], stdin: bytes, text: str) -> None:
    (path.parent / "a.txt").write_text("A\n")
    (path.parent / "b.txt").write_text("B1\nB2\n")
    record = Recorder()
    with FakeDaemon(path, record):
        assert command_line.run(path, "ask", *arguments, stdin=stdin, cwd=path.parent).returncode == 0
    (request,) = record.requests
    assert (request.messages[-1].content if request.messages else request.prompt) == text


@pytest.mark.parametrize(("name", "complaint"), [("none", "cannot read none"), (".", "directory"), ("bin", "UTF-8")])
def test_a_file_that_is_no_text_is_a_usage_error(path: Path, name: str, complaint: str) -> None:
    (path.parent / "bin").write_bytes(b"\xff\xfe")
    ended = command_line.run(path, "ask", "-f", name, "x", cwd=path.parent)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert complaint in ended.stderr.decode()


# ------------------------------------------------------------ code

EXPLAINED = "Sure:\n\n```sh\nls *.png\n```\n\nThis lists them.\n"


def test_the_first_block_of_code_can_be_taken_out(path: Path) -> None:
    record = Recorder(EXPLAINED)
    with FakeDaemon(path, record):
        ended = command_line.run(path, "ask", "-x", "List PNGs")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"ls *.png\n", b"")
    assert record.said == [("user", "List PNGs")]


def test_an_answer_without_code_is_not_taken_for_code(path: Path) -> None:
    with FakeDaemon(path, answering("rm is dangerous")):
        ended = command_line.run(path, "ask", "-x", "List PNGs")
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"no block of code" in ended.stderr


@pytest.mark.parametrize("answer", [EXPLAINED, "ls *.png\n", "ls *.png"])
def test_code_alone_can_be_asked_for(path: Path, answer: str) -> None:
    record = Recorder(answer)
    with FakeDaemon(path, record):
        ended = command_line.run(path, "ask", "--code", "-s", "Use sh.", "List PNGs")
    assert (ended.returncode, ended.stdout) == (0, b"ls *.png\n")
    (system, user) = record.said
    assert system[1].startswith("Use sh.\n\nAnswer with code alone")
    assert user == ("user", "List PNGs")


# ------------------------------------------------------------ Markdown


def test_markdown_is_shown_on_a_terminal_and_left_alone_in_a_pipe(path: Path) -> None:
    document = "# Title\n\nSome **bold** words.\n\n```py\nx = 1\n\ny = 2\n```\n\n- a\n- b\n"
    with FakeDaemon(path, Recorder(document, 3)):
        piped = command_line.run(path, "ask", "--md", "x")
        with OnTerminal(path, "ask", "--md", "x") as terminal:
            assert terminal.end() == 0
            screen = terminal.screen.decode()
        with OnTerminal(path, "ask", "--md", "x", pipe_stdout=True) as terminal:
            assert terminal.end() == 0
            assert terminal.stdout.decode() == document
        with OnTerminal(path, "ask", "--md", "x", NO_COLOR="1") as terminal:
            assert terminal.end() == 0
            assert terminal.screen.decode().replace("\r\n", "\n") == document
    assert piped.stdout.decode() == document
    last = screen.rpartition("\x1b[J")[2]
    assert "\x1b[1mbold\x1b[0m" in screen
    assert "**bold**" not in last
    assert " • \x1b[0mb" in last or " • b" in command_line.plain(last)
    assert command_line.plain(screen).count("Title") >= 1
    assert "\x1b[?25l" not in screen  # a second Ctrl-C could not show the cursor again


def test_numbers_of_a_list_have_their_dots_and_long_items_hang(path: Path) -> None:
    document = "9. " + "long words " * 9 + "\n   - inner\n10. ten\n"
    with FakeDaemon(path, Recorder(document)), OnTerminal(path, "ask", "--md", "x", COLUMNS="40") as terminal:
        assert terminal.end() == 0
    shown = command_line.plain(terminal.screen.decode().rpartition("\x1b[J")[2])
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    assert lines[0] == "  9. long words long words long words"
    assert lines[1] == "     long words long words long words"
    assert lines[-2:] == ["      • inner", " 10. ten"]


def test_what_a_terminal_would_obey_is_shown_instead(path: Path) -> None:
    evil = "safe\x1b]0;owned\x07\x1b[2J\x9b1mtext\r\n\tend\n"
    with FakeDaemon(path, answering(evil)):
        assert command_line.run(path, "ask", "x").stdout.decode() == evil
        for arguments in ((), ("--md",)):
            with OnTerminal(path, "ask", *arguments, "x", TERM="xterm") as terminal:
                assert terminal.end() == 0
                screen = terminal.screen
            for sign in (b"\x07", b"\x1b]", b"\x1b[2J", "\x9b".encode()):
                assert sign not in screen
            assert "safe␛]0;owned␛␛[2J␛1mtext" in screen.decode()


# ------------------------------------------------------------ dry runs


def rendering(session: Session) -> None:
    request = session.receive(wire.Tokenize)
    assert (request.model, request.template_options) == ("tiny", {"enable_thinking": False})
    session.send(wire.Tokens(id=request.id, tokens=[1, 2, 3], text="<user>Hi<end>"))


def test_a_dry_run_shows_what_the_model_would_see(path: Path) -> None:
    arguments = ("ask", "--dry-run", "-m", "tiny", "-o", "template_options", '{"enable_thinking": false}', "Hi")
    with FakeDaemon(path, rendering):
        ended = command_line.run(path, *arguments)
        as_json = command_line.run(path, *arguments, "--json")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"<user>Hi<end>\n", b"3 tokens\n")
    assert msgspec.json.decode(as_json.stdout) == {
        "request": {
            "template_options": {"enable_thinking": False},
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
        },
        "prompt": "<user>Hi<end>",
        "tokens": 3,
    }


# ------------------------------------------------------------ templates


def run(path: Path, *arguments: str, **options: Any) -> Any:
    return command_line.run(path, *arguments, env={"HOME": str(path.parent)}, **options)


def test_a_template_is_saved_and_asked_with(path: Path) -> None:
    saved = run(path, "ask", "--save", "greet", "-s", "Be $mood.", "-m", "tiny", "-o", "temperature", "0", "Hi, $input")
    assert saved.returncode == 0
    assert b"mlxbc ask -t greet" in saved.stderr
    record = Recorder()
    with FakeDaemon(path, record):
        assert run(path, "ask", "-t", "greet", "-p", "mood", "kind", "Ada").stdout == b"ok\n"
    assert record.said == [("system", "Be kind."), ("user", "Hi, Ada")]
    assert (record.requests[0].model, record.requests[0].temperature) == ("tiny", 0)
    assert b"greet" in run(path, "templates").stdout
    shown = run(path, "templates", "greet").stdout.decode()
    assert 'prompt = "Hi, $input"\nsystem = "Be $mood."\nmodel = "tiny"\n' in shown


def test_what_the_command_line_says_wins_over_a_template(path: Path) -> None:
    run(path, "ask", "--save", "t", "-m", "one", "-s", "A", "-o", "seed", "1", "-x", "Hi")
    record = Recorder("```\ncode\n```\n")
    with FakeDaemon(path, record):
        assert run(path, "ask", "-t", "t", "-m", "two", "-s", "B", "-o", "seed", "2").stdout == b"code\n"
    (request,) = record.requests
    assert (request.model, request.seed, record.said) == ("two", 2, [("system", "B"), ("user", "Hi")])


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("-t", "none", "x"), 78, "there is no template none"),
        (("-p", "a", "b", "x"), 2, "-t NAME"),
        (("--raw", "-c", "x"), 2, "--raw leaves out"),
        (("--raw", "--code", "x"), 2, "--raw leaves out"),
        (("-x", "--md", "x"), 2, "not allowed with"),
        (("-c", "--cid", "x", "y"), 2, "not allowed with"),
    ],
)
def test_what_makes_no_sense_is_told(path: Path, arguments: tuple[str, ...], code: int, complaint: str) -> None:
    ended = run(path, "ask", *arguments)
    assert (ended.returncode, ended.stdout) == (code, b"")
    assert complaint in ended.stderr.decode()
