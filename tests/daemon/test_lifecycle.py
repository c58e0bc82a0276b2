"""From start to exit code: real daemon processes with a scripted service."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import wire
from mlxbc.framing import Codec
from mlxbcd.config.settings import Settings
from mlxbcd.config.sources import reload
from mlxbcd.serve import logs
from mlxbcd.serve.listen import AlreadyRunning, listen
from mlxbcd.serve.main import main
from mlxbcd.serve.options import Options, parse

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "protocol"))

from fake_service import PATIENCE_S, FakeClient, settled

SCRIPT = HERE / "scripted_daemon.py"


def command(path: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--socket", str(path), *arguments]


class Process:
    """A running daemon process; its log is read to the end by `ended`."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.path = path
        self.popen = subprocess.Popen(
            command(path, *arguments), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said = ""

    def logged(self, text: str) -> None:
        """Wait until the log says `text`."""
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.said += line
            if text in line:
                return
        raise AssertionError(f"never logged {text!r}:\n{self.said}")

    def client(self, codec: Codec = Codec.MSGPACK) -> FakeClient:
        client = FakeClient(self.path, codec)
        client.say(wire.Hello(proto=wire.PROTOCOL, client="test"))
        assert isinstance(client.read(), wire.Welcome)
        return client

    def ended(self) -> int:
        """The exit code, once it has ended."""
        _, rest = self.popen.communicate(timeout=PATIENCE_S)
        self.said += rest
        return self.popen.returncode


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket's path; a daemon that a failed test leaves there is killed."""
    path = tmp_path / "mlxbc" / "mlxbc.sock"
    yield path
    try:
        listen(path).close()
    except AlreadyRunning as left:
        if left.pid:
            os.kill(left.pid, signal.SIGKILL)


@contextlib.contextmanager
def process(path: Path, *arguments: str, wait_for: str = "ready after") -> Iterator[Process]:
    daemon = Process(path, *arguments)
    try:
        daemon.logged(wait_for)
        yield daemon
    finally:
        if daemon.popen.poll() is None:
            daemon.popen.kill()
        daemon.popen.communicate()


def running(client: FakeClient, request: int = 1) -> None:
    """Start a request that runs until it is released."""
    client.say(wire.Generate(id=request, prompt="wait"))
    assert client.pinged(), "the daemon has seen the request"


def refusal(client: FakeClient) -> wire.Error:
    """The first error to a request; the daemon may still accept one just after it was signalled."""
    while True:
        client.say(wire.Generate(id=1, prompt="count 0"))
        reply = client.read()
        if isinstance(reply, wire.Error):
            return reply


# ------------------------------------------------------------------------------------------------------------ stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_then_exits_0(path: Path, number: signal.Signals) -> None:
    with process(path) as daemon, daemon.client() as client, daemon.client() as other:
        running(client)
        daemon.popen.send_signal(number)
        daemon.logged("signalled to stop")
        assert refusal(other).code == "shutting_down"
        other.say(wire.Count(id=2, text="release"))
        assert isinstance(client.until_terminal(1)[-1], wire.Done)
        assert client.rest() == []
        assert daemon.ended() == 0
    assert not path.exists()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(path: Path, second: signal.Signals) -> None:
    with process(path) as daemon, daemon.client() as client:
        running(client)
        daemon.popen.send_signal(signal.SIGINT)
        daemon.logged("signalled to stop")
        daemon.popen.send_signal(second)
        (error,) = client.rest()
        assert isinstance(error, wire.Error)
        assert (error.id, error.code) == (1, "shutting_down")
        assert daemon.ended() == 0
    assert not path.exists()


def test_a_signal_is_gentle_even_if_a_client_already_asked(path: Path) -> None:
    with process(path) as daemon, daemon.client() as client, daemon.client() as other:
        running(client)
        other.say(wire.Shutdown(id=1))
        assert other.read() == wire.Bye(id=1)
        daemon.popen.send_signal(signal.SIGTERM)
        daemon.logged("signalled to stop")
        other.say(wire.Count(id=2, text="release"))
        assert isinstance(client.until_terminal(1)[-1], wire.Done)
        assert daemon.ended() == 0


def test_a_signal_waits_only_so_long(path: Path) -> None:
    with process(path, "--model", "impatient") as daemon, daemon.client() as client:
        running(client)
        daemon.popen.send_signal(signal.SIGTERM)
        (error,) = client.rest()
        assert isinstance(error, wire.Error)
        assert error.code == "shutting_down"
        assert daemon.ended() == 0
    assert "signalled again" not in daemon.said


def test_a_clients_name_cannot_forge_a_line_of_the_log(path: Path) -> None:
    with process(path) as daemon, FakeClient(path, Codec.MSGPACK) as client:
        client.say(wire.Hello(proto=wire.PROTOCOL, client="a\nINFO forged"), wire.Shutdown(id=1))
        client.rest()
        assert daemon.ended() == 0
    assert "\nINFO forged" not in daemon.said
    assert r"told to stop by 'a\nINFO forged'" in daemon.said


def test_an_idle_daemon_that_is_told_to_stop_is_gone_at_once(path: Path) -> None:
    with process(path) as daemon, daemon.client() as idle, daemon.client(Codec.JSON) as shell:
        started = time.monotonic()
        idle.say(wire.Shutdown(id=7))
        assert idle.rest() == [wire.Bye(id=7)]
        assert shell.rest() == []
        assert daemon.ended() == 0
        assert time.monotonic() - started < 5


def test_hangup_is_ignored(path: Path) -> None:
    with process(path) as daemon, daemon.client() as client:
        daemon.popen.send_signal(signal.SIGHUP)
        assert client.pinged()
        daemon.popen.send_signal(signal.SIGTERM)
        assert daemon.ended() == 0


def test_a_service_that_does_not_close_does_not_keep_the_daemon(path: Path) -> None:
    with process(path, "--model", "never closes") as daemon:
        daemon.popen.send_signal(signal.SIGTERM)
        assert daemon.ended() == 0
    assert "the service did not close within 0.2 s" in daemon.said
    assert not path.exists()


def test_a_device_fault_is_told_to_clients_and_exits_so_that_the_daemon_is_started_again(path: Path) -> None:
    with process(path) as daemon, daemon.client() as client, daemon.client() as idle:
        running(client)
        client.say(wire.Generate(id=2, prompt="fault"))
        told = [(reply.id, reply.code) for reply in client.rest() if isinstance(reply, wire.Error)]
        assert told == [(1, "device_error"), (2, "device_error"), (None, "device_error")]
        assert len(idle.rest()) == 1
        assert daemon.ended() == os.EX_SOFTWARE
    assert "the device failed: RuntimeError" in daemon.said
    assert not path.exists()


# ----------------------------------------------------------------------------------------------------------- start


def test_a_client_that_comes_while_the_daemon_starts_waits_instead_of_failing(path: Path) -> None:
    with process(path, "--model", "loads on a line", wait_for="listening on") as daemon:
        early = FakeClient(path, Codec.MSGPACK)
        early.say(wire.Hello(proto=wire.PROTOCOL))
        assert daemon.popen.stdin
        daemon.popen.stdin.write("\n")
        daemon.popen.stdin.flush()
        assert isinstance(early.read(), wire.Welcome)
        early.close()


@pytest.mark.parametrize("model", ["never loads", "ignores the end"])
def test_a_daemon_can_be_stopped_while_it_starts(path: Path, model: str) -> None:
    with process(path, "--model", model, wait_for="listening on") as daemon:
        daemon.popen.send_signal(signal.SIGTERM)
        assert daemon.ended() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("unknown", os.EX_CONFIG, "cannot serve: there is no model 'unknown': run `mlxbc pull`"),
        ("broken", os.EX_SOFTWARE, "RuntimeError: the weights are odd"),
    ],
)
def test_a_service_that_cannot_start_says_why(path: Path, model: str, code: int, said: str) -> None:
    daemon = Process(path, "--model", model)
    assert daemon.ended() == code
    assert said in daemon.said
    assert not path.exists()


def test_a_second_daemon_says_so_exits_0_and_disturbs_nobody(path: Path) -> None:
    with process(path) as daemon, daemon.client() as client:
        running(client)
        second = Process(path)
        assert second.ended() == 0
        assert second.said == f"mlxbcd: already running on {path} (pid {daemon.popen.pid})\n"
        with daemon.client() as other:
            other.say(wire.Count(id=2, text="release"))
        assert isinstance(client.until_terminal(1)[-1], wire.Done)


def test_of_daemons_that_race_one_serves_and_the_others_exit_0(path: Path) -> None:
    racers = [Process(path) for _ in range(4)]
    for racer in racers:
        racer.logged("on")
    (winner,) = [racer for racer in racers if "listening on" in racer.said]
    losers = [racer for racer in racers if racer is not winner]
    assert [racer.ended() for racer in losers] == [0, 0, 0]
    assert all("already running on" in racer.said for racer in losers)
    with winner.client() as client:
        assert client.pinged()
        client.say(wire.Shutdown(id=1))
        client.rest()
    assert winner.ended() == 0


def test_a_daemon_starts_again_after_the_last_one_was_killed(path: Path) -> None:
    with process(path) as first, first.client() as client:
        running(client)
        first.popen.kill()
        assert client.rest() == []
        assert first.ended() == -signal.SIGKILL
    assert path.exists(), "the stale socket is still there"
    with process(path) as second, second.client() as client:
        assert client.pinged()


# ------------------------------------------------------------------------------------------------------- hand-over


def test_a_new_daemon_takes_over_while_what_runs_finishes_and_no_client_is_ever_refused(path: Path) -> None:
    with process(path) as old, old.client() as busy:
        running(busy)
        with (
            process(path, "--replace", wait_for="taking over") as new,
            FakeClient(path, Codec.MSGPACK) as waiting,
        ):
            # From now on whoever connects reaches the new one, and waits.
            waiting.say(wire.Hello(proto=wire.PROTOCOL, client="test"))
            refused: wire.Reply | None = None
            while not isinstance(refused, wire.Error):
                busy.say(wire.Generate(id=2, prompt="count 0"))
                refused = busy.until_terminal(2)[-1]
            assert (refused.code, refused.retryable) == ("shutting_down", True)
            assert new.popen.poll() is None
            assert old.popen.poll() is None, "it waits for what runs"
            with FakeClient(old.path, Codec.JSON) as late:
                late.say(wire.Count(id=3, text="release"))
                # The old one can't be reached any more, so what runs there is ended by hand.
                busy.say(wire.Cancel(id=1))
                assert isinstance(busy.until_terminal(1)[-1], wire.Done), "what ran has finished"
                busy.close()
                assert old.ended() == 0
                welcome = waiting.read()
                assert isinstance(welcome, wire.Welcome)
                assert welcome.pid == new.popen.pid
                assert isinstance(late.until_terminal(3)[-1], wire.Counted)
            assert path.exists(), "the old one has not removed what is the new one's"
            new.popen.send_signal(signal.SIGTERM)
            assert new.ended() == 0
    assert not path.exists()


def test_connecting_never_fails_while_daemons_take_over_from_each_other(path: Path) -> None:
    stop = threading.Event()
    refusals: list[OSError] = []
    answers: list[int] = []

    def connect() -> None:
        while not stop.is_set():
            try:
                with FakeClient(path, Codec.MSGPACK) as client:
                    client.say(wire.Hello(proto=wire.PROTOCOL, client="test"))
                    reply = client.read()
                    # One that was being accepted when its daemon ended hears nothing, and asks again.
                    answers.extend([reply.pid] if isinstance(reply, wire.Welcome) else [])
            except OSError as error:
                refusals.append(error)

    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(process(path))]
        thread = threading.Thread(target=connect)
        thread.start()
        try:
            for _ in range(3):
                daemons.append(stack.enter_context(process(path, "--replace")))
                assert daemons[-2].ended() == 0
        finally:
            stop.set()
            thread.join()
    assert [error for error in refusals if not isinstance(error, ConnectionResetError | BrokenPipeError)] == []
    assert set(answers) == {daemon.popen.pid for daemon in daemons}


def test_without_a_daemon_to_replace_one_starts_as_usual(path: Path) -> None:
    with process(path, "--replace") as daemon, daemon.client() as client:
        assert client.pinged()


def test_a_detached_daemon_replaces_the_old_one_and_tells_its_own_id(path: Path) -> None:
    first = detached(path, wait=True)
    log = path.parent.parent / "logs" / "mlxbcd.log"
    script = DETACH.replace('wait=wait == "wait"', "wait=True, replace=True")
    start = [sys.executable, "-c", script, str(path), str(log), "wait"]
    line = command(path, "--log-file", str(log), "--replace")
    second = subprocess.run(start + line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout != first.stdout
    with FakeClient(path, Codec.MSGPACK) as client:
        client.say(wire.Hello(proto=wire.PROTOCOL))
        welcome = client.read()
        assert isinstance(welcome, wire.Welcome)
        assert welcome.pid == int(second.stdout)
    stop(path)


# ----------------------------------------------------------------------------------------------------------- quiet


def test_neither_prompts_nor_outputs_are_logged(path: Path) -> None:
    with process(path, "--log-level", "debug") as daemon, daemon.client() as client:
        for n, prompt in enumerate(["secret words", "raise secret", "raise", "refuse"]):
            client.say(wire.Generate(id=n, prompt=prompt))
        client.body(b"\x82\xa4type\xa8generate\xa6secret\xa6secret")
        client.say(wire.Generate(id=9, prompt="flood 1"), wire.Shutdown(id=10, drain=False))
        client.rest()
        assert daemon.ended() == 0
    assert "told to stop by 'test'" in daemon.said
    assert "secret" not in daemon.said
    assert "0000" not in daemon.said


@pytest.mark.skipif(sys.platform != "linux", reason="counts wake-ups as Linux shows them")
def test_a_whole_idle_process_does_not_wake_up(path: Path) -> None:
    def wakes() -> list[str]:
        threads = Path(f"/proc/{daemon.popen.pid}/task").iterdir()
        lines = [line for thread in threads for line in (thread / "status").read_text().splitlines()]
        return [line for line in lines if line.startswith("voluntary_ctxt_switches")]

    with process(path) as daemon, daemon.client() as client, daemon.client(Codec.JSON):
        client.say(wire.Generate(id=1, prompt="count 3"))
        client.until_terminal(1)
        before = settled(wakes)
        time.sleep(0.5)
        assert wakes() == before


# ------------------------------------------------------------------------------------------------------ background

DETACH = """
import sys
from pathlib import Path
from mlxbcd.serve.detach import detach
path, log, wait, *command = sys.argv[1:]
sys.exit(detach(command, Path(path), Path(log), wait=wait == "wait"))
"""


def log_of(path: Path) -> Path:
    return path.parent.parent / "logs" / "mlxbcd.log"


def detaching(path: Path, *arguments: str, wait: bool) -> list[str]:
    """The command that starts a daemon in the background as `--detach` does, with `--wait` or without."""
    start = [sys.executable, "-c", DETACH, str(path), str(log_of(path)), "wait" if wait else "don't"]
    return start + command(path, "--log-file", str(log_of(path)), *arguments)


def detached(path: Path, *arguments: str, wait: bool) -> subprocess.CompletedProcess[str]:
    """Start one."""
    line = detaching(path, *arguments, wait=wait)
    return subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def stop(path: Path) -> None:
    with FakeClient(path, Codec.JSON) as client:
        client.say(wire.Shutdown(id=1))
        client.rest()


def test_detach_and_wait_return_when_the_daemon_answers_and_print_its_id(path: Path) -> None:
    started = detached(path, wait=True)
    assert started.returncode == 0
    assert set(started.stderr.splitlines()) <= {f"mlxbcd: {getting_ready(path)}"}, "and that on a slow machine only"
    pid = int(started.stdout)
    with FakeClient(path, Codec.MSGPACK) as client:
        client.say(wire.Hello(proto=wire.PROTOCOL))
        welcome = client.read()
        assert isinstance(welcome, wire.Welcome)
        assert welcome.pid == pid
    assert os.getsid(pid) == pid, "it has left the terminal's session"
    log = log_of(path)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert f"listening on {path} (pid {pid})" in log.read_text()
    again = detached(path, wait=True)
    assert (again.returncode, again.stdout) == (0, started.stdout)
    assert again.stderr == f"mlxbcd: already running on {path} (pid {pid})\n"
    stop(path)


def getting_ready(path: Path) -> str:
    return f"the daemon is getting ready; it logs to {log_of(path)}"


def test_a_start_that_takes_long_is_told_with_where_the_log_is(path: Path) -> None:
    line = detaching(path, "--model", "never loads", wait=True)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as slow:
        assert slow.stderr
        assert slow.stderr.readline() == f"mlxbcd: {getting_ready(path)}\n"
        pid = log_of(path).read_text().partition("(pid ")[2].partition(")")[0]
        os.kill(int(pid), signal.SIGKILL)
        assert slow.wait(PATIENCE_S * 3) == 128 + signal.SIGKILL
        assert "the daemon was ended by signal 9 before it answered" in slow.stderr.read()


def test_detach_without_wait_returns_before_the_daemon_answers(path: Path) -> None:
    started = detached(path, "--model", "never loads", wait=False)
    assert started.returncode == 0
    os.kill(int(started.stdout), signal.SIGKILL)


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("unknown", os.EX_CONFIG, "there is no model 'unknown'"),
        ("broken", os.EX_SOFTWARE, "RuntimeError: the weights are odd"),
        ("killed", 9, "ended with code 9 before it answered"),
    ],
)
def test_wait_shows_the_end_of_the_log_of_a_daemon_that_died(path: Path, model: str, code: int, said: str) -> None:
    log = log_of(path)
    logs.make_private(log)
    log.write_text("an old story\n")
    failed = detached(path, "--model", model, wait=True)
    assert (failed.returncode, failed.stdout) == (code, "")
    assert said in failed.stderr
    assert "old story" not in failed.stderr


def test_concurrent_starts_all_return_the_id_of_the_one_daemon(path: Path) -> None:
    starts: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: starts.append(detached(path, wait=True))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert len({start.stdout for start in starts}) == 1
    stop(path)


# ---------------------------------------------------------------------------------------------------- command line


@given(
    line=st.lists(
        st.sampled_from(
            [
                "--socket=/tmp/with space/b.sock",
                "--model=ORG/Name",
                "--no-preload",
                "--log-level=debug",
                "--log-file=/var/log/x y.log",
                "--set=requests.queue=7",
                "--set=log.format=json",
            ]
        ),
        unique=True,
    )
)
def test_a_detached_daemon_gets_the_options_of_its_parent(line: list[str]) -> None:
    options = parse(line).options
    again = parse(options.arguments()).options
    assert (again.socket, settings_of(again)) == (options.socket, settings_of(options))
    assert options.config is not None
    assert len(options.config.flags) == len([word for word in line if not word.startswith("--socket")])


def test_settings_tell_the_option_that_gave_them_also_in_the_background_and_after_a_reload() -> None:
    line = ["--set=log.level=debug", "--model=m", "--no-preload", "--set=cache.ram=1GB", "--cache-disk=0"]
    expected = {
        "log.level": "--set log.level",
        "model": "--model",
        "preload": "--no-preload",
        "cache.ram": "--set cache.ram",
        "cache.disk": "--cache-disk",
    }
    config = parse(parse(line).options.arguments()).options.config
    assert config is not None
    for found in (config, reload(config, {}).config):
        assert {key: found.origin[key] for key in found.flags} == expected


def test_who_starts_a_daemon_hears_of_a_variable_that_is_nearly_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlxbcd.serve.main._detach", lambda options, *, wait: 0)
    monkeypatch.setenv("MLXBC_REQUEST_QUEUE", "7")
    assert main(["--detach"]) == 0
    told = "mlxbcd: nothing reads the variable MLXBC_REQUEST_QUEUE; did you mean MLXBC_REQUESTS_QUEUE?\n"
    assert capsys.readouterr().err == told


def settings_of(options: Options) -> dict[str, object]:
    return {field.name: getattr(options, field.name) for field in fields(Settings)}


def test_a_detached_daemon_reads_the_file_that_its_parent_was_given(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[requests]\nqueue = 9\n")
    options = parse(["--socket", "/run/s", "--config", str(file)]).options
    assert options.queue == parse(options.arguments()).options.queue == 9


def test_relative_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse(["--socket", "run/s", "--log-file", "../log"]).options
    assert (options.socket, options.log_file) == (tmp_path / "run/s", tmp_path.parent / "log")


def test_the_socket_is_the_users_own_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXBC_SOCKET", "/run/elsewhere.sock")
    assert parse([]).options.socket == Path("/run/elsewhere.sock")


def test_a_detached_daemon_logs_to_a_file_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--socket", "/run/s"]).options.log_file is None
    log = parse(["--socket", "/run/s", "--detach"]).options.log_file
    assert log is not None
    assert log.name == "mlxbcd.log"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--wait"], "--wait needs --detach"),
        (["--log-level", "loud"], "invalid choice: 'loud'"),
        (["--modell", "x"], "unrecognized arguments: --modell"),
        (["--set", "model"], "--set takes KEY=VALUE"),
    ],
)
def test_a_wrong_command_line_exits_2_and_says_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(arguments)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_setting_that_cannot_work_exits_78_and_says_why(
    detach: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXBC_SOCKET", "/run/" + "x" * 120)
    before = os.umask(0o022)
    try:
        assert main(detach) == os.EX_CONFIG
    finally:
        os.umask(before)
    assert "bytes, but this system allows" in capsys.readouterr().err
