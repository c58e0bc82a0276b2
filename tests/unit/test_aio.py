"""The asyncio client, against a scripted daemon behind a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import uvloop
from fake_daemon import FakeDaemon, Session, accepted, answering, done

from mlxbc import AsyncClient, wire
from mlxbc.errors import (
    BadRequest,
    ConnectionLost,
    DaemonUnavailable,
    MlxbcError,
    ProtocolMismatch,
    QueueFull,
    RequestTimeout,
)

SILENCE_S = 0.5
"""Longer than anybody takes to greet, on a busy machine too."""


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


async def test_a_stream_yields_events_and_ends_with_a_result(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        assert request.messages == [wire.Message(role="user", content="Hi")]
        assert request.temperature == 0
        session.send(
            accepted(request),
            wire.Token(id=request.id, text="hmm", channel="reasoning"),
            wire.Token(id=request.id, text="Hel"),
            wire.Token(id=request.id, text="lo"),
            done(request),
        )

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            message = wire.Message(role="user", content="Hi")
            async with client.generate(messages=[message], temperature=0) as stream:
                kinds = [type(event) async for event in stream]
            assert kinds == [wire.Accepted, wire.Token, wire.Token, wire.Token]
            assert (stream.result.text, stream.result.reasoning) == ("Hello", "hmm")


async def test_many_requests_run_at_once_on_one_connection(path: Path) -> None:
    def script(session: Session) -> None:
        requests = [session.receive(wire.Generate) for _ in range(5)]
        for request in reversed(requests):
            prompt = (request.messages or [])[0].content
            session.send(accepted(request), wire.Token(id=request.id, text=f"re {prompt}"))
        session.send(*(done(request) for request in requests))

    with FakeDaemon(path, script) as daemon:
        async with AsyncClient(path) as client:
            answers = await asyncio.gather(*(client.ask(str(number)) for number in range(5)))
        assert answers == [f"re {number}" for number in range(5)]
        assert daemon.connections == 1


async def test_every_request_of_the_blocking_client_has_its_twin(path: Path) -> None:
    def script(session: Session) -> None:
        session.send(wire.Tokens(id=session.receive(wire.Tokenize).id, tokens=[1]))
        session.send(wire.Counted(id=session.receive(wire.Count).id, count=1))
        session.send(wire.ModelList(id=session.receive(wire.Models).id, models=[]))
        load = session.receive(wire.Load)
        session.send(wire.Progress(id=load.id, phase="load", done=1, total=1))
        session.send(wire.Loaded(id=load.id, model="tiny", bytes=1, seconds=0.1))
        session.send(wire.Unloaded(id=session.receive(wire.Unload).id, model="tiny"))
        session.send(wire.ProcessList(id=session.receive(wire.Ps).id, models=[]))
        session.send(wire.Pong(id=session.receive(wire.Ping).id))
        session.send(wire.Bye(id=session.receive(wire.Shutdown).id))

    progress: list[wire.Progress] = []
    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            assert await client.tokenize("x") == [1]
            assert await client.count("x") == 1
            assert await client.models() == []
            assert (await client.load("tiny", on_progress=progress.append)).model == "tiny"
            assert (await client.unload("tiny")).model == "tiny"
            assert await client.ps() == []
            assert await client.ping() > 0
            await client.shutdown()
    assert len(progress) == 1


async def test_a_cancelled_stream_ends_with_the_text_so_far(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="Once"))
        assert session.receive(wire.Cancel).id == request.id
        session.send(done(request, "cancelled"))

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            stream = client.generate("x")
            async for _piece in stream.text:
                stream.cancel()
            assert (stream.result.reason, stream.result.text) == ("cancelled", "Once")


@pytest.mark.parametrize("way", ["leave", "cancel the task"])
async def test_leaving_a_stream_cancels_it_and_the_connection_goes_on(path: Path, way: str) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request))
        assert session.receive(wire.Cancel).id == request.id
        session.send(done(request, "cancelled"))
        answering("next")(session)

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            if way == "leave":
                async with client.generate("x") as stream:
                    await anext(stream)
            else:
                begun = asyncio.Event()

                async def work() -> None:
                    async with client.generate("x") as stream:
                        async for _event in stream:
                            begun.set()

                task = asyncio.create_task(work())
                await begun.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await client.ask("y") == "next"


async def test_cancelling_a_task_that_loads_cancels_the_load(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Load)
        session.send(wire.Progress(id=request.id, phase="load", done=1, total=9))
        assert session.receive(wire.Cancel).id == request.id

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            begun = asyncio.Event()
            task = asyncio.create_task(client.load("big", on_progress=lambda _progress: begun.set()))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_refusals_are_typed_errors(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(wire.Error(id=request.id, code="queue_full", message="later", retryable=True))

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            with pytest.raises(BadRequest, match="temperatur"):
                client.generate("x", temperatur=1)
            with pytest.raises(QueueFull, match="later"):
                await client.ask("x")


async def test_without_a_daemon_the_error_says_how_to_start_one(path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="mlxbc serve --detach"):
        await AsyncClient(path).connect()


async def test_a_refused_handshake_says_why(path: Path) -> None:
    def script(session: Session) -> None:
        session.send(wire.Error(code="proto_mismatch", message="speak version 2"))
        session.until_gone()

    with FakeDaemon(path, script, greet=False), pytest.raises(ProtocolMismatch, match="speak version 2"):
        await AsyncClient(path).connect()


async def test_silence_is_given_up(path: Path) -> None:
    with FakeDaemon(path, Session.until_gone):
        async with AsyncClient(path, timeout=SILENCE_S) as client:
            with pytest.raises(RequestTimeout, match=r"0\.5 s"):
                await client.ping()


async def test_a_daemon_that_never_greets_is_given_up(path: Path) -> None:
    with FakeDaemon(path, Session.until_gone, greet=False), pytest.raises(RequestTimeout):
        await AsyncClient(path, timeout=0.05).connect()


async def test_a_connection_that_ends_early_is_a_retryable_device_error(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="half"))

    with FakeDaemon(path, script):
        async with AsyncClient(path) as client:
            stream = client.generate("x")
            pieces = stream.text
            assert await anext(pieces) == "half"
            with pytest.raises(ConnectionLost) as raised:
                await anext(pieces)
            assert raised.value.retryable
            with pytest.raises(ConnectionLost):
                await client.ping()


async def test_a_client_that_is_not_connected_says_how_to_connect(path: Path) -> None:
    client = AsyncClient(path)
    with pytest.raises(MlxbcError, match="async with"):
        await client.ping()
    with FakeDaemon(path, answering("ok")):
        async with client:
            with pytest.raises(MlxbcError, match="already"):
                await client.connect()
            assert client.welcome.server == "fake"
        with pytest.raises(MlxbcError, match="not connected"):
            client.generate("x")


def test_it_works_on_another_event_loop_too(path: Path) -> None:
    async def ask() -> str:
        async with AsyncClient(path) as client:
            return await client.ask("Hi")

    with FakeDaemon(path, answering("ok")):
        assert uvloop.run(ask()) == "ok"
