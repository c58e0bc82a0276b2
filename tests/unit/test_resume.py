"""A generation whose daemon goes away is continued by the next one, once, as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_daemon import FakeDaemon, Script, Session, accepted, done

from mlxbc import Client, wire
from mlxbc.errors import BadRequest, ConnectionLost, ShuttingDown
from mlxbc.result import Event
from mlxbc.resume import Resumable


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


class Lives:
    """A script for each connection, in turn; what each was asked."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.asked: list[wire.Generate] = []

    def __call__(self, session: Session) -> None:
        request = session.receive(wire.Generate)
        self.asked.append(request)
        self._scripts.pop(0)(_Replayed(session, request))


class _Replayed:
    """A session whose request has been received already."""

    def __init__(self, session: Session, request: wire.Generate) -> None:
        self.request = request
        self.send = session.send


def says(*tokens: tuple[int, str], then: str = "dies", begin: bool = True) -> Script:
    """A script that says tokens and then `dies`, is `done`, or has an error of that code."""

    def script(session: Session) -> None:
        request: wire.Generate = session.request
        if begin:
            session.send(accepted(request))
        for token, text in tokens:
            session.send(wire.Token(id=request.id, text=text, ids=[token]))
        if then == "done":
            session.send(done(request, generated=3))
        elif then != "dies":
            retryable = then != "bad_request"
            session.send(wire.Error(id=request.id, code=then, message="no", retryable=retryable))

    return script


def asking(path: Path, lost: list[str], patience: float = 5.0) -> Resumable:
    return Resumable(
        lambda: Client(path, timeout=10),
        "Once",
        lost=lambda: lost.append("lost"),
        patience=patience,
        temperature=1,
        resumable=True,
    )


@pytest.mark.parametrize("end", ["dies", "shutting_down", "device_error"])
def test_the_rest_is_asked_for_with_what_has_come(path: Path, end: str) -> None:
    lives = Lives(says((5, "a"), (6, "b"), then=end), says((7, "c"), then="done"))
    lost: list[str] = []
    with FakeDaemon(path, lives), asking(path, lost) as stream:
        events: list[Event] = list(stream)
        result = stream.result
    first, second = lives.asked
    assert (first.resumable, first.resume, first.seed) == (True, None, None)
    assert second.resume == wire.Resume(stream="0f" * 16, tokens=[5, 6])
    assert (second.seed, second.prompt, second.temperature) == (7, "Once", 1)
    assert (result.text, result.ids, result.usage.generated) == ("abc", [5, 6, 7], 3)
    assert [type(event) for event in events] == [wire.Accepted, *[wire.Token] * 3]
    assert lost == ["lost"]


def test_what_was_lost_before_it_was_accepted_is_asked_again(path: Path) -> None:
    lives = Lives(says(begin=False), says((5, "a"), then="done"))
    with FakeDaemon(path, lives), asking(path, []) as stream:
        assert stream.wait().text == "a"
    assert lives.asked[1].resume is None


def test_it_comes_back_once(path: Path) -> None:
    lives = Lives(says((5, "a")), says((6, "b")))
    with FakeDaemon(path, lives), asking(path, []) as stream, pytest.raises(ConnectionLost):
        stream.wait()
    assert len(lives.asked) == 2


def test_an_error_that_would_come_again_is_raised(path: Path) -> None:
    lives = Lives(says((5, "a"), then="bad_request"))
    with FakeDaemon(path, lives), asking(path, []) as stream, pytest.raises(BadRequest):
        stream.wait()
    assert len(lives.asked) == 1


def test_if_nobody_comes_back_the_first_error_is_raised(path: Path) -> None:
    lives = Lives(says((5, "a"), then="shutting_down"))
    daemon = FakeDaemon(path, lives)
    with daemon, asking(path, [], patience=0.2) as stream:
        assert isinstance(next(stream), wire.Accepted)
        daemon.close()
        with pytest.raises(ShuttingDown):
            stream.wait()


def test_the_next_daemon_is_waited_for(path: Path) -> None:
    first = FakeDaemon(path, Lives(says((5, "a"))))
    second: list[FakeDaemon] = []

    def lost() -> None:
        first.close()
        second.append(FakeDaemon(path, Lives(says((6, "b"), then="done"))).__enter__())

    with first, Resumable(lambda: Client(path, timeout=10), "Once", lost=lost, patience=10) as stream:
        assert stream.wait().text == "ab"
    second[0].__exit__(None, None, None)


def test_waiting_ends_when_it_is_cancelled(path: Path) -> None:
    daemon = FakeDaemon(path, Lives(says((5, "a"))))
    streams: list[Resumable] = []

    def lost() -> None:
        daemon.close()
        streams[0].cancel()

    with daemon, Resumable(lambda: Client(path, timeout=10), "Once", lost=lost, patience=60) as stream:
        streams.append(stream)
        with pytest.raises(ConnectionLost):
            stream.wait()
