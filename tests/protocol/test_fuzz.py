"""Bytes that are not the protocol: every one is answered by name, harms nobody else and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_service import FakeClient, FakeDaemon, fake_daemon
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxbc import wire
from mlxbc.framing import Codec, frame

CODECS = pytest.mark.parametrize("codec", list(Codec))
FUZZ = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

HELLO = wire.Hello(proto=1, client="fuzz")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """One daemon for all: whatever one example breaks, a later one notices."""
    with fake_daemon(tmp_path_factory.mktemp("fuzz")) as daemon:
        yield daemon


def encode(value: Any, codec: Codec) -> bytes:
    return msgspec.json.encode(value) if codec is Codec.JSON else msgspec.msgpack.encode(value)


def ends_cleanly(daemon: FakeDaemon, client: FakeClient) -> list[wire.Reply]:
    """Replies after the client's end of input; then the daemon still serves, and nothing of the client is left."""
    client.half_close()
    if client.codec is Codec.JSON:
        daemon.do(lambda: [job.done() for job in list(daemon.service.running)])
    replies = client.rest()
    client.close()
    daemon.settled()
    daemon.until(lambda service: not service.running)
    daemon.service.jobs.clear()
    with daemon.client() as other:
        assert other.pinged()
    daemon.settled()
    return replies


# --------------------------------------------------------------------------------------------------- arbitrary bytes


@FUZZ
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_on_a_new_connection(daemon: FakeDaemon, data: bytes) -> None:
    codec = Codec.JSON if data[:1] == b"{" else Codec.MSGPACK
    client = daemon.client(codec, hello=False)
    client.raw(data)
    for reply in ends_cleanly(daemon, client):
        assert isinstance(reply, wire.Error | wire.Pong)


@FUZZ
@given(bodies=st.lists(st.binary(max_size=60), max_size=8), codec=st.sampled_from(Codec))
def test_arbitrary_bodies_are_each_refused_and_the_connection_goes_on(
    daemon: FakeDaemon, bodies: list[bytes], codec: Codec
) -> None:
    if codec is Codec.JSON:
        bodies = [body for body in (body.replace(b"\n", b"") for body in bodies) if body.strip()]
    client = daemon.client(codec)
    for body in bodies:
        client.body(body)
    for _ in bodies:
        assert client.error().code in ("bad_frame", "bad_request")
    assert client.pinged()
    assert ends_cleanly(daemon, client) == []


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["wait", "count 3", "refuse", "raise", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({name for kind in wire.Request.__args__ for name in kind.__struct_fields__})
KINDS = [kind.__struct_config__.tag for kind in wire.Request.__args__ if kind is not wire.Shutdown]
ODD = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | VALUES, "id": st.integers(0, 5) | VALUES},
    optional={name: VALUES for name in FIELDS if name not in ("id", "type")},
)
VALID = st.one_of(
    st.fixed_dictionaries({"type": st.just("generate"), "id": st.integers(0, 5), "prompt": VALUES}),
    st.fixed_dictionaries({"type": st.sampled_from(["cancel", "ping", "models"]), "id": st.integers(0, 5)}),
)
MESSAGES = ODD | VALID


@FUZZ
@given(messages=st.lists(MESSAGES, max_size=6), codec=st.sampled_from(Codec), cut=st.integers(1, 400))
def test_messages_with_arbitrary_fields_in_arbitrary_pieces(
    daemon: FakeDaemon, messages: list[dict[str, Any]], codec: Codec, cut: int
) -> None:
    client = daemon.client(codec)
    data = b"".join(
        body + b"\n" if codec is Codec.JSON else len(body).to_bytes(4, "big") + body
        for body in (encode(message, codec) for message in messages)
    )
    for start in range(0, len(data), cut):
        client.raw(data[start : start + cut])
    assert client.pinged(2**53 - 1)
    ends_cleanly(daemon, client)


# ------------------------------------------------------------------------------------------------------ cut anywhere


CONVERSATION = [
    HELLO,
    wire.Generate(id=1, prompt="count 2", stop=["é€"]),
    wire.Count(id=2, text="\n{}\x00"),
    wire.Ping(id=3),
]


@CODECS
def test_where_the_bytes_are_split_makes_no_difference(daemon: FakeDaemon, codec: Codec) -> None:
    data = b"".join(frame(message, codec) for message in CONVERSATION)
    answers = []
    for cut in range(len(data) + 1):
        with daemon.client(codec, hello=False) as client:
            client.raw(data[:cut])
            client.raw(data[cut:])
            answers.append([client.read() for _ in range(6)])
    assert isinstance(answers[0][0], wire.Welcome)
    assert answers[0][-1] == wire.Pong(id=3)
    assert all(answer == answers[0] for answer in answers)


@CODECS
def test_one_byte_at_a_time_is_understood(daemon: FakeDaemon, codec: Codec) -> None:
    with daemon.client(codec, hello=False) as client:
        for message in CONVERSATION:
            for byte in frame(message, codec):
                client.raw(bytes([byte]))
        assert [type(client.read()) for _ in range(6)][-1] is wire.Pong


@CODECS
def test_input_that_ends_anywhere_leaves_nothing_behind(daemon: FakeDaemon, codec: Codec) -> None:
    data = b"".join(frame(message, codec) for message in CONVERSATION)
    for cut in range(len(data)):
        client = daemon.client(codec, hello=False)
        client.raw(data[:cut])
        client.close()
    daemon.settled()
    daemon.until(lambda service: not service.running)


# ------------------------------------------------------------------------------------------------------- bad frames


BAD = {
    "unknown field": ({"type": "generate", "id": 7, "prompt": "x", "temperatur": 1}, "temperatur"),
    "wrong type": ({"type": "generate", "id": 7, "prompt": 5}, "$.prompt"),
    "out of range": ({"type": "generate", "id": 7, "prompt": "x", "top_p": 1.5}, "$.top_p"),
    "nested wrong type": ({"type": "count", "id": 7, "messages": [{"role": "user", "content": 3}]}, "content"),
    "unknown message": ({"type": "dance", "id": 7}, "dance"),
    "no type": ({"id": 7}, "type"),
    "a reply": ({"type": "pong", "id": 7}, "pong"),
}


@CODECS
@pytest.mark.parametrize("name", BAD)
def test_a_readable_message_that_is_not_of_the_protocol_is_refused_by_name(
    daemon: FakeDaemon, codec: Codec, name: str
) -> None:
    message, mentioned = BAD[name]
    with daemon.client(codec) as client:
        client.body(encode(message, codec))
        error = client.error()
        assert (error.code, error.id) == ("bad_request", 7)
        assert mentioned in error.message
        assert client.pinged()


@CODECS
@pytest.mark.parametrize("value", [[1, 2], "text", 5, None, True])
def test_a_value_that_is_not_a_message_is_refused(daemon: FakeDaemon, codec: Codec, value: Any) -> None:
    with daemon.client(codec) as client:
        client.body(encode(value, codec))
        assert client.error().code in ("bad_frame", "bad_request")
        assert client.pinged()


@CODECS
def test_deep_nesting_is_refused_and_the_connection_goes_on(daemon: FakeDaemon, codec: Codec) -> None:
    deep = b"[" * 100_000 if codec is Codec.JSON else b"\x91" * 100_000
    known = {"type": "count", "id": 1, "messages": 0, "text": "x"}
    head = encode(known, codec)
    hidden = head[:-1] + b',"zzz":' + deep if codec is Codec.JSON else b"\x81\xa3zzz" + deep
    with daemon.client(codec) as client:
        for body in (deep, hidden):
            client.body(body)
            assert client.error().code in ("bad_frame", "bad_request")
        assert client.pinged()


def test_bytes_after_a_message_in_its_frame_are_refused(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.body(encode({"type": "ping", "id": 1}, Codec.MSGPACK) + b"\0")
        assert client.error().code == "bad_frame"
        assert client.pinged()


def test_an_empty_frame_is_refused_and_an_empty_line_ignored(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.body(b"")
        assert client.error().code == "bad_frame"
        assert client.pinged()
    with daemon.client(Codec.JSON) as client:
        client.raw(b"\n  \r\n")
        assert client.pinged()


def test_invalid_utf8_is_refused(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON) as client:
        client.body(b'{"type":"count","id":1,"text":"\xff"}')
        assert client.error().code == "bad_frame"
        assert client.pinged()


def test_a_thousand_bad_frames_are_answered_one_by_one(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.raw(b"\0\0\0\0" * 1000)
        assert {client.error().code for _ in range(1000)} == {"bad_frame"}
        assert client.pinged()


def test_a_bad_frame_about_a_running_request_does_not_look_like_its_end(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(wire.Generate(id=1, prompt="wait"))
        client.body(encode({"type": "cancel", "id": 1, "now": True}, Codec.MSGPACK))
        assert client.error().data == {"still_running": True}
        client.say(wire.Cancel(id=1))
        assert isinstance(client.read(), wire.Done)


# ------------------------------------------------------------------------------------------------------------- size


@CODECS
@pytest.mark.parametrize("limit", [4096, 100_000])
def test_a_frame_may_have_just_what_was_agreed_on(daemon: FakeDaemon, codec: Codec, limit: int) -> None:
    overhead = len(encode({"type": "count", "id": 1, "text": "x" * 70_000}, codec)) - 70_000
    fitting = limit - overhead - (0 if codec is Codec.JSON or limit > 70_000 else -2)
    with daemon.client(codec, max_frame=limit) as client:
        client.say(wire.Count(id=1, text="x" * fitting))
        assert client.read() == wire.Counted(id=1, count=fitting)
        client.say(wire.Count(id=2, text="x" * (fitting + 1)))
        error = client.error()
        assert error.code == "frame_too_large"
        assert str(limit) in error.message
        assert client.rest() == []


def test_a_client_that_still_writes_an_oversized_frame_can_read_why_it_was_refused(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(wire.Count(id=2, text="x" * 6_000_000))
        assert client.error().code == "frame_too_large"
        assert client.rest() == []


def test_a_json_line_that_never_ends_is_refused_at_the_limit(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON, max_frame=4096) as client:
        client.raw(b'{"type":"count","id":1,"text":"' + b"x" * 8000)
        assert client.error().code == "frame_too_large"
        assert client.rest() == []


@pytest.mark.parametrize("codec", list(Codec))
def test_the_other_codec_in_the_middle_is_not_understood(daemon: FakeDaemon, codec: Codec) -> None:
    other = Codec.JSON if codec is Codec.MSGPACK else Codec.MSGPACK
    with daemon.client(codec) as client:
        client.raw(frame(wire.Ping(id=1), other) + b"\n")
        error = client.error()
        assert error.code == ("frame_too_large" if codec is Codec.MSGPACK else "bad_frame")
        if codec is Codec.JSON:
            assert client.pinged()


def test_a_client_of_another_protocol_altogether_is_closed(tmp_path: Path) -> None:
    with fake_daemon(tmp_path) as daemon, daemon.client(hello=False) as client:
        client.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.error().code == "frame_too_large"
        assert client.rest() == []
