"""`mlxbc cache`: what is kept, what it has of a prompt, priming it and forgetting it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon, Script, Session

from mlxbc import cli, wire
from mlxbc.cli import exits

PLAN = wire.Plan(method="autoregressive", mechanism="continuous", off={"prefix cache": "the request turned it off"})


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        socket = Path(directory) / "s"
        monkeypatch.setenv("MLXBC_SOCKET", str(socket))
        monkeypatch.setattr(sys, "stdin", None)
        yield socket


def answers(kind: type[wire.Request], *replies: wire.Reply, asked: list[wire.Request]) -> Script:
    """A script that takes one request of a kind and answers it."""

    def script(session: Session) -> None:
        asked.append(session.receive(kind))
        session.send(*replies)

    return script


def shown(path: Path, kind: type[wire.Request], *replies: wire.Reply, argv: list[str]) -> wire.Request:
    asked: list[wire.Request] = []
    with FakeDaemon(path, answers(kind, *replies, asked=asked)):
        assert cli.main(["cache", *argv]) == exits.OK
    (request,) = asked
    return request


def report(**fields: object) -> wire.CacheReport:
    full = {
        "mode": "disk",
        "ram_bytes": 5_000_000,
        "ram_limit": 2_000_000_000,
        "ram_entries": 7,
        "disk_bytes": 9_000_000,
    }
    more = {"disk_limit": 32_000_000_000, "disk_entries": 9, "directory": "/there", "lookups": 4, "hits": 3}
    return wire.CacheReport(**{"id": 1, **full, **more, "tokens": 1000, "reused": 880, **fields})


def test_it_shows_what_is_kept_and_how_much_that_helped(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(path, wire.Cache, report(pending=2, trouble="No space left on device"), argv=[])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "mode      disk, for requests that do not say",
        "memory    5.0 MB of 2.0 GB, 7 pieces",
        "disk      9.0 MB of 32.0 GB, 9 pieces",
        "directory /there",
        "hits      3 of 4 requests, 88 % of their tokens reused",
        "writing   2 pieces wait",
        "trouble   No space left on device",
    ]


def test_a_cache_that_is_off_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(path, wire.Cache, wire.CacheReport(id=1, mode="none"), argv=["show"])
    assert capsys.readouterr().out == "cache     off\n"
    shown(path, wire.Cache, report(disk_limit=0, tokens=0, lookups=0, hits=0), argv=[])
    out = capsys.readouterr().out
    assert "disk      off\n" in out
    assert "hits      0 of 0 requests\n" in out


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        (wire.Cached(ram=7, disk=7, matched=7, why="whole"), "7 of 8 tokens would be reused; it is all there"),
        (
            wire.Cached(ram=2, disk=6, matched=6, why="diverges"),
            "6 of 8 tokens would be reused, 4 of them from the disk",
        ),
        (wire.Cached(ram=0, disk=0, matched=6, why="untrimmable"), "this model's state can't be cut back"),
        (wire.Cached(ram=0, disk=0, matched=0, why="diverges"), "0 of 8 tokens would be reused; nothing is kept that"),
        (None, "the cache doesn't apply: the request turned it off"),
    ],
)
def test_explain_tells_how_much_and_why_not_more(
    cached: wire.Cached | None, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = wire.Explained(id=1, model="tiny", prompt=8, context=100, priority="normal", plan=PLAN, cached=cached)
    request = shown(path, wire.Explain, reply, argv=["explain", "-m", "tiny", "-s", "Be brief.", "Hello", "there"])
    assert isinstance(request, wire.Explain)
    assert request.messages is not None
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hello there"),
    ]
    assert request.model == "tiny"
    assert said in capsys.readouterr().out


def test_prime_processes_a_prompt(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = wire.Progress(id=1, phase="prefill", done=3, total=8)
    primed = wire.Primed(id=1, model="tiny", usage=wire.Usage(prompt=8, generated=0, cached=3), timings=wire.Timings())
    request = shown(path, wire.Prime, progress, primed, argv=["prime", "--raw", "Once upon"])
    assert isinstance(request, wire.Prime)
    assert (request.prompt, request.messages) == ("Once upon", None)
    assert capsys.readouterr().out == "8 tokens, 3 of them from the cache\n"


def test_clear_tells_what_it_freed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(path, wire.CacheClear, wire.CacheCleared(id=1, bytes=2_500_000), argv=["clear"])
    assert capsys.readouterr().out == "freed 2.5 MB\n"
    shown(path, wire.CacheClear, wire.CacheCleared(id=1, bytes=0, streams=2), argv=["clear"])
    assert "forgot 2 answers" in capsys.readouterr().out


def test_json_is_one_object(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(path, wire.Cache, report(), argv=["--json"])
    assert json.loads(capsys.readouterr().out)["reused"] == 880


@pytest.mark.parametrize(
    "argv", [["show", "text"], ["clear", "-s", "x"], ["explain"], ["wipe"], ["prime", "--raw", "-s", "x", "y"]]
)
def test_what_makes_no_sense_is_a_usage_error(argv: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["cache", *argv])
    assert ended.value.code == exits.USAGE
    complaint, hint = capsys.readouterr().err.splitlines()
    assert complaint.startswith("mlxbc cache: error: ")
    assert hint == "see: mlxbc cache --help"
