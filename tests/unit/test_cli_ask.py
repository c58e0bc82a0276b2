"""`mlxbc ask`, run as a user runs it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import command_line
import msgspec
import pytest
from command_line import OnTerminal
from fake_daemon import FakeDaemon, Script, Session, accepted, answering, done

from mlxbc import wire
from mlxbc.result import Result


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


class Recorder:
    """A script that keeps the requests and answers each with the same pieces."""

    def __init__(self, *pieces: str) -> None:
        self.requests: list[wire.Generate] = []
        self._pieces = pieces or ("ok",)

    def __call__(self, session: Session) -> None:
        request = session.receive(wire.Generate)
        self.requests.append(request)
        tokens = [wire.Token(id=request.id, text=piece) for piece in self._pieces]
        session.send(accepted(request), *tokens, done(request))

    @property
    def text(self) -> str | None:
        (request,) = self.requests
        return request.messages[-1].content if request.messages else request.prompt


# ------------------------------------------------------------ the answer


def test_the_answer_goes_to_standard_output_with_a_newline_at_its_end(path: Path) -> None:
    with FakeDaemon(path, answering("Par", "is.")):
        ended = command_line.run(path, "ask", "Which city?")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"Paris.\n", b"")


def test_a_newline_that_is_there_is_not_doubled(path: Path) -> None:
    with FakeDaemon(path, answering("Paris.\n")):
        assert command_line.run(path, "ask", "?").stdout == b"Paris.\n"


def test_an_empty_answer_is_empty(path: Path) -> None:
    with FakeDaemon(path, answering()):
        assert command_line.run(path, "ask", "?").stdout == b""


def test_pieces_are_written_as_they_come(path: Path) -> None:
    seen = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="first"))
        assert seen.wait(10)
        session.send(wire.Token(id=request.id, text=" second"), done(request))

    with FakeDaemon(path, script), command_line.start(path, "ask", "?", stdin=subprocess.DEVNULL) as process:
        assert process.stdout.read(5) == b"first"
        seen.set()
        assert process.stdout.read() == b" second\n"


def failing_after(text: str) -> Script:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(
            accepted(request),
            wire.Token(id=request.id, text=text),
            wire.Error(id=request.id, code="internal", message="it broke"),
        )

    return script


def test_without_streaming_nothing_is_written_before_the_end(path: Path) -> None:
    with FakeDaemon(path, failing_after("half")):
        ended = command_line.run(path, "ask", "--no-stream", "?")
    assert (ended.returncode, ended.stdout) == (1, b"")
    path_of_whole = path.with_name("t")
    with FakeDaemon(path_of_whole, answering("whole")):
        assert command_line.run(path_of_whole, "ask", "--no-stream", "?").stdout == b"whole\n"


def test_a_failure_keeps_the_text_before_it(path: Path) -> None:
    with FakeDaemon(path, failing_after("half")):
        ended = command_line.run(path, "ask", "?")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"half\n", b"mlxbc: it broke\n")


def test_json_is_the_whole_result_in_one_line(path: Path) -> None:
    with FakeDaemon(path, answering("Par", "is")):
        ended = command_line.run(path, "ask", "--json", "?")
    assert ended.stdout.count(b"\n") == 1
    result = msgspec.json.decode(ended.stdout, type=Result)
    assert (result.text, result.reason, result.model, result.usage.generated) == ("Paris", "stop", "tiny", 2)


def test_stats_go_to_standard_error_even_where_nobody_looks(path: Path) -> None:
    with FakeDaemon(path, answering("a", "b", "c")):
        ended = command_line.run(path, "ask", "--stats", "?")
    assert ended.stdout == b"abc\n"
    assert ended.stderr.decode() == (
        "tiny, 5 prompt tokens (2 cached), 3 generated, first token after 25 ms, "
        "prefill 20 ms, decode 100 ms, 20.0 tokens/s\n"
    )


def test_a_locale_without_a_character_does_not_stop_the_answer(path: Path) -> None:
    with FakeDaemon(path, answering("na\u00efve")):
        ended = command_line.run(path, "ask", "?", env={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stdout) == (0, b"na?ve\n")


# ------------------------------------------------------------ the question


@pytest.mark.parametrize(
    ("arguments", "stdin", "text"),
    [
        (["What", "is", "this?"], b"", "What is this?"),
        (["Why?"], b"a diff\n", "a diff\n\nWhy?"),
        ([], b"\n  indented\n\n", "  indented"),
        (["-"], b"piped", "piped"),
        (["Why?", "-"], b"piped", "piped\n\nWhy?"),
        (["--", "-1", "+", "1"], b"", "-1 + 1"),
        (["before", "-o", "seed", "1", "after"], b"", "before after"),
        (["--raw"], b"def f(\n", "def f(\n"),
        (["--raw", "tail"], b"head ", "head tail"),
        ([], "\u00fc\u4f60\U0001f600".encode(), "\u00fc\u4f60\U0001f600"),
    ],
)
def test_the_text_is_standard_input_and_then_the_arguments(
    path: Path, arguments: list[str], stdin: bytes, text: str
) -> None:
    record = Recorder()
    with FakeDaemon(path, record):
        assert command_line.run(path, "ask", *arguments, stdin=stdin).returncode == 0
    assert record.text == text


def test_raw_text_is_a_prompt_and_other_text_a_chat(path: Path) -> None:
    record = Recorder()
    with FakeDaemon(path, record):
        command_line.run(path, "ask", "--raw", "once")
        command_line.run(path, "ask", "-s", "Be brief.", "hi")
    raw, chat = record.requests
    assert (raw.prompt, raw.messages) == ("once", None)
    assert chat.messages == [
        wire.Message(role="system", content="Be brief."),
        wire.Message(role="user", content="hi"),
    ]


def test_a_daemon_that_is_not_ready_yet_is_waited_for_and_a_person_is_told(path: Path) -> None:
    ready, record = threading.Event(), Recorder("Hello")

    def slow(session: Session) -> None:
        assert ready.wait(command_line.PATIENCE)
        session.welcome()
        record(session)

    with FakeDaemon(path, slow, greet=False), OnTerminal(path, "ask", "hi") as terminal:
        terminal.see("the daemon is getting ready")
        ready.set()
        terminal.see("Hello")
        assert terminal.end() == 0


def test_standard_input_of_a_terminal_is_read_only_for_a_dash(path: Path) -> None:
    record = Recorder()
    with FakeDaemon(path, record):
        with OnTerminal(path, "ask", "hi") as terminal:
            assert terminal.end() == 0
        with OnTerminal(path, "ask", "-") as terminal:
            terminal.type("typed\n\x04")
            assert terminal.end() == 0
    assert [request.messages[0].content for request in record.requests if request.messages] == ["hi", "typed"]


def test_options_are_typed_by_the_wire(path: Path) -> None:
    record = Recorder()
    options = {
        "temperature": "0.7",
        "top_k": "40",
        "seed": "9",
        "logit_bias": '{"42": -100}',
        "template_options": '{"enable_thinking": false}',
    }
    pairs = [word for key, value in options.items() for word in ("-o", key, value)]
    with FakeDaemon(path, record):
        command_line.run(
            *(path, "ask", *pairs, "-o", "stop", "###", "-o", "stop", "[1]", "-m", "tiny", "--keepalive", "5m", "hi")
        )
    (request,) = record.requests
    assert request == wire.Generate(
        id=request.id,
        messages=[wire.Message(role="user", content="hi")],
        model="tiny",
        temperature=0.7,
        top_k=40,
        seed=9,
        logit_bias={42: -100.0},
        template_options={"enable_thinking": False},
        stop=["###", "[1]"],
        keep_alive=300,
        resumable=True,
    )


def test_a_path_to_a_model_is_made_absolute_and_a_name_is_left_alone(path: Path) -> None:
    record = Recorder()
    with FakeDaemon(path, record):
        for model in ("./m", "sub/m.gguf", "org/name"):
            command_line.run(path, "ask", "-m", model, "hi", cwd=path.parent)
    here = str(path.parent)
    assert [request.model for request in record.requests] == [f"{here}/m", f"{here}/sub/m.gguf", "org/name"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "complaint"),
    [
        ([], b"", "there is no text"),
        (["--raw", ""], b"", "there is no text"),
        ([], b"\xff\xfe", "not UTF-8"),
        (["--raw", "-s", "Be brief.", "x"], b"", "--raw leaves out"),
        (["-o", "temprature", "1", "x"], b"", "did you mean temperature?"),
        (["-o", "max-tokens", "1", "x"], b"", "did you mean max_tokens?"),
        (["-o", "zzz", "1", "x"], b"", "there are cache, choice, "),
        (["-o", "prompt", "1", "x"], b"", "unknown option prompt"),
        (["-o", "temperature", "hot", "x"], b"", "option temperature is a number from 0 to 10, not 'hot'"),
        (["-o", "temperature", "11", "x"], b"", "option temperature is a number from 0 to 10, not '11'"),
        (["-o", "logit_bias", "{", "x"], b"", "option logit_bias is a JSON object with a whole number from 0"),
        (["-o", "stop", "", "x"], b"", "option stop is text of 1 to 1,024 characters, given 16 times at most"),
        (["-o", "seed", "1", "-o", "seed", "2", "x"], b"", "seed is given twice"),
        (["-o", "logprobs", "true", "x"], b"", "--json only"),
        (["-m", "", "x"], b"", "a model's name is not empty"),
        (["--zzz", "x"], b"", "unrecognized arguments: --zzz\n"),
        (
            ["--temperature", "1", "x"],
            b"",
            "unrecognized arguments: --temperature; that is an option of the generation",
        ),
        (["--max-tokens=9", "x"], b"", "generation: -o max_tokens VALUE"),
        (["--jsn", "x"], b"", "did you mean --json?"),
    ],
)
def test_a_usage_error_is_told_before_anything_is_asked(
    path: Path, arguments: list[str], stdin: bytes, complaint: str
) -> None:
    ended = command_line.run(path, "ask", *arguments, stdin=stdin)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert complaint in ended.stderr.decode()
    assert ended.stderr.count(b"\n") == 2, "a line that says it, and one that names the help"


def test_logprobs_are_shown_in_json(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        assert request.logprobs
        entry = wire.TokenLogprob(token=3, text="ok", logprob=-0.5)
        session.send(accepted(request), wire.Token(id=request.id, text="ok", logprobs=[entry]), done(request))

    with FakeDaemon(path, script):
        ended = command_line.run(path, "ask", "--json", "-o", "logprobs", "true", "?")
    result = msgspec.json.decode(ended.stdout, type=Result)
    assert [entry.logprob for entry in result.logprobs] == [-0.5]


# ------------------------------------------------------------ what is shown


def thoughtful(session: Session) -> None:
    request = session.receive(wire.Generate)
    session.send(
        accepted(request, position=3),
        wire.Progress(id=request.id, phase="load", done=37, total=100),
        wire.Progress(id=request.id, phase="prefill", done=12_000, total=30_000),
        wire.Token(id=request.id, text="let me", channel="reasoning"),
        wire.Token(id=request.id, text=" think", channel="reasoning"),
        wire.Token(id=request.id, text="Four."),
        done(request, "length"),
    )


def test_a_terminal_shows_progress_and_reasoning_beside_the_text(path: Path) -> None:
    with FakeDaemon(path, thoughtful), OnTerminal(path, "ask", "2+2?", pipe_stdout=True) as terminal:
        assert terminal.end() == 0
        assert terminal.stdout == b"Four.\n"
        screen = terminal.screen.decode()
    for shown in ("waiting for 3 other requests", "loading 37 %", "reading the prompt: 12k of 30k tokens"):
        assert f"\r\x1b[K{shown}" in screen
    assert "\x1b[2mlet me\x1b[0m\x1b[2m think\x1b[0m" in screen
    assert "stopped after 3 tokens; -o max_tokens N allows more" in screen


def test_text_on_a_terminal_begins_on_a_clean_line(path: Path) -> None:
    with FakeDaemon(path, thoughtful), OnTerminal(path, "ask", "2+2?") as terminal:
        assert terminal.end() == 0
        assert "tokens\r\x1b[K\x1b[2mlet me" in terminal.screen.decode()
        assert "think\x1b[0m\r\n\r\nFour.\r\n" in terminal.screen.decode()


def test_pipes_carry_no_progress_no_reasoning_and_no_escapes(path: Path) -> None:
    with FakeDaemon(path, thoughtful):
        ended = command_line.run(path, "ask", "2+2?")
    assert (ended.stdout, ended.stderr) == (b"Four.\n", b"")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_escapes_gets_none(path: Path, env: dict[str, str]) -> None:
    with FakeDaemon(path, thoughtful), OnTerminal(path, "ask", "2+2?", **env) as terminal:
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.screen
        assert b"let me think\r\n\r\nFour.\r\n" in terminal.screen


def test_who_waits_at_a_terminal_goes_first_unless_told_otherwise(path: Path) -> None:
    record = Recorder()
    with FakeDaemon(path, record):
        for arguments in ((), ("-o", "priority", "background")):
            with OnTerminal(path, "ask", *arguments, "hi") as terminal:
                assert terminal.end() == 0
        with OnTerminal(path, "ask", "hi", pipe_stdout=True) as terminal:
            assert terminal.end() == 0
    assert [request.priority for request in record.requests] == ["interactive", "background", None]


def test_reasoning_can_be_hidden(path: Path) -> None:
    with FakeDaemon(path, thoughtful):
        with OnTerminal(path, "ask", "-R", "2+2?") as terminal:
            assert terminal.end() == 0
            assert b"let me" not in terminal.screen
        ended = command_line.run(path, "ask", "--json", "-R", "2+2?")
        assert b"reasoning" not in ended.stdout
        ended = command_line.run(path, "ask", "--json", "2+2?")
        assert msgspec.json.decode(ended.stdout, type=Result).reasoning == "let me think"


def test_quiet_leaves_the_answer_alone(path: Path) -> None:
    with FakeDaemon(path, thoughtful), OnTerminal(path, "ask", "-q", "-R", "2+2?") as terminal:
        assert terminal.end() == 0
        assert terminal.screen == b"Four.\r\n"
