"""The blocking client, against a scripted daemon behind a real socket."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fake_daemon import FakeDaemon, Session, accepted, answering, done

import mlxbc
from mlxbc import Client, wire
from mlxbc.errors import (
    BadRequest,
    ConnectionLost,
    ContextTooLong,
    FrameTooLarge,
    MlxbcError,
    ProtocolMismatch,
    QueueFull,
    RequestFailed,
)


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# ------------------------------------------------------------ generating


def test_a_stream_yields_events_and_ends_with_a_result(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        assert request == wire.Generate(
            id=request.id, messages=[wire.Message(role="user", content="Hi")], temperature=0.5, seed=7
        )
        session.send(
            accepted(request, position=2),
            wire.Progress(id=request.id, phase="prefill", done=1, total=5),
            wire.Token(id=request.id, text="Let me see.", channel="reasoning", ids=[4]),
            wire.Token(id=request.id, text="Hel", ids=[5]),
            wire.Token(id=request.id, text="lo", n=2, ids=[6, 7]),
            done(request),
        )

    with (
        FakeDaemon(path, script),
        Client(path) as client,
        client.generate(messages=chat("Hi"), temperature=0.5, seed=7) as stream,
    ):
        kinds = [type(event) for event in stream]
        assert kinds == [wire.Accepted, wire.Progress, wire.Token, wire.Token, wire.Token]
        assert stream.result == mlxbc.Result(
            text="Hello",
            reason="stop",
            model="tiny",
            seed=7,
            stream="0f" * 16,
            usage=wire.Usage(prompt=5, generated=3, cached=2),
            timings=wire.Timings(prefill=20.0, first_token=25.0, decode=100.0),
            reasoning="Let me see.",
            ids=[4, 5, 6, 7],
        )


def test_text_is_the_models_text_alone_and_empty_pieces_are_left_out(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(
            accepted(request),
            wire.Token(id=request.id, text="hmm", channel="reasoning"),
            wire.Token(id=request.id, text="A"),
            wire.Token(id=request.id, text=""),
            wire.Token(id=request.id, text="B"),
            done(request),
        )

    with FakeDaemon(path, script), Client(path) as client, client.generate("raw") as stream:
        assert list(stream.text) == ["A", "B"]
        assert stream.wait().reasoning == "hmm"


def test_ask_returns_the_whole_answer(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        assert [(m.role, m.content) for m in request.messages or ()] == [("system", "Be brief."), ("user", "Hi")]
        assert request.max_tokens == 5
        session.send(accepted(request), wire.Token(id=request.id, text="Yo."), done(request))

    with FakeDaemon(path, script), Client(path) as client:
        assert client.ask("Hi", system="Be brief.", max_tokens=5) == "Yo."


def test_two_streams_of_one_thread_interleave(path: Path) -> None:
    def script(session: Session) -> None:
        first, second = session.receive(wire.Generate), session.receive(wire.Generate)
        session.send(accepted(first), accepted(second))
        for index in range(3):
            session.send(wire.Token(id=second.id, text=f"b{index}"), wire.Token(id=first.id, text=f"a{index}"))
        session.send(done(second), done(first))

    with FakeDaemon(path, script), Client(path) as client:
        first, second = client.generate("1"), client.generate("2")
        assert list(first.text) == ["a0", "a1", "a2"]
        assert list(second.text) == ["b0", "b1", "b2"]


def test_streams_of_many_threads_share_one_connection(path: Path) -> None:
    count = 8

    def script(session: Session) -> None:
        requests = [session.receive(wire.Generate) for _ in range(count)]
        session.send(*(accepted(request) for request in requests))
        for index in range(50):
            for request in requests[index % 2 :: 2]:
                session.send(wire.Token(id=request.id, text=f"{request.prompt}{index} "))
        session.send(*(done(request) for request in reversed(requests)))

    answers: dict[int, str] = {}

    def work(client: Client, number: int) -> None:
        answers[number] = client.generate(f"{number}:").wait().text

    with FakeDaemon(path, script), Client(path, timeout=10) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) == count
    for number, text in answers.items():
        words = text.split()
        assert len(words) == 25
        assert all(word.startswith(f"{number}:") for word in words)


def test_a_result_before_the_end_is_refused(path: Path) -> None:
    with FakeDaemon(path, answering("A")), Client(path) as client, client.generate("x") as stream:
        with pytest.raises(MlxbcError, match="wait"):
            _ = stream.result
        assert stream.wait() is stream.result


# ------------------------------------------------------------ cancelling


def cancelling(session: Session) -> None:
    request = session.receive(wire.Generate)
    session.send(accepted(request), wire.Token(id=request.id, text="Once upon"))
    assert session.receive(wire.Cancel).id == request.id
    session.send(done(request, "cancelled"))
    session.until_gone()


def test_a_cancelled_stream_ends_with_the_text_so_far(path: Path) -> None:
    with FakeDaemon(path, cancelling), Client(path) as client, client.generate("x") as stream:
        pieces = []
        for piece in stream.text:
            pieces.append(piece)
            stream.cancel()
        assert pieces == ["Once upon"]
        assert stream.result.reason == "cancelled"
        assert stream.result.text == "Once upon"


def test_leaving_a_stream_cancels_it_and_the_connection_goes_on(path: Path) -> None:
    def script(session: Session) -> None:
        cancelled = session.receive(wire.Generate)
        session.send(accepted(cancelled), wire.Token(id=cancelled.id, text="Once"))
        assert session.receive(wire.Cancel).id == cancelled.id
        session.send(wire.Token(id=cancelled.id, text=" upon"), done(cancelled, "cancelled"))
        answering("next")(session)

    with FakeDaemon(path, script), Client(path) as client:
        with client.generate("x") as stream:
            next(stream)
        assert list(stream) == []
        with pytest.raises(MlxbcError):
            stream.wait()
        assert client.ask("y") == "next"


def test_a_stream_that_has_ended_is_not_cancelled(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), done(request))
        with pytest.raises(Exception, match=r"^$"):  # Gone: no cancel came
            session.receive(wire.Cancel)

    with FakeDaemon(path, script), Client(path) as client, client.generate("x") as stream:
        stream.wait()
        stream.cancel()


def test_another_thread_can_cancel(path: Path) -> None:
    with FakeDaemon(path, cancelling), Client(path) as client, client.generate("x") as stream:
        next(stream)
        threading.Thread(target=stream.cancel).start()
        assert stream.wait().reason == "cancelled"


def test_a_signal_handler_can_cancel(path: Path) -> None:
    waiting = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request))
        assert waiting.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        # Python runs the handler once a read that was just about to begin has returned.
        session.send(wire.Token(id=request.id, text="."))
        assert session.receive(wire.Cancel).id == request.id
        session.send(done(request, "cancelled"))

    with FakeDaemon(path, script), Client(path) as client, client.generate("x") as stream:
        next(stream)
        before = signal.signal(signal.SIGUSR1, lambda *_: stream.cancel())
        try:
            waiting.set()
            assert stream.wait().reason == "cancelled"
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", ["recv", "sendall"])
def test_an_interrupted_read_or_write_closes_the_connection_because_bytes_may_be_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class Interrupted:
        """The client's socket while Ctrl-C is pressed."""

        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            if name == call:
                raise KeyboardInterrupt
            return getattr(self._real, name)

    with FakeDaemon(path, Session.until_gone), Client(path) as client:
        with monkeypatch.context() as patch:
            patch.setattr(client, "_socket", Interrupted(client._socket))
            with pytest.raises(KeyboardInterrupt):
                client.ping()
        with pytest.raises(ConnectionLost, match="interrupt"):
            client.ping()


# ------------------------------------------------------------ other requests


def test_tokens_are_told_and_counted(path: Path) -> None:
    def script(session: Session) -> None:
        tokenize = session.receive(wire.Tokenize)
        assert (tokenize.text, tokenize.model) == ("Hi", "tiny")
        session.send(wire.Tokens(id=tokenize.id, tokens=[1, 2]))
        count = session.receive(wire.Count)
        assert count.messages == [wire.Message(role="user", content="Hi")]
        session.send(wire.Counted(id=count.id, count=9))

    with FakeDaemon(path, script), Client(path) as client:
        assert client.tokenize("Hi", model="tiny") == [1, 2]
        assert client.count(messages=chat("Hi")) == 9


def test_loading_tells_its_progress(path: Path) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Load)
        assert request.model == "tiny"
        session.send(
            wire.Progress(id=request.id, phase="load", done=1, total=2),
            wire.Progress(id=request.id, phase="load", done=2, total=2),
            wire.Loaded(id=request.id, model="tiny", bytes=2, seconds=0.5),
        )

    seen: list[int] = []
    with FakeDaemon(path, script), Client(path) as client:
        loaded = client.load("tiny", on_progress=lambda progress: seen.append(progress.done))
    assert seen == [1, 2]
    assert loaded.model == "tiny"


def test_the_daemon_is_looked_at_and_stopped(path: Path) -> None:
    entry = wire.ModelEntry(name="tiny", source="hub", path="/m", bytes=5)

    def script(session: Session) -> None:
        session.send(wire.ModelList(id=session.receive(wire.Models).id, models=[entry]))
        session.send(wire.ProcessList(id=session.receive(wire.Ps).id, models=[]))
        session.send(wire.Unloaded(id=session.receive(wire.Unload).id, model="tiny"))
        session.send(wire.Pong(id=session.receive(wire.Ping).id))
        shutdown = session.receive(wire.Shutdown)
        assert not shutdown.drain
        session.send(wire.Bye(id=shutdown.id))

    with FakeDaemon(path, script), Client(path) as client:
        assert client.models() == [entry]
        assert client.ps() == []
        assert client.unload("tiny").model == "tiny"
        assert client.ping() > 0
        client.shutdown(drain=False)


def test_an_answer_of_another_kind_is_a_mismatch(path: Path) -> None:
    def script(session: Session) -> None:
        session.send(wire.Bye(id=session.receive(wire.Ping).id))

    with (
        FakeDaemon(path, script),
        Client(path) as client,
        pytest.raises(ProtocolMismatch, match="unexpected 'bye'"),
    ):
        client.ping()


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": "x", "temperatur": 1}, "unknown field `temperatur`"),
        ({"prompt": "x", "temperature": 11}, "<= 10"),
        ({"prompt": "x", "stop": [""]}, "length >= 1"),
        ({"prompt": "x", "messages": chat("y")}, "exactly one"),
        ({}, "exactly one"),
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"prompt": "x", "id": 3}, "id is chosen"),
    ],
)
def test_a_mistake_is_found_before_anything_is_sent(path: Path, fields: dict[str, Any], complaint: str) -> None:
    with FakeDaemon(path, answering("still here")), Client(path) as client:
        with pytest.raises(BadRequest, match=complaint) as raised:
            client.generate(**fields)
        assert raised.value.code == "bad_request"
        assert client.ask("x") == "still here"


@pytest.mark.parametrize(
    ("code", "kind"),
    [("queue_full", QueueFull), ("context_too_long", ContextTooLong), ("internal", RequestFailed)],
)
def test_the_daemons_refusal_is_a_typed_error(path: Path, code: wire.ErrorCode, kind: type[RequestFailed]) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(
            wire.Error(id=request.id, code=code, message="because", retryable=True, data={"limit": 4}),
        )
        answering("next")(session)

    with FakeDaemon(path, script), Client(path) as client:
        with pytest.raises(kind, match="because") as raised, client.generate("x") as stream:
            stream.wait()
        assert raised.value.code == code
        assert raised.value.retryable
        assert raised.value.data == {"limit": 4}
        assert client.ask("y") == "next"


def test_a_request_too_large_for_the_daemon_is_not_sent(path: Path) -> None:
    with FakeDaemon(path, answering("ok"), max_frame=8192), Client(path) as client:
        with pytest.raises(FrameTooLarge, match="8192"):
            client.generate("x" * 9000)
        assert client.ask("short") == "ok"
