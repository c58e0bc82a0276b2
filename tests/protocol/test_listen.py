"""One daemon per socket path, in a directory that nobody else may enter; and who the kernel says is connected."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from fake_service import FakeService

from mlxbc.errors import ConfigError
from mlxbcd.serve.lifecycle import Lifecycle
from mlxbcd.serve.listen import AlreadyRunning, adopt, listen
from mlxbcd.serve.peer import Peer, hung_up, parse_ucred, parse_xucred, peer_of
from mlxbcd.serve.server import Server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "mlxbc.sock"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


# ------------------------------------------------------------------------------------------------------ the socket


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_socket_its_lock_and_their_directory_are_private_whatever_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with listen(path):
            assert (mode(path), mode(path.parent), mode(path.with_name("mlxbc.sock.lock"))) == (
                0o600,
                0o700,
                0o600,
            )
            assert connects(path)
            assert os.umask(umask) == umask, "the umask is restored"
    finally:
        os.umask(before)


def test_a_second_daemon_is_told_who_runs_and_disturbs_nothing(path: Path) -> None:
    with listen(path):
        inode = path.lstat().st_ino
        with pytest.raises(AlreadyRunning, match=f"already running on {path} .pid {os.getpid()}"):
            listen(path)
        assert path.lstat().st_ino == inode
        assert connects(path)


class Tidy(uvloop.Loop):
    """Removes the path of a closed server's socket unless it is told not to, as every loop does from Python 3.13 on."""

    async def create_unix_server(self, *arguments: Any, cleanup_socket: bool = True, **fields: Any) -> Any:
        return await super().create_unix_server(*arguments, cleanup_socket=cleanup_socket, **fields)


async def serve_and_stop(listening: socket.socket) -> None:
    lifecycle = Lifecycle()
    lifecycle.stop(drain=False)
    await Server(FakeService(lambda error: None), lifecycle).serve(listening)


async def serve_carelessly_and_stop(listening: socket.socket) -> None:
    server = await asyncio.get_running_loop().create_unix_server(asyncio.Protocol, sock=listening)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(("serve", "stays"), [(serve_and_stop, True), (serve_carelessly_and_stop, False)])
def test_a_managers_path_survives_the_daemons_end_whatever_the_loop_would_do_by_itself(
    tmp_path: Path, serve: Callable[[socket.socket], Coroutine[Any, Any, None]], stays: bool
) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    with adopt(listening) as listener, asyncio.Runner(loop_factory=Tidy) as runner:
        runner.run(serve(listener.socket))
    assert (tmp_path / "s").exists() is stays


def test_closing_removes_the_socket_and_frees_the_path(path: Path) -> None:
    for _ in range(2):
        listener = listen(path)
        listener.close()
        listener.close()
        assert not path.exists()
        assert not connects(path)


def test_closing_leaves_a_socket_alone_that_somebody_else_put_there(path: Path) -> None:
    with listen(path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert not connects(path)
    with listen(path):
        assert connects(path)


@pytest.mark.parametrize("kind", ["file", "directory", "link to a socket"])
def test_what_is_not_a_socket_is_never_removed(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as elsewhere:
        if kind == "file":
            path.write_text("precious")
        elif kind == "directory":
            path.mkdir()
        else:
            elsewhere.bind(str(path.with_name("other")))
            path.symlink_to("other")
        with pytest.raises(ConfigError, match="is not a socket"):
            listen(path)
    assert path.exists()


def test_a_failed_start_frees_the_lock(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(ConfigError):
        listen(path)
    path.unlink()
    with listen(path):
        assert connects(path)


def test_a_path_longer_than_the_kernel_allows_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "mlxbc.sock"
    with pytest.raises(ConfigError, match="bytes, but this system allows"):
        listen(path)
    assert not path.parent.exists()


# --------------------------------------------------------------------------------------------------- its directory


def test_a_directory_of_ours_that_others_may_enter_is_closed_to_them(tmp_path: Path) -> None:
    named, empty = tmp_path / "mlxbc", tmp_path / "anything"
    named.mkdir(mode=0o755)
    (named / "models").mkdir()
    empty.mkdir(mode=0o755)
    for directory in (named, empty):
        directory.chmod(0o755)
        with listen(directory / "mlxbc.sock"):
            assert mode(directory) == 0o700


def test_a_directory_that_others_may_enter_and_that_holds_more_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "letter").write_text("dear")
    with pytest.raises(ConfigError, match=r"others may enter .*home \(mode 0755\): run `chmod 700"):
        listen(home / "mlxbc.sock")
    assert mode(home) == 0o755
    assert not (home / "mlxbc.sock").exists()


def test_nobody_is_told_to_close_a_directory_that_is_there_for_everybody(tmp_path: Path) -> None:
    everybody = tmp_path / "tmp"
    everybody.mkdir()
    everybody.chmod(0o1777)
    (everybody / "letter").write_text("dear")
    with pytest.raises(ConfigError, match=r"mode 1777\): choose a directory of its own") as refusal:
        listen(everybody / "mlxbc.sock")
    assert "chmod" not in str(refusal.value)


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="is not a directory of user"):
        listen(tmp_path / "link" / "mlxbc.sock")


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the socket's directory"):
        listen(tmp_path / "file" / "mlxbc.sock")


def test_a_link_in_place_of_the_lock_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    target = path.with_name("victim")
    target.write_text("keep me")
    path.with_name("mlxbc.sock.lock").symlink_to("victim")
    with pytest.raises(ConfigError, match="cannot open the lock"):
        listen(path)
    assert target.read_text() == "keep me"


@pytest.mark.skipif("os.geteuid() != 0", reason="needs to give a directory away")
@pytest.mark.parametrize("whose", ["the directory", "the one above"])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, whose: str) -> None:
    directory = tmp_path / "theirs" / "mlxbc"
    directory.mkdir(parents=True, mode=0o700)
    os.chown(directory if whose == "the directory" else directory.parent, 65534, 65534)
    with pytest.raises(ConfigError, match="choose another socket path"):
        listen(directory / "mlxbc.sock")


# ----------------------------------------------------------------------------------------------------- its holder

HOLD = """
import sys
from pathlib import Path
from mlxbcd.serve.listen import AlreadyRunning, listen
try:
    with listen(Path(sys.argv[1])):
        print("listening", flush=True)
        sys.stdin.read()
except AlreadyRunning as error:
    print(error.pid, flush=True)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_of_many_processes_that_race_for_a_path_one_wins_and_the_others_say_so(path: Path) -> None:
    racers = [holder(path) for _ in range(4)]
    said = {process.pid: first_line(process) for process in racers}
    (winner,) = [pid for pid, line in said.items() if line == "listening"]
    # A loser may look before the winner has written its id.
    assert {line for pid, line in said.items() if pid != winner} <= {str(winner), "None"}
    assert connects(path)
    for process in racers:
        process.communicate("", timeout=20)
        assert process.returncode == 0
    assert not path.exists()


def test_a_daemon_that_was_killed_leaves_a_path_that_can_be_taken(path: Path) -> None:
    with holder(path) as process:
        assert first_line(process) == "listening"
        process.kill()
        process.communicate(timeout=20)
    assert path.exists(), "nobody could clean up"
    with listen(path):
        assert connects(path)


def test_a_child_process_does_not_keep_the_lock(path: Path) -> None:
    with listen(path):
        command = [sys.executable, "-c", "print('up', flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False)
        assert first_line(child) == "up"
    with listen(path):
        assert connects(path)
    child.communicate("\n", timeout=20)


def test_the_lock_is_an_ordinary_one_that_tools_can_see(path: Path) -> None:
    with listen(path), open(path.with_name("mlxbc.sock.lock")) as lock:
        with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert int(lock.read()) == os.getpid()


# ------------------------------------------------------------------------------------------------------------- peers


def test_the_kernel_tells_who_is_connected() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_of(ours) == Peer(os.geteuid(), os.getpid())


def test_linux_credentials_are_pid_uid_gid_with_unsigned_ids() -> None:
    assert parse_ucred(struct.pack("iII", 12, 2**32 - 2, 5)) == Peer(2**32 - 2, 12)
    with pytest.raises(OSError, match="in 4 bytes"):
        parse_ucred(b"\0" * 4)


@pytest.mark.parametrize("groups", [0, 16])
def test_darwin_credentials_are_version_uid_and_groups(groups: int) -> None:
    raw = struct.pack("IIh2x", 0, 501, groups) + struct.pack("I", 20) * groups
    assert parse_xucred(raw) == 501


def test_darwin_credentials_of_another_version_are_not_guessed_at() -> None:
    with pytest.raises(OSError, match="version 1"):
        parse_xucred(struct.pack("II", 1, 501))
    with pytest.raises(OSError, match="in 3 bytes"):
        parse_xucred(b"\0\0\0")


def test_on_darwin_user_and_process_are_two_questions() -> None:
    class Darwin:
        def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes:
            assert level == 0
            answer = {1: struct.pack("IIh2x16I", 0, 501, 1, *range(16)), 2: struct.pack("i", 77)}[option]
            assert buflen == len(answer)
            return answer

    assert peer_of(Darwin(), platform="darwin") == Peer(501, 77)


@pytest.mark.skipif("sys.platform != 'linux'", reason="other systems don't tell")
def test_a_peer_that_finished_writing_has_not_hung_up() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours:
        with theirs:
            assert not hung_up(ours.fileno())
            theirs.shutdown(socket.SHUT_WR)
            assert ours.recv(1) == b""
            assert not hung_up(ours.fileno())
        assert hung_up(ours.fileno())


def test_an_empty_directory_that_is_there_for_everybody_is_left_alone(tmp_path: Path) -> None:
    everybody = tmp_path / "tmp"
    everybody.mkdir()
    everybody.chmod(0o1777)
    with pytest.raises(ConfigError, match="choose a directory of its own"):
        listen(everybody / "mlxbc.sock")
    assert everybody.stat().st_mode & 0o7777 == 0o1777
