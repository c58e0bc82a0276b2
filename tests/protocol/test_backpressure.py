"""A client that doesn't read: its text is joined and bounded, nobody else notices, and nothing wakes up when idle."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_service import PATIENCE_S, FakeClient, FakeDaemon, FakeJob, fake_daemon, settled
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import wire
from mlxbc.framing import Codec, Inbound, frame
from mlxbcd.serve.backlog import JOINED, Backlog
from mlxbcd.serve.limits import Ledger
from mlxbcd.serve.patience import LATE_S

CODECS = pytest.mark.parametrize("codec", list(Codec))
PIECE = "x" * 1000


def paused(daemon: FakeDaemon, client: FakeClient, request: int = 1) -> tuple[FakeJob, int]:
    """Run a request of a client that doesn't read, until its tokens wait; the job, and how many were sent."""
    client.say(wire.Generate(id=request, prompt="wait"))
    daemon.until(lambda service: any(job.request.id == request for job in service.jobs))
    job = next(job for job in daemon.service.jobs if job.request.id == request)
    sent = 0
    while daemon.do(lambda: daemon.server.ledger.total) == 0:
        daemon.do(job.token, PIECE)
        sent += 1
        assert sent < 10_000, "nothing ever waits"
    return job, sent


# ------------------------------------------------------------------------------------------------ joining, pure

CALLS = st.builds(
    lambda id, candidate, n: wire.Token(
        id=id,
        text="",
        channel="tool_calls",
        candidate=candidate,
        call=wire.ToolCall(index=n, id="é", name="f", arguments="{}"),
    ),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 9),
)
TOKENS = CALLS | st.builds(
    wire.Token,
    id=st.integers(0, 2),
    candidate=st.sampled_from([0, 0, 1]),
    text=st.text(max_size=5),
    n=st.integers(0, 3),
    channel=st.sampled_from(["text", "reasoning"]),
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    logprobs=st.lists(
        st.builds(wire.TokenLogprob, token=st.just(1), text=st.just("a"), logprob=st.just(-1.0)), max_size=2
    ),
)
OTHERS = st.builds(wire.Pong, id=st.integers(0, 2)) | st.builds(
    wire.Progress, id=st.integers(0, 2), phase=st.just("prefill"), done=st.integers(0, 9), total=st.just(9)
)


def backlog_of(replies: list[wire.Reply]) -> Backlog:
    backlog = Backlog(lambda reply: frame(reply, Codec.MSGPACK))
    for reply in replies:
        backlog.push(reply)
    return backlog


def popped(backlog: Backlog) -> list[wire.Reply]:
    inbound: Inbound[wire.Reply] = Inbound(wire.Reply, codec=Codec.MSGPACK)
    return [reply for _ in range(len(backlog)) for reply in inbound.feed(backlog.pop())]


def spelled_out(replies: list[wire.Reply], request: int, candidate: int) -> list[object]:
    """What a client makes of the replies to one request: the text by the character, with what else it carries."""
    story: list[object] = []
    for reply in replies:
        if reply.id != request or (isinstance(reply, wire.Token) and reply.candidate != candidate):
            continue
        if not isinstance(reply, wire.Token) or reply.call is not None:
            story.append(reply)
            continue
        if not story or not isinstance(story[-1], list) or story[-1][0] != reply.channel:
            story.append([reply.channel, "", 0, [], []])
        entry = story[-1]
        for place, value in enumerate((reply.text, reply.n, reply.ids, reply.logprobs), start=1):
            entry[place] = entry[place] + value
    return story


@given(replies=st.lists(TOKENS | OTHERS, max_size=30))
def test_joining_changes_nothing_that_a_client_can_tell(replies: list[wire.Reply]) -> None:
    backlog = backlog_of(replies)
    told = popped(backlog)
    for request, candidate in itertools.product(range(3), range(2)):
        assert spelled_out(told, request, candidate) == spelled_out(replies, request, candidate)
    assert (len(backlog), backlog.held) == (0, 0)


@given(replies=st.lists(TOKENS | OTHERS, max_size=30))
def test_each_request_waits_with_one_token_frame_per_run(replies: list[wire.Reply]) -> None:
    told = popped(backlog_of(replies))
    for request in range(3):
        mine = [reply for reply in told if reply.id == request]
        for one, next_one in itertools.pairwise(mine):
            both = isinstance(one, wire.Token) and isinstance(next_one, wire.Token)
            alike = both and (one.channel, one.candidate) == (next_one.channel, next_one.candidate)
            assert not alike or one.call is not None or next_one.call is not None


@given(replies=st.lists(TOKENS | OTHERS, max_size=30))
def test_dropping_everything_leaves_nothing(replies: list[wire.Reply]) -> None:
    backlog = backlog_of(replies)
    assert backlog.held >= sum(len(reply.text.encode()) for reply in replies if isinstance(reply, wire.Token))
    backlog.clear()
    assert (len(backlog), backlog.held, popped(backlog)) == (0, 0, [])


def test_a_joined_frame_stays_well_below_any_frame_limit() -> None:
    tokens: list[wire.Reply] = [wire.Token(id=1, text="é" * 500) for _ in range(1000)]
    told = popped(backlog_of(tokens))
    assert all(len(frame(reply, Codec.JSON)) < JOINED + 4096 for reply in told)
    assert len(told) < 10


# --------------------------------------------------------------------------------------------- a reader that stops


@CODECS
def test_a_reader_that_pauses_gets_everything_in_few_frames(tmp_path: Path, codec: Codec) -> None:
    with fake_daemon(tmp_path) as daemon, daemon.client(codec) as client:
        job, sent = paused(daemon, client)
        for n in range(200):
            daemon.do(job.token, f"{n},", ids=[n])
        daemon.do(job.done)
        *tokens, done = client.until_terminal(1)
        assert isinstance(done, wire.Done)
        late = [token for token in tokens if isinstance(token, wire.Token) and token.ids]
        assert len(late) == 1, "what waits is one frame"
        text = "".join(token.text for token in tokens if isinstance(token, wire.Token))
        assert text == PIECE * sent + "".join(f"{n}," for n in range(200))
        assert late[0].ids == list(range(200))
        assert sum(token.n for token in tokens if isinstance(token, wire.Token)) == sent + 200
        assert client.pinged()
        assert daemon.do(lambda: daemon.server.ledger.total) == 0


def test_a_reader_that_stops_is_dropped_when_its_text_outgrows_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_daemon(tmp_path, held=50_000) as daemon, daemon.client() as stuck, daemon.client() as other:
        job, _ = paused(daemon, stuck)
        second = wire.Generate(id=2, prompt="wait")
        stuck.say(second)
        daemon.until(lambda service: len(service.jobs) == 2)
        other.say(wire.Generate(id=1, prompt="wait"))
        daemon.until(lambda service: len(service.jobs) == 3)
        healthy = daemon.service.jobs[2]
        most = 0
        while not job.cancelled:
            daemon.do(job.token, PIECE)
            daemon.do(healthy.token, "still here")
            assert other.read() == wire.Token(id=1, text="still here")
            most = max(most, daemon.do(lambda: daemon.server.ledger.total))
        assert most < 50_000 + 2 * 65_536 + 2 * len(PIECE)
        assert [one.cancelled for one in daemon.service.jobs] == [1, 1, 0]
        assert len(stuck.rest()) > 50, "what was written before can still be read"
        daemon.do(healthy.done)
        assert isinstance(other.read(), wire.Done)
    assert "dropped a client: it leaves " in caplog.text
    assert "xxx" not in caplog.text


def test_a_reader_that_stops_is_dropped_after_a_while_even_if_little_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_daemon(tmp_path, stall_s=0.05) as daemon, daemon.client() as stuck, daemon.client() as other:
        job, _ = paused(daemon, stuck)
        daemon.until(lambda service: not service.running)
        assert job.cancelled == 1
        stuck.rest()
        assert other.pinged()
    assert "it has read nothing for 0.05 s" in caplog.text


def test_a_slow_reader_is_not_a_stopped_one(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, stall_s=0.5) as daemon, daemon.client() as slow:
        started = time.monotonic()
        job, sent = paused(daemon, slow)
        seen = 0
        # Every pause is cut short by some reading, until long after a single pause would have been too long.
        while time.monotonic() < started + 1.0:
            while daemon.do(lambda: daemon.server.ledger.total):
                reply = slow.read()
                assert isinstance(reply, wire.Token)
                seen += reply.n
            while daemon.do(lambda: daemon.server.ledger.total) == 0:
                daemon.do(job.token, PIECE)
                sent += 1
        daemon.do(job.done)
        *tokens, done = slow.until_terminal(1)
        assert isinstance(done, wire.Done)
        assert seen + sum(token.n for token in tokens if isinstance(token, wire.Token)) == sent


def test_a_job_whose_client_is_dropped_while_it_is_submitted_is_cancelled(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, held=50_000) as daemon, daemon.client() as client:
        client.say(wire.Generate(id=1, prompt="flood 10000"))
        daemon.until(lambda service: bool(service.jobs) and not service.running)
        assert daemon.job().cancelled == 1
        assert len(client.rest()) < 10_000


def test_a_paused_client_can_still_cancel(tmp_path: Path) -> None:
    with fake_daemon(tmp_path) as daemon, daemon.client() as client:
        job, _ = paused(daemon, client)
        client.say(wire.Cancel(id=1))
        daemon.until(lambda service: not service.running)
        assert job.cancelled == 1
        done = client.until_terminal(1)[-1]
        assert isinstance(done, wire.Done)
        assert done.reason == "cancelled"


def test_a_client_that_vanishes_while_it_is_paused_is_noticed(tmp_path: Path) -> None:
    with fake_daemon(tmp_path) as daemon:
        client = daemon.client()
        job, _ = paused(daemon, client)
        client.close()
        daemon.settled()
        assert job.cancelled == 1


def test_json_lines_that_ended_while_paused_are_delivered_to_the_last(tmp_path: Path) -> None:
    with fake_daemon(tmp_path) as daemon, daemon.client(Codec.JSON) as client:
        job, sent = paused(daemon, client)
        client.half_close()
        for _ in range(20):
            daemon.do(job.token, PIECE)
        daemon.do(job.done)
        *tokens, done = client.rest()
        assert isinstance(done, wire.Done)
        assert sum(token.n for token in tokens if isinstance(token, wire.Token)) == sent + 20


@pytest.mark.parametrize("at_once", [20, 1000])
def test_a_client_that_asks_without_reading_is_not_read_from_until_it_does(tmp_path: Path, at_once: int) -> None:
    ping = frame(wire.Ping(id=1), Codec.MSGPACK)
    pings = ping * at_once
    held = 100_000
    with fake_daemon(tmp_path, held=held) as daemon, daemon.client() as client, daemon.client() as other:
        client.socket.setblocking(False)
        written, most, after = 0, 0, 0
        while after < 200:
            with contextlib.suppress(BlockingIOError):
                written += client.socket.send(pings[written % len(pings) :])
            assert other.pinged()
            total = daemon.do(lambda: daemon.server.ledger.total)
            most = max(most, total)
            after += total > held
        assert most < held + 2 * 65_536 + 300_000, "replies, the transport's buffer, and one read"
        client.socket.settimeout(PATIENCE_S)
        assert {client.read() for _ in range(written // len(ping))} == {wire.Pong(id=1)}


def test_the_whole_of_all_connections_is_bounded(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, buffered=500_000) as daemon, daemon.client() as other:
        clients = [daemon.client() for _ in range(8)]
        for n, client in enumerate(clients):
            # A long frame that never gets complete; the third client sends most of all.
            client.raw((2_000_000).to_bytes(4, "big") + b"x" * (150_000 if n == 2 else 70_000))
            assert other.pinged()
            assert daemon.do(lambda: daemon.server.ledger.total) <= 500_000
        assert clients[2].rest() == []
        for client in clients:
            client.close()
        assert other.pinged()


def test_the_ledger_lets_the_largest_holder_go_first() -> None:
    dropped = []

    class Holder:
        def __init__(self, name: str) -> None:
            self.name = name

        def overflow(self) -> None:
            dropped.append(self.name)

    ledger = Ledger(100)
    large, small, last = Holder("large"), Holder("small"), Holder("last")
    ledger.hold(large, 60)
    ledger.hold(small, 30)
    ledger.hold(last, 10)
    assert (ledger.total, dropped) == (100, [])
    ledger.hold(last, 11)
    assert (ledger.total, dropped) == (41, ["large"])
    ledger.hold(last, 0)
    ledger.hold(small, 0)
    assert ledger.total == 0


# ------------------------------------------------------------------------------------------------------------- idle


def switches(thread: int) -> int:
    """How often a thread has gone to sleep: once per wake-up."""
    for line in Path(f"/proc/self/task/{thread}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("the kernel does not say")


@pytest.mark.skipif(sys.platform != "linux", reason="counts wake-ups as Linux shows them")
@pytest.mark.parametrize(
    "state", ["said hello", "said nothing", "ran a request", "finished JSON lines", "was slow once"]
)
def test_an_idle_daemon_does_not_wake_up(tmp_path: Path, state: str) -> None:
    act: dict[str, Callable[[FakeDaemon], FakeClient]] = {
        "said hello": lambda daemon: daemon.client(),
        "said nothing": lambda daemon: daemon.client(hello=False),
        "ran a request": lambda daemon: ran(daemon, daemon.client()),
        "finished JSON lines": lambda daemon: ran(daemon, daemon.client(Codec.JSON, hello=False)),
        "was slow once": lambda daemon: caught_up(daemon, daemon.client()),
    }
    # All times are shorter than the pause below: a timer left behind would show.
    short = {"hello_s": 0.1, "stall_s": 0.15, "linger_s": 0.1}
    with fake_daemon(tmp_path, **short) as daemon, act[state](daemon):
        before = settled(lambda: switches(daemon.thread_id))
        time.sleep(0.3)
        assert switches(daemon.thread_id) == before


def ran(daemon: FakeDaemon, client: FakeClient) -> FakeClient:
    client.say(wire.Generate(id=1, prompt="count 3"))
    client.until_terminal(1)
    return client


def caught_up(daemon: FakeDaemon, client: FakeClient) -> FakeClient:
    job, _ = paused(daemon, client)
    daemon.do(job.done)
    client.until_terminal(1)
    return client


# ------------------------------------------------------------------------------------------- a process that stood still


def test_a_daemon_that_stood_still_longer_than_its_timers_drops_nobody(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, stall_s=0.3) as daemon, daemon.client() as reader:
        job, sent = paused(daemon, reader)
        daemon.do(time.sleep, LATE_S + 0.5)  # as after the machine has slept: every timer is due, nothing was read
        daemon.do(job.done)
        told = reader.until_terminal(1)
        assert isinstance(told[-1], wire.Done)
        assert sum(len(token.text) for token in told[:-1] if isinstance(token, wire.Token)) == sent * len(PIECE)


def test_a_reader_that_is_silent_while_the_daemon_runs_is_dropped_all_the_same(tmp_path: Path) -> None:
    with fake_daemon(tmp_path, stall_s=0.3) as daemon, daemon.client() as reader:
        job, _ = paused(daemon, reader)
        daemon.do(time.sleep, LATE_S + 0.5)
        daemon.until(lambda service: job.cancelled > 0)
