"""What people can see of a daemon at work: status at any time, its changes, its figures, and what took how long."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_line
import pytest
import pytest_asyncio
from fake_daemon import FakeDaemon, Session
from test_doctor import status
from test_live import Asked, House, housed
from tiny_directory import write_model

from mlxbc import cli, wire
from mlxbc.cli import exits
from mlxbc.cli.prometheus import exposition
from mlxbcd.serve import subscriptions
from mlxbcd.serve.metrics import BOUNDS_MS, Histogram
from mlxbcd.trace import Tracer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_model(data / "models" / "one")
    return data


@pytest_asyncio.fixture
async def house(store: Path) -> AsyncIterator[House]:
    async with housed(store) as house:
        yield house


# -- status


async def test_status_is_answered_at_once_whatever_the_device_does(house: House) -> None:
    await house.ask(prompt="x", max_tokens=2).end()
    busy = house.device.submit(lambda: time.sleep(0.5))
    began = time.monotonic()
    report = await house.submit(wire.Status(id=2)).end()
    assert time.monotonic() - began < 0.05
    assert not busy.done()
    assert report.models[0].model == "one"
    await busy


# -- watch


async def next_change(asked: Asked, known: int) -> wire.StatusReport:
    """The first change after `known` ones."""
    while len(asked.of(wire.Change)) <= known:
        await asyncio.sleep(0)
    return asked.of(wire.Change)[known].status


async def test_watch_tells_at_once_and_then_only_of_changes(house: House) -> None:
    watching = house.submit(wire.Watch(id=7, interval_ms=50))
    assert (await next_change(watching, 0)).running == 0
    asked = house.ask(prompt="the", max_tokens=60)
    seen = 1
    while (await next_change(watching, seen)).running + watching.frames[-1].status.queued == 0:
        seen += 1
    await asked.end()
    while (await next_change(watching, seen)).served == 0:
        seen += 1
    told = len(watching.of(wire.Change))
    await asyncio.sleep(0.2)  # what is tested is that nothing is told in it
    assert len(watching.of(wire.Change)) == told, "an idle daemon says nothing"
    assert {"one"} == {model.model for model in watching.of(wire.Change)[-1].status.models}
    watching.job.cancel()
    assert await watching.end() == wire.Ended(id=7)
    assert house.service._subscriptions == set()


async def test_changes_come_no_more_often_than_asked_for(house: House) -> None:
    watching = house.submit(wire.Watch(id=7, interval_ms=100))
    began = time.monotonic()
    for _ in range(3):
        await house.ask(prompt="the", max_tokens=40).end()
    passed = time.monotonic() - began
    assert len(watching.of(wire.Change)) <= 2 + passed / 0.1
    watching.job.cancel()


async def test_a_draining_daemon_does_not_wait_for_who_watches(house: House) -> None:
    watching = house.submit(wire.Watch(id=7))
    await next_change(watching, 0)
    await asyncio.wait_for(house.service.drain(), 5)
    assert (await next_change(watching, 1)).state == "draining"
    await house.service.close()
    assert (await watching.end()).code == "shutting_down"


async def test_watchers_are_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbcd.serve.live.MOST_SUBSCRIPTIONS", 2)
    watching = [house.submit(wire.Watch(id=n)) for n in range(2)]
    with pytest.raises(Exception, match="watch or trace already"):
        house.submit(wire.Trace(id=9))
    for one in watching:
        one.job.cancel()


# -- figures


async def test_what_has_ended_is_counted(house: House) -> None:
    await house.ask(prompt="the", max_tokens=5).end()
    cancelled = house.ask(id=2, prompt="the", max_tokens=300)
    await cancelled.first(wire.Token)
    cancelled.job.cancel()
    await cancelled.end()
    await house.ask(id=3, prompt="x" * 5000).end()
    metrics = (await house.submit(wire.Status(id=4)).end()).metrics
    assert metrics.outcomes == {"length": 1, "cancelled": 1, "context_too_long": 1}
    assert metrics.generated_tokens >= 6
    assert sum(metrics.first_token_ms.counts) == 2
    assert sum(metrics.queue_ms.counts) == 3


def test_a_value_falls_into_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram()
    for value in (0.0, BOUNDS_MS[0], BOUNDS_MS[0] + 0.1, 1e9):
        histogram.see(value)
    assert histogram.counts[0] == 2
    assert histogram.counts[1] == 1
    assert histogram.counts[-1] == 1
    assert len(histogram.counts) == len(BOUNDS_MS) + 1


SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (-?[0-9.e+-]+|\+Inf)')


async def test_the_exposition_is_what_prometheus_reads(house: House) -> None:
    await house.ask(prompt="the", max_tokens=5).end()
    report = await house.submit(wire.Status(id=4)).end()
    text = exposition(report)
    types: dict[str, str] = {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found, line
            base = re.sub(r"_(bucket|sum|count)$", "", found[1])
            assert found[1] in types or types[base] == "histogram"
            values[line.rpartition(" ")[0]] = float(found[3])
    assert text.endswith("\n")
    assert values["mlxbc_up"] == 1
    assert values['mlxbc_generations_total{outcome="length"}'] == 1
    assert values["mlxbc_generated_tokens_total"] == 5
    assert values["mlxbc_first_token_seconds_count"] == values['mlxbc_first_token_seconds_bucket{le="+Inf"}'] == 1
    assert values['mlxbc_model_bytes{model="one"}'] == report.models[0].bytes
    buckets = [value for name, value in values.items() if name.startswith("mlxbc_first_token_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_names_are_escaped_for_prometheus() -> None:
    process = wire.Process(
        model='a"b\\c', path="/", bytes=1, dtype="f", context=1, kv_bytes=0, running=0, queued=0, idle_s=0.5,
        placement="continuous",
    )  # fmt: skip
    text = exposition(status(models=[process]))
    assert r'mlxbc_model_bytes{model="a\"b\\c"} 1' in text
    assert r'mlxbc_model_idle_seconds{model="a\"b\\c"} 0.5' in text


# -- trace


async def test_a_request_is_told_by_its_stages_and_the_device_by_its_work(house: House) -> None:
    tracing = house.submit(wire.Trace(id=7))
    asked = house.ask(prompt="the story " * 20, max_tokens=10)
    await asked.end()
    (accepted,) = asked.of(wire.Accepted)
    tracing.job.cancel()
    assert await tracing.end() == wire.Ended(id=7)
    spans = [span for batch in tracing.of(wire.Spans) for span in batch.spans]
    mine = {span.name: span for span in spans if span.track == accepted.stream}
    assert {"request", "load", "prepare", "queue", "prefill", "piece", "decode"} == mine.keys()
    request = mine["request"]
    for span in mine.values():
        assert request.begin_us - 2 <= span.begin_us
        assert span.begin_us + span.micros <= request.begin_us + request.micros + 2000
    pieces = [span.facts["tokens"] for span in spans if span.name == "piece"]
    assert sum(pieces) == request.facts["prompt"]
    device = [span for span in spans if span.track == "device: one"]
    names = [span.name for span in device]
    assert {"iteration", "prefill", "decode step", "deliver"} == set(names)
    assert names.count("decode step") >= 8, "the last one may be told a moment later"
    assert "the story" not in json.dumps([span.facts for span in spans])


async def test_nothing_is_recorded_while_nobody_listens(house: House) -> None:
    await house.ask(prompt="the", max_tokens=5).end()
    assert not house.service._tracer.on
    tracing = house.submit(wire.Trace(id=7))
    tracing.job.cancel()
    await tracing.end()
    assert tracing.of(wire.Spans) == []
    assert not house.service._tracer.on


async def test_more_spans_than_can_be_told_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MOST_SPANS", 3)
    tracer, frames = Tracer(), []
    trace = subscriptions.Trace(1, frames.append, lambda one: None, tracer)
    for n in range(5):
        tracer.span("x", "y", 0.0, 1.0, n=n)
    trace.cancel()
    assert [type(frame) for frame in frames] == [wire.Spans, wire.Ended]
    assert len(frames[0].spans) == 3
    assert frames[1].dropped == 2


# -- the commands


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        monkeypatch.setenv("MLXBC_SOCKET", f"{directory}/s")
        monkeypatch.setattr(sys, "stdin", None)
        yield Path(directory) / "s"


def test_the_trace_is_a_file_that_viewers_read(path: Path, tmp_path: Path) -> None:
    spans = [wire.Span("request", "abc", 10, 5, {"prompt": 3}), wire.Span("iteration", "device: x", 11, 2)]

    def script(session: Session) -> None:
        request = session.receive(wire.Trace)
        session.send(wire.Spans(id=request.id, spans=spans), wire.Spans(id=request.id, spans=spans[:1]))
        assert session.receive(wire.Cancel).id == request.id

    with FakeDaemon(path, script, pid=42):
        assert cli.main(["trace", "--for", "2", str(tmp_path / "t.json")]) == exits.OK
    written = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [event for event in written if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("request", 10, 5),
        ("iteration", 11, 2),
        ("request", 10, 5),
    ]
    assert complete[0]["tid"] == complete[2]["tid"] != complete[1]["tid"]
    assert {event["args"]["name"] for event in written if event["ph"] == "M"} == {"mlxbcd", "abc", "device: x"}
    assert (tmp_path / "t.json").stat().st_mode & 0o077 == 0


def test_a_trace_ends_after_enough_spans(path: Path, tmp_path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Trace)
        session.send(*(wire.Spans(id=request.id, spans=[wire.Span("s", "t", n, 1)]) for n in range(50)))
        session.until_gone()

    with FakeDaemon(path, script):
        assert cli.main(["trace", "--most", "5", str(tmp_path / "t.json")]) == exits.OK
    written = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["ts"] for event in written if event["ph"] == "X"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_trace_that_is_told_to_end_is_a_whole_file(path: Path, tmp_path: Path, number: signal.Signals) -> None:
    told = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Trace)
        session.send(wire.Spans(id=request.id, spans=[wire.Span("s", "t", 1, 1)]))
        told.set()
        session.until_gone()

    file = tmp_path / "t.json"
    with FakeDaemon(path, script), command_line.start(path, "trace", str(file), stdin=None) as process:
        assert told.wait(command_line.PATIENCE)
        command_line.until_asleep(process.pid)
        process.send_signal(number)
        assert process.wait(command_line.PATIENCE) == exits.OK
    assert json.loads(file.read_text())["traceEvents"][0]["ph"] == "M"


def test_watch_prints_no_line_twice_running(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Watch)
        for connections in (1, 2, 3):
            session.send(wire.Change(id=request.id, status=status(connections=connections)))
        session.send(wire.Error(code="shutting_down", message="the daemon is stopping", id=request.id))

    with FakeDaemon(path, script):
        assert cli.main(["watch"]) == exits.OK
        assert len(capsys.readouterr().out.splitlines()) == 1
        assert cli.main(["watch", "--json"]) == exits.OK
        assert len(capsys.readouterr().out.splitlines()) == 3


def test_watch_prints_a_line_for_each_change(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(request: int, **fields: Any) -> wire.Change:
        return wire.Change(id=request, status=status(**fields))

    def script(session: Session) -> None:
        request = session.receive(wire.Watch)
        assert request.interval_ms == 500
        loading = [wire.Loading("big", 1, 4)]
        session.send(change(request.id, running=2, queued=1), change(request.id, loading=loading, memory_used=10**9))
        session.send(wire.Error(code="shutting_down", message="the daemon is stopping", id=request.id))

    with FakeDaemon(path, script):
        assert cli.main(["watch", "--interval", "500"]) == exits.OK
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "ready | 2 running | 1 queued | 0 B of 0 B | 0 tokens | no model",
        "ready | 0 running | 0 queued | 1.0 GB of 0 B | 0 tokens | no model | loading big 25 %",
    ]
    assert err == f"mlxbc: {exits.STOPPED}\n"


@pytest.mark.parametrize("command", ["watch", "trace"])
@pytest.mark.parametrize(("code", "ends"), [("shutting_down", exits.OK), ("device_error", exits.FAILED)])
def test_what_goes_on_as_long_as_the_daemon_ends_well_only_if_that_was_told_to_stop(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, code: wire.ErrorCode, ends: int
) -> None:
    kind = wire.Watch if command == "watch" else wire.Trace

    def script(session: Session) -> None:
        session.send(wire.Error(code=code, message="it ends", id=session.receive(kind).id))

    file = tmp_path / "t.json"
    with FakeDaemon(path, script):
        assert cli.main([command, *([str(file)] if command == "trace" else [])]) == ends
    assert (exits.STOPPED in capsys.readouterr().err) == (ends == exits.OK)
    assert command == "watch" or json.loads(file.read_text())["traceEvents"]


def test_status_for_prometheus(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(session: Session) -> None:
        report = status(running=3)
        session.receive(wire.Status)
        session.send(report)

    with FakeDaemon(path, script):
        assert cli.main(["status", "--prometheus"]) == exits.OK
    assert "\nmlxbc_requests_running 3\n" in capsys.readouterr().out
