"""What a client may say on one connection, and what it is told: through real sockets, in both codecs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_service import FakeDaemon, fake_daemon

from mlxbc import wire
from mlxbc.framing import Codec, frame
from mlxbcd.serve.call import Call

CODECS = pytest.mark.parametrize("codec", list(Codec))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(tmp_path) as daemon:
        yield daemon


def generate(request: int, prompt: str) -> wire.Generate:
    return wire.Generate(id=request, prompt=prompt)


# ----------------------------------------------------------------------------------------------- hello


@CODECS
def test_hello_is_answered_with_who_serves_and_the_frame_limit(daemon: FakeDaemon, codec: Codec) -> None:
    with daemon.client(codec, hello=False) as client:
        client.say(wire.Hello(proto=1, client="test", version="9", max_frame=5000))
        welcome = client.read()
    assert isinstance(welcome, wire.Welcome)
    assert (welcome.proto, welcome.pid, welcome.models, welcome.max_frame) == (1, os.getpid(), ["fake"], 5000)


def test_a_msgpack_client_that_does_not_say_hello_first_is_refused_and_closed(daemon: FakeDaemon) -> None:
    with daemon.client(hello=False) as client:
        client.say(wire.Ping(id=5))
        (error,) = client.rest()
    assert isinstance(error, wire.Error)
    assert (error.code, error.id) == ("bad_request", 5)


def test_a_json_client_may_leave_hello_out(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON, hello=False) as client:
        client.say(generate(1, "count 2"))
        assert [type(reply) for reply in client.until_terminal(1)] == [wire.Token, wire.Token, wire.Done]


@CODECS
def test_a_second_hello_is_refused_and_the_connection_goes_on(daemon: FakeDaemon, codec: Codec) -> None:
    with daemon.client(codec) as client:
        client.say(wire.Hello(proto=1))
        assert client.error().code == "bad_request"
        assert client.pinged()


@CODECS
@pytest.mark.parametrize(("proto", "advice"), [(2, "restart the daemon"), (0, "update the client")])
def test_another_protocol_is_told_both_versions_and_what_to_run(
    daemon: FakeDaemon, codec: Codec, proto: int, advice: str
) -> None:
    with daemon.client(codec, hello=False) as client:
        client.say(wire.Hello(proto=proto))
        (error,) = client.rest()
    assert isinstance(error, wire.Error)
    assert (error.code, error.data) == ("proto_mismatch", {"client": proto, "daemon": 1})
    assert advice in error.message


def test_a_client_that_does_not_finish_its_hello_in_time_is_told_and_closed(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, hello_s=0.05) as daemon, daemon.client(hello=False) as client:
        client.raw(b"\0\0")
        (error,) = client.rest()
    assert isinstance(error, wire.Error)
    assert error.code == "timeout"


def test_a_hello_in_pieces_stops_its_clock(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, hello_s=0.05) as daemon, daemon.client(hello=False) as client:
        hello = frame(wire.Hello(proto=1), Codec.MSGPACK)
        client.raw(hello[:9])
        while daemon.do(lambda: daemon.server.ledger.total) != 9:
            pass
        with daemon.client(hello=False) as clock:
            clock.raw(b"\0")
            client.raw(hello[9:])
            assert isinstance(client.read(), wire.Welcome)
            clock.rest()  # By now the time for a hello has passed.
        assert client.pinged()


def test_a_silent_connection_and_a_slow_json_line_are_waited_for(tmp_path: Path) -> None:
    with (
        fake_daemon(tmp_path, hello_s=0.02) as daemon,
        daemon.client(hello=False) as silent,
        daemon.client(Codec.JSON, hello=False) as slow,
        daemon.client(hello=False) as clock,
    ):
        slow.raw(b'{"type":"ping"')
        clock.raw(b"\0")
        clock.rest()  # By now the time for a hello has passed.
        slow.raw(b',"id":3}\n')
        assert slow.read() == wire.Pong(id=3)
        silent.say(wire.Hello(proto=1))
        assert isinstance(silent.read(), wire.Welcome)


# -------------------------------------------------------------------------------------------- requests


@CODECS
def test_many_requests_run_at_once_and_each_gets_its_own_replies(daemon: FakeDaemon, codec: Codec) -> None:
    with daemon.client(codec) as client:
        client.say(generate(1, "wait"), generate(2, "wait"), generate(3, "count 1"))
        assert [type(reply) for reply in client.until_terminal(3)] == [wire.Token, wire.Done]
        first, second = daemon.service.jobs[:2]
        daemon.do(second.token, "b")
        daemon.do(first.token, "a")
        daemon.do(first.done)
        daemon.do(second.done)
        assert client.until_terminal(1)[0] == wire.Token(id=1, text="a")
        assert client.until_terminal(2)[0] == wire.Token(id=2, text="b")


def test_the_service_learns_who_asks(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(generate(1, "count 0"))
        client.until_terminal(1)
        assert daemon.job().client == f"test[{os.getpid()}]"


@CODECS
def test_an_id_that_is_still_running_is_refused_and_the_running_request_unaffected(
    daemon: FakeDaemon, codec: Codec
) -> None:
    with daemon.client(codec) as client:
        client.say(generate(7, "wait"), generate(7, "wait"), wire.Ping(id=7))
        for _ in range(2):
            error = client.error()
            assert (error.code, error.id, error.data) == ("bad_request", 7, {"still_running": True})
        assert len(daemon.service.jobs) == 1
        daemon.do(daemon.job().token, "x")
        daemon.do(daemon.job().done)
        assert [type(reply) for reply in client.until_terminal(7)] == [wire.Token, wire.Done]


def test_an_id_is_free_again_once_its_request_has_ended(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        for _ in range(3):
            client.say(generate(7, "count 1"))
            assert isinstance(client.until_terminal(7)[-1], wire.Done)


@CODECS
def test_cancel_ends_a_request_with_exactly_one_terminal_frame(daemon: FakeDaemon, codec: Codec) -> None:
    with daemon.client(codec) as client:
        client.say(generate(1, "wait"), wire.Cancel(id=1), wire.Cancel(id=1), wire.Cancel(id=1))
        (done,) = client.until_terminal(1)
        assert isinstance(done, wire.Done)
        assert done.reason == "cancelled"
        assert client.pinged()
        assert client._replies == []


def test_cancelling_an_unknown_id_is_ignored(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(wire.Cancel(id=12))
        assert client.pinged()
        assert client._replies == []


def test_nothing_is_sent_after_the_terminal_frame(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with daemon.client() as client:
        client.say(generate(1, "count 1"))
        client.until_terminal(1)
        daemon.do(daemon.job().token, "late")
        daemon.do(daemon.job().done)
        assert client.pinged()
        assert client._replies == []
    assert "request 1 sent Token after its end" in caplog.text


def test_a_refusal_of_the_service_is_the_terminal_frame(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(generate(4, "refuse"))
        assert client.read() == wire.Error(
            id=4, code="context_too_long", message="shorten the prompt", data={"limit": 7}
        )
        client.say(generate(4, "count 0"))
        assert isinstance(client.read(), wire.Done)


def test_a_bug_in_the_service_fails_one_request_and_logs_no_prompt(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon.client() as client:
        client.say(generate(4, "raise"))
        error = client.error()
        assert (error.id, error.code) == (4, "internal")
        assert client.pinged()
    assert "Generate failed to start: KeyError at " in caplog.text
    assert "secret" not in caplog.text + error.message


def test_a_reply_too_long_for_a_frame_becomes_an_error_and_cancels_its_job(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(generate(1, "wait"))
        job = daemon.job()
        daemon.do(job.token, "x" * wire.FRAME_CEILING)
        error = client.error()
        assert (error.id, error.code) == (1, "frame_too_large")
        assert job.cancelled == 1
        assert client.pinged()


def test_more_requests_than_one_connection_may_run_are_told_so(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, requests=2) as daemon, daemon.client() as client:
        client.say(generate(1, "wait"), generate(2, "wait"), generate(3, "wait"))
        error = client.error()
        assert (error.id, error.code, error.retryable) == (3, "queue_full", True)
        client.say(wire.Cancel(id=1))
        client.until_terminal(1)
        client.say(generate(3, "count 0"))
        assert isinstance(client.until_terminal(3)[-1], wire.Done)


def test_a_request_cancelled_while_it_is_submitted_is_cancelled_as_soon_as_it_can_be() -> None:
    class Job:
        cancelled = 0

        def cancel(self, reason: str = "cancelled") -> None:
            self.cancelled += 1

    sent: list[wire.Reply] = []
    early, late = Job(), Job()
    call = Call(1, sent.append, lambda call: None)
    call.cancel()
    call.start(early)
    ended = Call(2, sent.append, lambda call: None)
    ended.cancel()
    ended.reply(wire.Pong(id=2))
    ended.start(late)
    assert (early.cancelled, late.cancelled, sent) == (1, 0, [wire.Pong(id=2)])


def test_a_newer_request_with_the_same_key_ends_the_older_before_it_begins(daemon: FakeDaemon) -> None:
    def keyed(request: int, key: str, prompt: str = "wait") -> wire.Generate:
        return wire.Generate(id=request, prompt=prompt, supersede=key)

    with daemon.client() as client, daemon.client() as other:
        other.say(keyed(1, "line"))
        client.say(keyed(1, "line"), keyed(2, "other"), keyed(3, "line"), keyed(4, "line", "count 1"))
        ends = [reply for reply in (client.read() for _ in range(4)) if isinstance(reply, wire.Done)]
        assert [(end.id, end.reason) for end in ends] == [(1, "superseded"), (3, "superseded"), (4, "length")]
        # One that has ended is nobody's older request any more.
        client.say(keyed(5, "line", "count 0"))
        assert [reply.reason for reply in client.until_terminal(5) if isinstance(reply, wire.Done)] == ["length"]
        other.say(wire.Cancel(id=1))
        assert [reply.reason for reply in other.until_terminal(1) if isinstance(reply, wire.Done)] == ["cancelled"]


def test_status_counts_the_connections(daemon: FakeDaemon) -> None:
    with daemon.client() as client, daemon.client(), daemon.client(Codec.JSON):
        client.say(wire.Status(id=1))
        report = client.read()
        assert isinstance(report, wire.StatusReport)
        assert report.connections == 3


def test_ping_is_answered_while_requests_run(daemon: FakeDaemon) -> None:
    with daemon.client() as client:
        client.say(generate(1, "wait"))
        assert client.pinged(2)


def test_a_flood_of_pings_is_answered_in_order_and_others_get_their_turn(daemon: FakeDaemon) -> None:
    with daemon.client() as flood, daemon.client() as other:
        flood.say(*(wire.Ping(id=n) for n in range(5000)))
        assert other.pinged()
        assert [flood.read() for _ in range(5000)] == [wire.Pong(id=n) for n in range(5000)]


# ------------------------------------------------------------------------------------------------ ends


def test_end_of_input_cancels_what_a_msgpack_client_runs(daemon: FakeDaemon) -> None:
    client = daemon.client()
    client.say(generate(1, "wait"), generate(2, "wait"))
    daemon.until(lambda service: len(service.jobs) == 2)
    client.half_close()
    assert client.rest() == []
    daemon.settled()
    assert [job.cancelled for job in daemon.service.jobs] == [1, 1]
    client.close()


def test_end_of_input_lets_running_json_requests_finish(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON, hello=False) as client:
        client.say(generate(1, "wait"), generate(2, "wait"))
        client.half_close()
        daemon.until(lambda service: len(service.jobs) == 2)
        first, second = daemon.service.jobs
        daemon.do(first.token, "a")
        daemon.do(first.done)
        daemon.do(second.done)
        assert [type(reply) for reply in client.rest()] == [wire.Token, wire.Done, wire.Done]
        assert first.cancelled == second.cancelled == 0


def test_the_last_json_line_needs_no_newline(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON, hello=False) as client:
        client.raw(b'{"type":"count","id":1,"text":"four"}')
        client.half_close()
        assert client.rest() == [wire.Counted(id=1, count=4)]


def test_a_json_line_cut_short_is_refused_at_the_end_of_input(daemon: FakeDaemon) -> None:
    with daemon.client(Codec.JSON, hello=False) as client:
        client.say(generate(1, "count 1"))
        client.raw(b'{"type":"cou')
        client.half_close()
        *_, done, error = client.rest()
        assert isinstance(done, wire.Done)
        assert isinstance(error, wire.Error)
        assert error.code == "bad_frame"


@pytest.mark.skipif("sys.platform != 'linux'", reason="only Linux tells a closed peer from a finished one")
def test_a_json_client_that_is_killed_has_its_requests_cancelled_at_once(daemon: FakeDaemon) -> None:
    client = daemon.client(Codec.JSON, hello=False)
    client.say(generate(1, "wait"))
    daemon.job()
    client.close()
    daemon.until(lambda service: not service.running)
    assert daemon.job().cancelled == 1


def test_a_json_client_that_vanishes_after_its_end_of_input_is_noticed_at_the_next_frame(
    daemon: FakeDaemon,
) -> None:
    client = daemon.client(Codec.JSON, hello=False)
    client.say(generate(1, "wait"))
    client.half_close()
    job = daemon.job()
    client.close()
    daemon.do(job.send, wire.Progress(id=1, phase="prefill", done=1, total=2))
    daemon.until(lambda service: not service.running)
    daemon.settled()
    assert job.cancelled == 1


@pytest.mark.parametrize("running", [0, 1, 3])
def test_a_client_that_vanishes_with_replies_unread_leaves_nothing_behind(daemon: FakeDaemon, running: int) -> None:
    client = daemon.client()
    client.say(*(generate(n, "wait") for n in range(running)), generate(99, "count 3"))
    daemon.until(lambda service: len(service.jobs) == running + 1)
    client.close()
    daemon.settled()
    assert [job.cancelled for job in daemon.service.jobs] == [1] * running + [0]
    with daemon.client() as other:
        assert other.pinged()


def test_five_hundred_clients_that_connect_and_vanish_leave_nothing_behind(daemon: FakeDaemon) -> None:
    for n in range(500):
        client = daemon.client(hello=False)
        if n % 5:
            client.say(wire.Hello(proto=1))
        if n % 5 > 1:
            client.say(generate(n, "wait"), generate(n + 1, "count 5"))
        if n % 5 > 2:
            client.read()
        if n % 5 > 3:
            client.raw(struct.pack(">I", 4000) + b"x" * n)
        client.close()
    with daemon.client() as client:
        assert client.pinged()
    daemon.settled()
    assert not daemon.service.running


def test_running_requests_end_with_an_error_when_the_daemon_stops_at_once(daemon: FakeDaemon) -> None:
    with daemon.client() as client, daemon.client() as idle:
        client.say(generate(1, "wait"), wire.Shutdown(id=2, drain=False))
        bye, error = client.rest()
        assert bye == wire.Bye(id=2)
        assert isinstance(error, wire.Error)
        assert (error.id, error.code, error.retryable) == (1, "shutting_down", True)
        assert idle.rest() == []
        daemon.join()
        assert daemon.service.closed


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones(daemon: FakeDaemon) -> None:
    with daemon.client() as client, daemon.client() as other:
        client.say(generate(1, "wait"), wire.Shutdown(id=2))
        assert client.read() == wire.Bye(id=2)
        daemon.until(lambda service: service.draining)
        other.say(generate(1, "count 1"))
        assert other.error().code == "shutting_down"
        with daemon.client() as late:
            late.say(generate(1, "count 1"))
            assert late.error().code == "shutting_down"
        daemon.do(daemon.job().token, "kept")
        daemon.do(daemon.job().done)
        assert [type(reply) for reply in client.rest()] == [wire.Token, wire.Done]
        daemon.join()
    assert not daemon.path.exists()


def test_a_device_fault_is_told_to_every_request_and_every_connection(daemon: FakeDaemon) -> None:
    with daemon.client() as busy, daemon.client() as idle, daemon.client(Codec.JSON) as shell:
        busy.say(generate(1, "wait"), generate(2, "wait"))
        daemon.until(lambda service: len(service.jobs) == 2)
        daemon.do(daemon.lifecycle.fail, RuntimeError("gone"))
        for client, ids in ((busy, [1, 2, None]), (idle, [None]), (shell, [None])):
            errors = client.rest()
            assert [reply.id for reply in errors if isinstance(reply, wire.Error)] == ids
            assert {reply.code for reply in errors if isinstance(reply, wire.Error)} == {"device_error"}
        daemon.join()
        assert not daemon.service.closed, "the service can't be closed without the device"
        daemon.service.running.clear()


# ---------------------------------------------------------------------------------------- who may come


@CODECS
def test_another_user_is_refused_in_its_own_codec(tmp_path: Path, codec: Codec) -> None:
    with fake_daemon(tmp_path, user=os.geteuid() + 1) as daemon, daemon.client(codec, hello=False) as client:
        client.say(wire.Hello(proto=1), generate(1, "count 1"))
        (error,) = client.rest()
        assert isinstance(error, wire.Error)
        assert error.code == "unauthorized"
        assert not daemon.service.jobs


def test_another_user_who_says_nothing_is_closed_in_time(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, user=os.geteuid() + 1, hello_s=0.05) as daemon:
        with daemon.client(hello=False) as client:
            assert client.rest() == []
        daemon.settled()


def test_connections_over_the_limit_are_told_so_and_room_is_reused(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, connections=2) as daemon, daemon.client() as one:
        two = daemon.client()
        with daemon.client(hello=False) as three:
            three.say(wire.Hello(proto=1))
            error = three.error()
            assert (error.code, error.retryable) == ("queue_full", True)
        two.close()
        assert one.pinged()
        while True:
            with daemon.client(hello=False) as again:
                again.say(wire.Hello(proto=1))
                if isinstance(again.read(), wire.Welcome):
                    break


def test_connections_far_over_the_limit_are_closed_without_a_word(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, connections=1) as daemon, daemon.client() as served:
        silent = [daemon.client(hello=False) for _ in range(64)]
        with daemon.client(hello=False) as one_more:
            assert one_more.rest() == []
        for client in silent:
            client.close()
        assert served.pinged()


@pytest.mark.skipif("os.geteuid() != 0", reason="needs to become another user")
def test_the_kernel_says_who_another_user_is() -> None:
    with tempfile.TemporaryDirectory() as name, fake_daemon(Path(name)) as daemon:
        # The private directory and the socket's mode keep others out; open them to get as far as the check.
        daemon.path.parent.chmod(0o711)
        daemon.path.chmod(0o666)
        stranger = """
import os, socket, sys
os.seteuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(b'{"type":"ping","id":1}\\n')
    sys.stdout.write(connection.recv(65536).decode())
"""
        command = [sys.executable, "-c", stranger, str(daemon.path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert json.loads(said)["code"] == "unauthorized"
