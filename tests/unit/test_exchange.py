"""The client's half of a connection, on plain bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import wire
from mlxbc.errors import (
    ConnectionLost,
    FrameTooLarge,
    MlxbcError,
    ProtocolMismatch,
    RequestFailed,
    UnknownModel,
)
from mlxbc.exchange import Call, Exchange
from mlxbc.framing import Codec, frame


def encoded(*replies: wire.Reply) -> bytes:
    return b"".join(frame(reply, Codec.MSGPACK) for reply in replies)


def raw(**fields: object) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "big") + body


def drain(exchange: Exchange, call: Call) -> list[wire.Reply]:
    taken = []
    while (reply := exchange.take(call)) is not None:
        taken.append(reply)
    return taken


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=20)), max_size=30), st.data())
def test_every_call_gets_its_own_frames_in_order_however_the_bytes_arrive(
    frames: list[tuple[int, str]], data: st.DataObject
) -> None:
    exchange = Exchange()
    calls = [exchange.open(exchange.number()) for _ in range(4)]
    stream = encoded(*(wire.Token(id=calls[which].id, text=text) for which, text in frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        exchange.receive(stream[start:end])
    for index, call in enumerate(calls):
        assert [reply.text for reply in drain(exchange, call) if isinstance(reply, wire.Token)] == [
            text for which, text in frames if which == index
        ]


def test_a_frame_wakes_only_whom_it_is_for() -> None:
    exchange, woken = Exchange(), []
    exchange.open(1, lambda: woken.append(1))
    exchange.open(2, lambda: woken.append(2))
    exchange.receive(encoded(wire.Pong(id=2)))
    assert woken == [2]


def test_frames_for_a_forgotten_call_are_dropped() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.forget(call)
    exchange.receive(encoded(wire.Token(id=1, text="late"), wire.Token(id=99, text="never ours")))
    assert not call.frames
    assert not exchange.is_open(call)


def test_a_call_ends_with_its_last_frame() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.receive(encoded(wire.Pong(id=1)))
    assert exchange.is_open(call)
    assert exchange.take(call) == wire.Pong(id=1)
    assert not exchange.is_open(call)


def test_an_error_frame_is_raised_where_it_is_taken_and_hurts_nobody_else() -> None:
    exchange = Exchange()
    bad, good = exchange.open(1), exchange.open(2)
    exchange.receive(
        encoded(
            wire.Error(id=1, code="unknown_model", message="no such model", data={"near": ["tiny"]}),
            wire.Pong(id=2),
        )
    )
    with pytest.raises(UnknownModel, match="no such model") as raised:
        exchange.take(bad)
    assert raised.value.code == "unknown_model"
    assert raised.value.data == {"near": ["tiny"]}
    assert exchange.take(good) == wire.Pong(id=2)


def test_an_error_without_an_id_ends_everything() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.receive(encoded(wire.Error(code="unauthorized", message="not yours")))
    with pytest.raises(RequestFailed, match="not yours"):
        exchange.take(call)


def test_what_came_before_the_end_can_still_be_taken() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.receive(encoded(wire.Token(id=1, text="half")))
    exchange.end()
    assert exchange.take(call) == wire.Token(id=1, text="half")
    with pytest.raises(ConnectionLost) as raised:
        exchange.take(call)
    assert raised.value.code == "device_error"
    assert raised.value.retryable


def test_the_first_reason_for_the_end_is_the_one_told() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.fail(MlxbcError("the first"))
    exchange.end()
    with pytest.raises(MlxbcError, match="the first"):
        exchange.take(call)


def test_kinds_and_fields_of_a_newer_daemon_are_skipped() -> None:
    exchange = Exchange()
    call = exchange.open(1)
    exchange.receive(raw(type="mood", id=1, value="cheerful") + raw(type="pong", id=1, mood="cheerful"))
    assert drain(exchange, call) == [wire.Pong(id=1)]


@pytest.mark.parametrize(
    "broken",
    [
        raw(type="done", id=1),
        raw(type="done", id=1, reason="bored", usage={}, timings={}),
        raw(type="error", id=1, code="a_new_code", message="?"),
    ],
)
def test_a_last_frame_that_makes_no_sense_fails_its_call_and_no_other(broken: bytes) -> None:
    exchange = Exchange()
    call, other = exchange.open(1), exchange.open(2)
    exchange.receive(broken + encoded(wire.Pong(id=2)))
    with pytest.raises(ProtocolMismatch, match="restart"):
        exchange.take(call)
    assert exchange.take(other) == wire.Pong(id=2)


def test_bytes_that_are_no_frames_fail_every_call() -> None:
    exchange = Exchange()
    calls = [exchange.open(1), exchange.open(2)]
    exchange.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    for call in calls:
        with pytest.raises(ProtocolMismatch):
            exchange.take(call)


def test_a_request_over_the_daemons_limit_is_not_encoded() -> None:
    exchange = Exchange()
    exchange.receive(
        encoded(
            wire.Welcome(proto=1, server="s", version="1", pid=1, models=[], max_frame=8192),
        )
    )
    assert exchange.encode(wire.Generate(id=1, prompt="x" * 8000))
    with pytest.raises(FrameTooLarge, match="8192"):
        exchange.encode(wire.Generate(id=1, prompt="x" * 8192))


def test_a_request_over_the_protocols_ceiling_is_not_encoded() -> None:
    with pytest.raises(FrameTooLarge):
        Exchange().encode(wire.Generate(id=1, prompt="x" * wire.FRAME_CEILING))


def test_numbers_are_never_used_twice() -> None:
    exchange = Exchange()
    numbers = [exchange.number() for _ in range(100)]
    assert len(set(numbers)) == 100
