"""The models of `llm`: the real command and library, before a scripted daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llm
import pytest
from click.testing import CliRunner, Result
from fake_daemon import FakeDaemon, Script, Session, accepted, done
from llm import plugins
from llm.cli import cli
from llm.parts import AttachmentPart

from mlxbc import llm_plugin, wire
from mlxbc.llm_plugin import known
from mlxbc.llm_plugin.models import AsyncMlxbc, Mlxbc

ENTRIES = [wire.ModelEntry(name=name, source="hub", path="/m", bytes=1) for name in ("smollm2", "org/name")]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A socket's path, and a home for whoever runs here. Of the plugins of `llm` there are its own and this one."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        monkeypatch.setenv("MLXBC_SOCKET", f"{directory}/s")
        monkeypatch.setenv("HOME", directory)
        monkeypatch.setenv("LLM_USER_PATH", f"{directory}/llm")
        monkeypatch.setattr(plugins, "LLM_LOAD_PLUGINS", "")
        plugins.load_plugins()
        for other in plugins.pm.get_plugins():
            if getattr(other, "__name__", "") == llm_plugin.__name__:
                plugins.pm.unregister(other)
        plugins.pm.register(llm_plugin, "mlxbc")
        yield Path(directory) / "s"
        plugins.pm.unregister(llm_plugin)


class Partner:
    """Lists two models, and answers every question with its number."""

    def __init__(self) -> None:
        self.requests: list[wire.Generate] = []

    def __call__(self, session: Session) -> None:
        while True:
            request = session.receive(wire.Request)
            match request:
                case wire.Models():
                    session.send(wire.ModelList(id=request.id, models=ENTRIES))
                case wire.Generate():
                    self.requests.append(request)
                    number = str(len(self.requests))
                    session.send(
                        accepted(request),
                        wire.Token(id=request.id, text="hmm", channel="reasoning"),
                        wire.Token(id=request.id, text="answer "),
                        wire.Token(id=request.id, text=number),
                        done(request),
                    )

    @property
    def said(self) -> list[list[tuple[str, str]]]:
        return [[(one.role, one.content or "") for one in request.messages or ()] for request in self.requests]


def run(*arguments: str, stdin: str = "") -> Result:
    """The command `llm`, in this process: starting it takes a second each time."""
    return CliRunner().invoke(cli, arguments, input=stdin)


# ------------------------------------------------------------ the command


def test_it_answers_with_the_default_model_or_another_and_logs_what_it_cost(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        first = run("-m", "mlxbc", "-s", "Be brief.", "-o", "seed", "3", "-o", "stop", "###", "Hello")
        second = run("-m", "mlxbc/org/name", "--no-stream", stdin="piped")
    assert (first.exit_code, first.stdout) == (0, "answer 1\n"), first.stderr
    assert (second.exit_code, second.stdout) == (0, "answer 2\n"), second.stderr
    assert partner.said == [[("system", "Be brief."), ("user", "Hello")], [("user", "piped")]]
    asked = [(request.model, request.seed, request.stop) for request in partner.requests]
    assert asked == [(None, 3, ["###"]), ("org/name", None, [])]
    logged = json.loads(run("logs", "--json", "-n", "1").stdout)[0]
    assert (logged["input_tokens"], logged["output_tokens"], logged["resolved_model"]) == (5, 3, "org/name")


def test_a_conversation_goes_on(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run("-m", "mlxbc", "-s", "Be brief.", "one")
        assert run("-c", "two").stdout == "answer 2\n"
        chat = run("chat", "-m", "mlxbc", stdin="three\nfour\nquit\n")
    assert "answer 4" in chat.stdout
    assert partner.said[1] == [("system", "Be brief."), ("user", "one"), ("assistant", "answer 1"), ("user", "two")]
    assert partner.said[3] == [("user", "three"), ("assistant", "answer 3"), ("user", "four")]


def test_its_models_are_listed_even_while_the_daemon_is_away(path: Path) -> None:
    def listed() -> set[str]:
        return {line.split()[1] for line in run("models").stdout.splitlines() if "mlxbc" in line}

    assert listed() == {"mlxbc"}
    with FakeDaemon(path, Partner()):
        assert listed() == {"mlxbc", "mlxbc/smollm2", "mlxbc/org/name"}
    assert listed() == {"mlxbc", "mlxbc/smollm2", "mlxbc/org/name"}


def test_without_a_daemon_one_line_says_how_to_start_it(path: Path) -> None:
    ended = run("-m", "mlxbc", "Hello")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert "mlxbc serve --detach" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_options_are_checked(path: Path) -> None:
    assert "Extra inputs are not permitted" in run("-m", "mlxbc", "-o", "temprature", "1", "x").stderr
    with FakeDaemon(path, Partner()):
        ended = run("-m", "mlxbc", "-o", "temperature", "11", "x")
    assert ended.exit_code == 1
    assert "<= 10" in ended.stderr


# ------------------------------------------------------------ the library


def test_reasoning_is_reasoning(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        response = Mlxbc(None).prompt("Hello")
        events = [(event.type, event.chunk) for event in response.stream_events()]
        hidden = Mlxbc(None).prompt("Hello", hide_reasoning=True)
        assert hidden.text() == "answer 2"
    assert events == [("reasoning", "hmm"), ("text", "answer "), ("text", "1")]
    assert response.text() == "answer 1"
    assert response.response_json
    assert response.response_json["reason"] == "stop"


async def test_it_can_be_awaited(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        conversation = AsyncMlxbc("tiny").conversation()
        assert await (await conversation.prompt("one", system="Be brief.")).text() == "answer 1"
        assert [piece async for piece in await conversation.prompt("two")] == ["answer ", "2"]
    assert partner.said[1] == [("system", "Be brief."), ("user", "one"), ("assistant", "answer 1"), ("user", "two")]


def cancelled(heard: threading.Event) -> Script:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once"))
        assert session.receive(wire.Cancel).id == request.id
        heard.set()

    return script


def test_who_stops_reading_cancels(path: Path) -> None:
    heard = threading.Event()
    with FakeDaemon(path, cancelled(heard)):
        pieces = iter(Mlxbc(None).prompt("Hello"))
        assert next(pieces) == "Once"
        pieces.close()
        assert heard.wait(10)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"attachments": [llm.Attachment(content=b"x")]}, "does not support attachments"),
        ({"messages": [llm.Message(role="user", parts=[AttachmentPart()])]}, "AttachmentPart"),
    ],
)
def test_what_cannot_be_done_is_refused(path: Path, fields: dict[str, Any], complaint: str) -> None:
    with FakeDaemon(path, Partner()), pytest.raises((ValueError, llm.ModelError), match=complaint):
        Mlxbc(None).prompt("Hello", **fields).text()


def test_a_schema_reaches_the_daemon(path: Path) -> None:
    partner = Partner()
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    with FakeDaemon(path, partner):
        Mlxbc(None).prompt("Hello", schema=schema).text()
    assert partner.requests[0].schema == schema


def test_tools_are_called_and_their_results_told(path: Path) -> None:
    requests: list[wire.Generate] = []

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        requests.append(request)
        if len(requests) == 1:
            calls = [
                wire.ToolCall(index=0, id="call_1", name="multiply", arguments='{"a": 6, "b": 7}'),
                wire.ToolCall(index=1, id="call_2", name="multiply", arguments='{"a": 2, "b": 2}'),
            ]
            tokens = [wire.Token(id=request.id, text="", channel="tool_calls", call=call) for call in calls]
            session.send(accepted(request), wire.Token(id=request.id, text="Let me see."), *tokens, done(request))
        else:
            session.send(accepted(request), wire.Token(id=request.id, text="42 and 4."), done(request))

    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    with FakeDaemon(path, lambda session: script(session)):
        assert Mlxbc(None).chain("6 times 7, 2 times 2?", tools=[multiply]).text() == "Let me see. 42 and 4."
    first, second = requests
    (tool,) = first.tools
    assert (tool.function.name, tool.function.description) == ("multiply", "Multiply two numbers.")
    assert tool.function.parameters["required"] == ["a", "b"]
    asked, called, *results = second.messages or []
    assert (asked.role, called.role, called.content) == ("user", "assistant", "Let me see.")
    assert [(call.id, call.name, call.arguments) for call in called.tool_calls] == [
        ("call_1", "multiply", '{"a":6,"b":7}'),
        ("call_2", "multiply", '{"a":2,"b":2}'),
    ]
    assert [(one.role, one.tool_call_id, one.name, one.content) for one in results] == [
        ("tool", "call_1", "multiply", "42"),
        ("tool", "call_2", "multiply", "4"),
    ]


# ------------------------------------------------------------ the entry point


def test_the_entry_point_leads_here() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["llm"] == {"mlxbc": "mlxbc.llm_plugin"}


def test_where_there_is_no_llm_loading_it_breaks_nothing() -> None:
    script = "import sys; sys.modules['llm'] = None; import mlxbc.llm_plugin as p; assert callable(p.register_models)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_broken_list_of_models_is_no_list(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        assert known.names() == ["smollm2", "org/name"]
    (kept,) = path.parent.rglob("llm-models.json")
    assert known.names() == ["smollm2", "org/name"]
    kept.write_bytes(b"{")
    assert known.names() == []
