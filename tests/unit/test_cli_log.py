"""Conversations that are kept: only when somebody said so, for nobody else to read, to go on with."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_line
import msgspec
import pytest
from command_line import OnTerminal
from fake_daemon import FakeDaemon, Session, accepted, done

from mlxbc import wire


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path, in a home of its own."""
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
        return [[message.content or "" for message in request.messages or ()] for request in self.requests]


def run(path: Path, *arguments: str, **options: Any) -> Any:
    return command_line.run(path, *arguments, env={"HOME": str(path.parent)}, **options)


def kept(path: Path) -> list[Path]:
    return sorted(path.parent.rglob("*.jsonl"))


def test_nothing_is_kept_unless_somebody_said_so(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        run(path, "ask", "one")
        run(path, "chat", stdin=b"two\n")
    assert kept(path) == []
    assert list(path.parent.rglob("conversations")) == []


def test_a_conversation_that_was_kept_goes_on_with_its_system_prompt_and_model(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run(path, "ask", "--log", "-s", "Be brief.", "-m", "other", "one")
        assert run(path, "ask", "-c", "two").stdout == b"answer 2\n"
        run(path, "ask", "-c", "-m", "third", "-s", "Be long.", "three")
        run(path, "ask", "-c", "four")
    assert partner.said == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "answer 1", "two"],
        ["Be long.", "one", "answer 1", "two", "answer 2", "three"],
        ["Be long.", "one", "answer 1", "two", "answer 2", "three", "answer 3", "four"],
    ]
    assert [request.model for request in partner.requests] == ["other", "other", "third", "third"]
    (file,) = kept(path)
    assert [request.session for request in partner.requests] == [None, file.stem, file.stem, file.stem]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(file.read_bytes().splitlines()) == 4


def test_any_conversation_can_be_gone_on_with_by_the_end_of_its_name(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run(path, "ask", "--log", "one")
        (first,) = kept(path)
        run(path, "ask", "--log", "other")
        run(path, "ask", "--cid", first.stem[-4:], "two")
        assert run(path, "ask", "--cid", first.stem[:2], "three").returncode == 78
        assert run(path, "ask", "--cid", "none", "three").returncode == 78
    assert partner.said == [["one"], ["other"], ["one", "answer 1", "two"]]


def test_without_one_to_go_on_with_it_says_how_to_keep_them(path: Path) -> None:
    ended = run(path, "ask", "-c", "x")
    assert (ended.returncode, ended.stdout) == (78, b"")
    assert b"--log" in ended.stderr


def test_all_can_be_kept_and_one_left_out(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        assert run(path, "log", "on").returncode == 0
        run(path, "ask", "one")
        run(path, "ask", "--no-log", "two")
        run(path, "ask", "-c", "--no-log", "three")
        run(path, "log", "off")
        run(path, "ask", "four")
    (file,) = kept(path)
    assert len(file.read_bytes().splitlines()) == 1


def test_chats_are_kept_and_gone_on_with_too(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run(path, "chat", "--log", "-s", "Be brief.", stdin=b"one\ntwo\n")
        run(path, "chat", "-c", stdin=b"three\n")
    assert partner.said[-1] == ["Be brief.", "one", "answer 1", "two", "answer 2", "three"]
    assert len(kept(path)) == 1


def test_a_cleared_chat_is_another_conversation(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        run(path, "chat", "--log", stdin=b"one\n/clear\ntwo\n")
    assert len(kept(path)) == 2


def test_what_is_kept_is_listed_shown_and_removed(path: Path) -> None:
    with FakeDaemon(path, Partner()):
        run(
            path, "ask", "--log", "-s", "Be brief.", "one\x1b[2J", "and a question that is longer than the list is wide"
        )
        run(path, "ask", "--log", "two")
    lines = run(path, "log").stdout.decode().splitlines()
    assert re.split(" {2,}", lines[0]) == ["ID", "LAST", "TURNS", "MODEL", "FIRST QUESTION"]
    assert re.fullmatch(r"\S+  [-\d]+ [:\d]+  1 +tiny +one\?\[2J and a question that is .*…", lines[1])
    assert len(lines) == 3
    assert run(path, "log", "show").stdout.decode() == "## user\n\ntwo\n\n## tiny\n\nanswer 2\n\n"
    first = lines[1].split()[0]
    shown = run(path, "log", "show", first, "--json").stdout
    turn = msgspec.json.decode(shown)
    assert (turn["system"], turn["assistant"], turn["model"], turn["reason"]) == (
        "Be brief.",
        "answer 1",
        "tiny",
        "stop",
    )
    listed = [msgspec.json.decode(line) for line in run(path, "log", "--json").stdout.splitlines()]
    assert [entry["turns"] for entry in listed] == [1, 1]
    assert run(path, "log", "remove", first).returncode == 0
    assert len(kept(path)) == 1
    assert run(path, "log", "remove").returncode == 2
    assert run(path, "log", "remove", "--all").returncode == 0
    assert kept(path) == []
    assert run(path, "log", "list", "x").returncode == 2


def test_an_answer_that_was_cut_off_is_kept_as_far_as_it_came(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
        session.receive(wire.Cancel)
        session.send(done(request, "cancelled"))

    with FakeDaemon(path, script), OnTerminal(path, "ask", "--log", "x", HOME=str(path.parent)) as terminal:
        terminal.see("Once upon")
        terminal.interrupt()
        assert terminal.end() == 130
    (file,) = kept(path)
    turn = msgspec.json.decode(file.read_bytes())
    assert (turn["assistant"], turn["reason"]) == ("Once upon", "cancelled")


def test_a_line_that_a_full_disk_cut_off_is_left_out_and_a_broken_one_told(path: Path) -> None:
    partner = Partner()
    with FakeDaemon(path, partner):
        run(path, "ask", "--log", "one")
        (file,) = kept(path)
        whole = file.read_bytes()
        file.write_bytes(whole + whole[:20])
        run(path, "ask", "-c", "--no-log", "two")
        file.write_bytes(b"{}\n" + whole)
        ended = run(path, "ask", "-c", "three")
    assert partner.said[-1] == ["one", "answer 1", "two"]
    assert ended.returncode == 78
    assert b"line 1" in ended.stderr


def test_a_log_that_cannot_be_written_is_told_after_the_answer(path: Path) -> None:
    data = path.parent / "data"
    data.write_text("not a directory")
    with FakeDaemon(path, Partner()):
        ended = command_line.run(path, "ask", "--log", "x", env={"MLXBC_DATA": str(data)})
    assert (ended.returncode, ended.stdout) == (78, b"answer 1\n")
    assert b"cannot write the log" in ended.stderr
