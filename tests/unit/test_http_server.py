"""Who may ask over HTTP, what a request may look like, and the server as a command."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import command_line
import msgspec
import pytest
from fake_daemon import FakeDaemon, Session, accepted, done
from fake_daemon import answering as answers
from http_endpoint import TOKEN, Endpoint

from mlxbc import wire
from mlxbc.http import answering, app
from mlxbc.http.guard import hostname

KEY = {"Authorization": f"Bearer {TOKEN}"}
CHAT = b'{"messages":[{"role":"user","content":"Hi"}]}'


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """A socket's path; short, because those of temporary directories of tests are not."""
    with TemporaryDirectory(prefix="mlxbc-", dir="/tmp") as directory:
        yield Path(directory) / "s"


@pytest.fixture(scope="module")
def endpoint(path: Path) -> Iterator[Endpoint]:
    with Endpoint(path, hosts=["box.lan"], origins=["http://localhost:3000"]) as endpoint:
        yield endpoint


def ask(
    endpoint: Endpoint, method: str, where: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=10)
    try:
        connection.request(method, where, body, KEY if headers is None else headers)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def error(body: bytes) -> Any:
    return msgspec.json.decode(body)["error"]


# ------------------------------------------------------------ who


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"}]
)
def test_without_the_token_nothing_is_answered(endpoint: Endpoint, headers: dict[str, str]) -> None:
    for method, where in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")):
        status, shown, body = ask(endpoint, method, where, b"{}", headers)
        assert (status, shown["www-authenticate"]) == (401, "Bearer")
        assert error(body)["code"] == "invalid_api_key"


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:8642", "", "localhost.attacker.example"])
def test_a_name_that_is_not_ours_is_refused_whoever_knows_the_token(endpoint: Endpoint, host: str) -> None:
    status, _, body = ask(endpoint, "GET", "/v1/models", headers={**KEY, "Host": host})
    assert (status, error(body)["code"]) == (403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8642", "[::1]:8642", "box.lan"])
def test_our_own_names_and_addresses_are_fine(endpoint: Endpoint, host: str) -> None:
    assert ask(endpoint, "GET", "/nowhere", headers={**KEY, "Host": host})[0] == 404


@pytest.mark.parametrize(
    ("host", "name"), [("a:1", "a"), ("A", "a"), ("[::1]:1", "::1"), ("[::1]", "::1"), ("", ""), (":1", "")]
)
def test_a_host_is_a_name_and_perhaps_a_port(host: str, name: str) -> None:
    assert hostname(host) == name


@pytest.mark.parametrize("origin", ["http://attacker.example", "null", "http://localhost:3001"])
def test_pages_of_elsewhere_are_refused(endpoint: Endpoint, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        status, shown, _ = ask(endpoint, method, "/v1/models", headers={**KEY, "Origin": origin})
        assert status == 403
        assert "access-control-allow-origin" not in shown


def test_pages_that_were_allowed_may_ask(endpoint: Endpoint) -> None:
    origin = "http://localhost:3000"
    preflight = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, shown, _ = ask(endpoint, "OPTIONS", "/v1/chat/completions", headers=preflight)
    assert (status, shown["access-control-allow-origin"]) == (200, origin)
    status, shown, _ = ask(endpoint, "GET", "/nowhere", headers={**KEY, "Origin": origin})
    assert (status, shown["access-control-allow-origin"]) == (404, origin)


def test_without_a_token_everybody_of_this_machine_may_ask(path: Path) -> None:
    with Endpoint(path, token=None) as endpoint:
        assert ask(endpoint, "GET", "/nowhere", headers={})[0] == 404
        assert ask(endpoint, "GET", "/nowhere", headers={"Origin": "http://attacker.example"})[0] == 403


# ------------------------------------------------------------ what


def test_an_unknown_url_names_those_there_are(endpoint: Endpoint) -> None:
    for method, where in (("GET", "/v1/chat/completions"), ("POST", "/v1/embeddings")):
        status, _, body = ask(endpoint, method, where)
        assert status == 404
        assert "POST /v1/chat/completions" in error(body)["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[]", "invalid_value"),
        (b'{"messages":' * 100_000, "invalid_value"),
        (b'{"response_format":' + b'{"a":' * 100_000, "invalid_json"),
    ],
)
def test_a_body_that_is_no_request_is_told_so(endpoint: Endpoint, body: bytes, code: str) -> None:
    status, _, answer = ask(endpoint, "POST", "/v1/chat/completions", body)
    assert (status, error(answer)["code"]) == (400, code)
    assert len(answer) < 1000


def test_a_long_name_that_makes_no_sense_is_not_repeated(endpoint: Endpoint) -> None:
    status, _, answer = ask(endpoint, "POST", "/v1/completions", b'{"%b":1}' % (b"x" * 100_000))
    assert status == 400
    assert len(answer) < 1000


def test_a_body_has_a_limit(endpoint: Endpoint) -> None:
    status, _, answer = ask(endpoint, "POST", "/v1/completions", b" " * (wire.FRAME_LIMIT + 1))
    assert (status, error(answer)["code"]) == (413, "request_too_large")


def test_a_path_is_no_name_unless_it_is_that_of_a_known_model(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        known = wire.ModelEntry(name="/known", source="directory", path="/known", bytes=1)
        while True:
            request = session.receive(wire.Request)
            match request:
                case wire.Models():
                    session.send(wire.ModelList(id=request.id, models=[known]))
                case wire.Ps():
                    session.send(wire.ProcessList(id=request.id, models=[]))
                case wire.Generate():
                    session.send(accepted(request), done(request))

    with FakeDaemon(endpoint.socket, script, hang_up=True):
        for model, status in (("/known", 200), ("/etc", 404), ("~/m", 404), ("./m.gguf", 404), ("m.gguf", 404)):
            body = b'{"model":"%b","prompt":"x"}' % model.encode()
            assert ask(endpoint, "POST", "/v1/completions", body)[0] == status


def test_health_needs_no_token_but_a_daemon(endpoint: Endpoint) -> None:
    assert ask(endpoint, "GET", "/health", headers={})[0] == 503

    def script(session: Session) -> None:
        session.send(wire.Pong(id=session.receive(wire.Ping).id))

    with FakeDaemon(endpoint.socket, script):
        assert ask(endpoint, "GET", "/health", headers={})[::2] == (200, b'{"status":"ok"}')


def test_a_stream_is_events_with_a_comment_for_each_progress_of_the_prompt(endpoint: Endpoint) -> None:
    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(
            accepted(request),
            wire.Progress(id=request.id, phase="load", done=1, total=2),
            wire.Progress(id=request.id, phase="prefill", done=512, total=9000),
            wire.Token(id=request.id, text="a\nb"),
            done(request),
        )

    with FakeDaemon(endpoint.socket, script):
        status, shown, body = ask(endpoint, "POST", "/v1/completions", b'{"prompt":"x","stream":true}')
    assert (status, shown["content-type"], shown["cache-control"]) == (
        200,
        "text/event-stream; charset=utf-8",
        "no-cache",
    )
    comment, first, last, over, rest = body.decode().split("\n\n")
    assert comment == ": prompt 512 of 9000 tokens"
    assert msgspec.json.decode(first.removeprefix("data: "))["choices"][0]["text"] == "a\nb"
    assert msgspec.json.decode(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"
    assert (over, rest) == ("data: [DONE]", "")


def test_a_client_that_reads_nothing_is_given_up(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "STALL_S", 0.3)
    given_up = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request))
        for _ in range(200):
            session.send(wire.Token(id=request.id, text="x" * 100_000))
        assert session.receive(wire.Cancel).id == request.id
        given_up.set()

    body = b'{"prompt":"x","stream":true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    parts = urlsplit(endpoint.url)
    with (
        FakeDaemon(endpoint.socket, script, hang_up=True),
        socket.create_connection((parts.hostname, parts.port), timeout=10) as client,
    ):
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert given_up.wait(10)


def test_a_body_that_never_comes_is_not_waited_for(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    parts = urlsplit(endpoint.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
        client.sendall(f"{head}Content-Length: 10\r\n\r\n".encode() + b"{")
        assert b" 408 " in client.recv(100)


# ------------------------------------------------------------ the command


class Serving:
    """`mlxbc http` as a process, with a home of its own."""

    def __init__(self, home: Path, *arguments: str, **env: str) -> None:
        self._environment = {**command_line.environment(home / "s"), "HOME": str(home), **env}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxbc", "http", "--port", "0", *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.url = self.process.stdout.readline().strip()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def response(url: str, headers: dict[str, str], body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=10)) as connection:
        connection.request("GET" if body is None else "POST", parts.path, body, headers)
        with connection.getresponse() as answer:
            yield answer


def status(url: str, headers: dict[str, str]) -> int:
    with response(url, headers) as answer:
        return answer.status


def test_the_command_says_where_it_is_keeps_a_token_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    with Serving(tmp_path) as serving:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", serving.url)
        shown = command_line.run(tmp_path / "s", "http", "--show-token", env={"HOME": str(tmp_path)})
        token = shown.stdout.decode().strip()
        (kept,) = tmp_path.rglob("http-token")
        assert kept.read_text().strip() == token
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert status(f"{serving.url}/models", {}) == 401
        assert status(f"{serving.url}/models", {"Authorization": f"Bearer {token}"}) == 503
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(10) == 0
        assert serving.process.communicate()[1] == ""


def test_the_token_may_come_from_the_environment(tmp_path: Path) -> None:
    with Serving(tmp_path, MLXBC_HTTP_TOKEN="mine") as serving:
        assert status(f"{serving.url}/models", {"Authorization": "Bearer mine"}) == 503
    assert not list(tmp_path.rglob("http-token"))


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    command_line.run(tmp_path / "s", "http", "--show-token", env={"HOME": str(tmp_path)})
    (kept,) = tmp_path.rglob("http-token")
    kept.chmod(0o644)
    ended = command_line.run(tmp_path / "s", "http", "--show-token", env={"HOME": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (78, b"")
    assert b"can be read by others" in ended.stderr


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = command_line.run(tmp_path / "s", "http", "--port", port, env={"HOME": str(tmp_path)})
    assert ended.returncode == 78
    assert f"port {port}" in ended.stderr.decode()


@pytest.mark.parametrize("arguments", [("--no-token", "--host", "0.0.0.0"), ("--port", "70000")])
def test_what_makes_no_sense_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert command_line.run(tmp_path / "s", "http", *arguments).returncode == 2


def test_running_answers_finish_before_it_ends(tmp_path: Path) -> None:
    told = threading.Event()

    def script(session: Session) -> None:
        request = session.receive(wire.Generate)
        session.send(accepted(request), wire.Token(id=request.id, text="half"))
        assert told.wait(10)
        session.send(wire.Token(id=request.id, text=" whole"), done(request))

    path = Path(f"/tmp/mlxbc-{os.getpid()}-s")
    with (
        FakeDaemon(path, script),
        Serving(tmp_path, MLXBC_SOCKET=str(path), MLXBC_HTTP_TOKEN="mine") as serving,
    ):
        body = b'{"prompt":"x","stream":true}'
        with response(f"{serving.url}/completions", {"Authorization": "Bearer mine"}, body) as answer:
            assert b"half" in answer.readline()
            serving.process.send_signal(signal.SIGTERM)
            told.set()
            assert b" whole" in answer.read()
        assert serving.process.wait(10) == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_an_idle_server_sleeps(tmp_path: Path) -> None:
    def switches() -> int:
        status = Path(f"/proc/{serving.process.pid}/status").read_text()
        found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
        assert found
        return int(found[1])

    with Serving(tmp_path) as serving:
        command_line.until_asleep(serving.process.pid)
        before = switches()
        # Only time can show that nothing happens in it. Uvicorn alone would wake up three times.
        time.sleep(0.35)
        assert switches() - before <= 1


def test_an_answer_on_the_wire_is_whole(endpoint: Endpoint) -> None:
    with FakeDaemon(endpoint.socket, answers("ok"), hang_up=True):
        status, shown, body = ask(endpoint, "POST", "/v1/chat/completions", CHAT)
    assert (status, shown["content-type"]) == (200, "application/json")
    assert msgspec.json.decode(body)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
    }
