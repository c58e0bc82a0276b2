"""What form an answer has, and what belongs at a place in a file, by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_line
import pytest
from fake_daemon import FakeDaemon, Session, accepted, done

from mlxbc import wire

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


class Daemon:
    """A script that keeps the request and answers it with these tokens."""

    def __init__(
        self, *tokens: Any, unparsed: list[str] | None = None, reason: wire.FinishReason | None = None
    ) -> None:
        self.requests: list[wire.Generate] = []
        self._tokens = tokens or ({"text": "ok"},)
        self._unparsed = unparsed or []
        self._reason = reason

    def __call__(self, session: Session) -> None:
        request = session.receive(wire.Generate)
        self.requests.append(request)
        end = done(request)
        changed = wire.Done(
            id=end.id,
            reason=self._reason or end.reason,
            usage=end.usage,
            timings=end.timings,
            unparsed=self._unparsed,
            mean_logprob=-0.5,
        )
        session.send(accepted(request), *(wire.Token(id=request.id, **token) for token in self._tokens), changed)

    @property
    def request(self) -> wire.Generate:
        (request,) = self.requests
        return request


def run(path: Path, daemon: Daemon, *arguments: str, stdin: bytes = b"") -> Any:
    with FakeDaemon(path, daemon):
        return command_line.run(path, *arguments, stdin=stdin)


# -- the form of an answer


def test_a_schema_and_a_grammar_come_from_files(path: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"é": {"type": ["string", "null"]}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    daemon = Daemon()
    assert run(path, daemon, "ask", "--schema", str(tmp_path / "s.json"), "x").returncode == 0
    assert daemon.request.schema == schema
    (tmp_path / "g.lark").write_text('start: "é"\n')
    daemon = Daemon()
    run(path, daemon, "ask", "--grammar", str(tmp_path / "g.lark"), "x")
    assert daemon.request.grammar == 'start: "é"\n'


def test_explain_asks_about_the_same_files_and_form(path: Path, tmp_path: Path) -> None:
    asked: list[wire.Generate] = []

    def explaining(session: Session) -> None:
        request = session.receive(wire.Explain)
        asked.append(request)
        plan = wire.Plan("speculative", "continuous", on=["drafts"], drafters=["lookup", "model"])
        told = wire.Explained(id=request.id, model="tiny", prompt=8, context=99, priority="normal", plan=plan)
        session.send(told)

    (tmp_path / "s.json").write_text('{"type": "object"}')
    (tmp_path / "t.json").write_text(json.dumps([TOOL]))
    (tmp_path / "f.py").write_text("pass\n")
    with FakeDaemon(path, explaining):
        arguments = ("--schema", str(tmp_path / "s.json"), "--tools", str(tmp_path / "t.json"))
        ended = command_line.run(path, "explain", "-f", str(tmp_path / "f.py"), *arguments, "Why?")
    assert ended.returncode == 0
    assert [b"drafts", b"yes:", b"lookup,", b"model"] in [line.split() for line in ended.stdout.splitlines()]
    (request,) = asked
    assert request.schema == {"type": "object"}
    assert [tool.function.name for tool in request.tools] == ["f"]
    assert request.messages == [wire.Message(role="user", content="pass\n\nWhy?")]
    refused = command_line.run(path, "explain", "--schema", "a", "--grammar", "b", "Why?")
    assert (refused.returncode, b"not allowed with" in refused.stderr) == (2, True)


@pytest.mark.parametrize("form", [("--schema", "s.json"), ("-o", "choice", "yes"), ("-o", "regex", "[a-z]+")])
def test_an_answer_that_was_cut_before_it_had_its_form_is_a_failure_that_is_told(
    path: Path, tmp_path: Path, form: tuple[str, ...]
) -> None:
    (tmp_path / "s.json").write_text('{"type": "object"}')
    arguments = [str(tmp_path / each) if each == "s.json" else each for each in form]
    daemon = Daemon({"text": '{"a'}, reason="length")
    result = run(path, daemon, "ask", *arguments, "x")
    assert (result.returncode, result.stdout) == (1, b'{"a\n')
    assert b"the answer has not the form that was asked for" in result.stderr
    whole = run(path, Daemon(), "ask", *arguments, "x")
    assert (whole.returncode, whole.stderr) == (0, b"")
    free = run(path, Daemon(reason="length"), "ask", "x")
    assert (free.returncode, free.stderr) == (0, b"")


def test_options_can_say_it_too(path: Path) -> None:
    daemon = Daemon()
    run(path, daemon, "ask", "-o", "choice", "yes", "-o", "choice", "no", "-o", "thinking", "false", "x")
    assert (daemon.request.choice, daemon.request.thinking) == (["yes", "no"], False)
    daemon = Daemon()
    run(path, daemon, "ask", "-o", "schema", '{"type": "null"}', "-o", "thinking_budget", "9", "x")
    assert (daemon.request.schema, daemon.request.thinking_budget) == ({"type": "null"}, 9)


def test_calls_are_printed_as_lines_of_json(path: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([TOOL]))
    call = wire.ToolCall(index=0, id="abcdefghi", name="f", arguments='{"a":"é"}')
    tokens = ({"text": "Let me see.\n"}, {"text": "", "channel": "tool_calls", "call": call})
    daemon = Daemon(*tokens)
    ended = run(path, daemon, "ask", "--tools", str(tmp_path / "t.json"), "x")
    assert daemon.request.tools[0].function.name == "f"
    assert ended.stdout.decode() == 'Let me see.\n{"name":"f","arguments":{"a":"é"},"id":"abcdefghi"}\n'
    ended = run(path, Daemon(*tokens, unparsed=["<tool_call>"]), "ask", "--json", "x")
    whole = json.loads(ended.stdout)
    assert whole["tool_calls"] == [{"index": 0, "id": "abcdefghi", "name": "f", "arguments": '{"a":"é"}'}]
    assert (whole["unparsed"], whole["mean_logprob"], whole["text"]) == (["<tool_call>"], -0.5, "Let me see.\n")


@pytest.mark.parametrize(
    ("content", "option", "complaint"),
    [
        (None, "--schema", "No such file"),
        ("{", "--schema", "truncated"),
        ("[1]", "--schema", "Expected `bool | object`"),
        ('[{"function": {"name": "a b"}}]', "--tools", "$[0].function.name"),
        ('[{"function": {"name": "a"}, "kind": 1}]', "--tools", "unknown field `kind`"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_usage_error(
    path: Path, tmp_path: Path, content: str | None, option: str, complaint: str
) -> None:
    file = tmp_path / "f"
    if content is not None:
        file.write_text(content)
    ended = command_line.run(path, "ask", option, str(file), "x")
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert complaint in ended.stderr.decode()


def test_a_grammar_that_the_daemon_refuses_is_a_usage_error(path: Path) -> None:
    def refuses(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(wire.Error(id=request.id, code="grammar_invalid", message="at column 3"))

    with FakeDaemon(path, refuses):
        ended = command_line.run(path, "ask", "-o", "regex", "a(", "x")
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert "at column 3" in ended.stderr.decode()


# -- a place in a file

SOURCE = "one\ntwo é\nthree"


@pytest.mark.parametrize(
    ("place", "before"),
    [
        ("f.py", SOURCE),
        ("f.py:1", "one"),
        ("f.py:2:1", "one\n"),
        ("f.py:2:6", "one\ntwo é"),
        ("f.py:3:3", "one\ntwo é\nth"),
        ("a:1:2", SOURCE),
    ],
)
def test_the_place_splits_the_file(path: Path, tmp_path: Path, place: str, before: str) -> None:
    name = "a:1:2" if place.startswith("a") else "f.py"
    (tmp_path / name).write_bytes(SOURCE.encode())
    daemon = Daemon({"text": "NEW"})
    ended = run(path, daemon, "fim", str(tmp_path / place), "--single-line", "-o", "max_tokens", "5")
    fim = daemon.request.fim
    assert fim is not None
    assert (fim.prefix, fim.suffix) == (before, SOURCE[len(before) :])
    assert (fim.path, fim.single_line, daemon.request.max_tokens) == (str(tmp_path / name), True, 5)
    assert ended.stdout == b"NEW\n"


def test_the_whole_file_comes_back_with_the_text_in_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "f.py").write_bytes(b"a\r\nb\r\n")
    ended = run(path, Daemon({"text": "N"}, {"text": "EW"}), "fim", "--insert", f"{tmp_path}/f.py:2")
    assert ended.stdout == b"a\r\nbNEW\r\n"
    ended = run(path, Daemon({"text": "NEW"}), "fim", "--insert", f"{tmp_path}/f.py:1:2")
    assert ended.stdout == b"aNEW\r\nb\r\n"


def test_standard_input_and_other_files_can_be_shown(path: Path, tmp_path: Path) -> None:
    (tmp_path / "u.py").write_text("U = 1\n")
    daemon = Daemon()
    other = str(tmp_path / "u.py")
    run(path, daemon, "fim", "-c", other, "--path", "n.md", "--language", "markdown", "-", stdin="é".encode())
    assert daemon.request.fim == wire.Fim(
        prefix="é", path="n.md", language="markdown", context=[wire.Excerpt(text="U = 1\n", path=other)]
    )


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("f.py:4", "no line 4: the file has 3"),
        ("f.py:1:5", "no column 5: line 1 has 3"),
        ("f.py:0", "no line 0"),
        ("no.py:1", "No such file"),
        ("b.py", "not UTF-8"),
    ],
)
def test_a_place_that_is_not_there_is_a_usage_error(path: Path, tmp_path: Path, place: str, complaint: str) -> None:
    (tmp_path / "f.py").write_text(SOURCE)
    (tmp_path / "b.py").write_bytes(b"\xff")
    ended = command_line.run(path, "fim", str(tmp_path / place))
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert complaint in ended.stderr.decode()
