"""The SSD tier: what a restart finds, what is removed, what a full disk does, and when it writes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cache_pieces import SPACE, cache_at, header_of, opened, payload_of, put, whole

from mlxbcd.cache import disk, files, keys
from mlxbcd.cache.disk import Directory, Taken
from mlxbcd.cache.files import SUFFIX, Header
from mlxbcd.cache.payload import Payload
from mlxbcd.cache.service import PrefixCache, Space
from mlxbcd.cache.tier import Tier
from mlxbcd.cache.writer import Pace, Writer

SMALL = 2000


def tier_of(cache: PrefixCache) -> Tier:
    assert cache.tier is not None
    return cache.tier


def settled(cache: PrefixCache) -> None:
    assert tier_of(cache).writer.settle(30)


def space(cache: PrefixCache) -> Space:
    return cache.space(SPACE, trimmable=True)


def found(cache: PrefixCache, ids: list[int]) -> int:
    """Tokens of a prompt that are found in RAM and on the disk."""
    return space(cache).explain(ids).disk


# ------------------------------------------------------------------------------------------------ restarts


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3, 4, 5, 6], SMALL)
        put(cache, [1, 2, 3, 4, 7], SMALL)
    with cache_at(tmp_path) as cache:
        assert (found(cache, [1, 2, 3, 4, 5, 6, 0]), found(cache, [1, 2, 3, 4, 7, 0])) == (6, 5)
        assert cache.index.ram.bytes == 0
        assert cache.index.disk.bytes == sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}"))
        lease = space(cache).fetch([1, 2, 3, 4, 5, 6, 0], lambda begin, end, seconds: (begin, end) == (0, 6))
        assert all(whole(node.id, node.payload) for node in lease.match.node.path)
        assert space(cache).explain([1, 2, 3, 4, 5, 6, 0]).ram == 6
        lease.release()


def test_the_directory_is_private_and_marked_as_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache"
    with cache_at(path) as cache:
        put(cache, [1, 2, 3], SMALL)
        settled(cache)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 for file in path.glob(f"*{SUFFIX}"))
    assert (path / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_time_machine_is_asked_to_leave_it_out_on_a_mac_alone(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    for platform in ("darwin", "linux"):
        disk.leave_out_of_backups(tmp_path, platform, lambda command, **_: asked.append(command))
    assert asked == [["/usr/bin/tmutil", "addexclusion", str(tmp_path)]]


def test_a_second_daemon_does_not_get_the_directory_of_one_that_runs(tmp_path: Path) -> None:
    with cache_at(tmp_path), pytest.raises(Taken):
        Directory(tmp_path)
    Directory(tmp_path).close()


def test_what_is_no_piece_is_said_once_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cache_at(tmp_path) as cache:
        for start in range(5):
            put(cache, [start, 1, 2, 3, 4, 5], SMALL)
    headers = {path: files.read_header(path)[0] for path in sorted(tmp_path.glob(f"*{SUFFIX}"))}
    cut = next(path for path, header in headers.items() if not header.begin)
    damaged, old = [path for path, header in headers.items() if header.begin and header.parent != cut.stem][:2]
    cut.write_bytes(cut.read_bytes()[:4000])
    data = bytearray(damaged.read_bytes())
    data[20] ^= 1
    damaged.write_bytes(data)
    data = bytearray(old.read_bytes())
    data[8] += 1  # the version
    old.write_bytes(data)
    odd = os.fsencode(tmp_path) + b"/\xff\xfe" + SUFFIX.encode()
    os.close(os.open(odd, os.O_CREAT))
    (tmp_path / f"mine{SUFFIX}").mkdir()
    (tmp_path / f"{'0' * 32}{SUFFIX}").write_bytes(b"x" * 9000)
    (tmp_path / f"{'1' * 32}.part").write_bytes(b"x" * 9000)
    (tmp_path / f"{'2' * 32}{SUFFIX}").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / f"{'3' * 32}{SUFFIX}")
    with caplog.at_level(logging.WARNING), cache_at(tmp_path) as cache:
        assert len(caplog.records) == 1
        assert "9 files" in caplog.text, "eight odd ones, and what followed the one that was cut short"
        caplog.text.encode()
        assert (tmp_path / f"mine{SUFFIX}").is_dir(), "whatever that is, it stays"
        left = {path for path in tmp_path.iterdir() if path.name not in ("lock", "CACHEDIR.TAG", f"mine{SUFFIX}")}
        assert len(left) == len(cache.index.nodes) == 6
    caplog.clear()
    with caplog.at_level(logging.WARNING), cache_at(tmp_path):
        assert caplog.records == []
    assert Path("/etc/passwd").exists()


def test_a_flipped_byte_is_found_when_it_is_read_and_never_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cache_at(tmp_path) as cache:
        path = put(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9], SMALL)
        settled(cache)
        damaged = tmp_path / f"{path[1].id}{SUFFIX}"
    data = bytearray(damaged.read_bytes())
    data[-40] ^= 1
    damaged.write_bytes(data)
    with cache_at(tmp_path) as cache, caplog.at_level(logging.WARNING):
        ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
        assert found(cache, ids) == 9
        lease = space(cache).fetch(ids, lambda *_: True)
        assert lease.length == 4, "what comes before the damage"
        lease.release()
        assert sum("checksum" in record.message for record in caplog.records) == 1
        settled(cache)
        assert found(cache, ids) == 4
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1
        put(cache, ids[:9], SMALL)
        settled(cache)
        assert found(cache, ids) == 9, "it heals when the state comes by again"
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 3


def test_how_long_ago_a_piece_was_wanted_survives_a_restart(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        for start in (1, 2, 3):
            put(cache, [start, 9, 9], SMALL)
        settled(cache)
        for path in tmp_path.glob(f"*{SUFFIX}"):
            os.utime(path, (1e9, 1e9))
        lease = space(cache).take([2, 9, 9, 9])
        lease.release()
        settled(cache)
        size = cache.index.disk.bytes // 3
    with cache_at(tmp_path, disk=2 * size - 1) as cache:
        assert [found(cache, [start, 9, 9, 9]) for start in (1, 2, 3)] == [0, 3, 0]
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


# ------------------------------------------------------------------------------------------------ room


def test_the_disk_never_holds_more_than_its_cap(tmp_path: Path) -> None:
    cap = 150_000
    with cache_at(tmp_path, disk=cap) as cache:
        for start in range(20):
            put(cache, [start, 2, 3], SMALL)
            settled(cache)
            assert sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")) <= cap
        assert found(cache, [19, 2, 3, 4]) == 3
        assert 5 <= cache.index.disk.nodes < 20
    with cache_at(tmp_path, disk=cap // 3) as cache:
        assert sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")) <= cap // 3
        assert found(cache, [19, 2, 3, 4]) == 3, "the newest stay"


def test_ram_never_holds_more_than_its_cap_and_what_was_dropped_comes_back(tmp_path: Path) -> None:
    cap = 100_000
    with cache_at(tmp_path, ram=cap) as cache:
        for start in range(20):
            put(cache, [start, 2, 3], SMALL)
            settled(cache)
            assert cache.index.ram.bytes <= cap
        explained = space(cache).explain([0, 2, 3, 4])
        assert (explained.ram, explained.disk) == (0, 3)
        lease = space(cache).fetch([0, 2, 3, 4], lambda *_: True)
        assert (lease.length, cache.index.ram.bytes <= cap) == (3, True)
        lease.release()


def test_what_is_being_read_is_counted_before_it_is_there(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        for start in (1, 2):
            put(cache, [start, 2, 3], SMALL)
        settled(cache)
        size = cache.index.ram.bytes // 2
    with cache_at(tmp_path, ram=size + size // 2) as cache, ThreadPoolExecutor(1) as thread:
        inside, go_on = threading.Event(), threading.Event()
        directory = tier_of(cache).directory
        before = directory.get

        def slow(name: str) -> Payload:
            inside.set()
            assert go_on.wait(30)
            return before(name)

        directory.get = slow
        first = thread.submit(space(cache).fetch, [1, 2, 3, 4], lambda *_: True)
        assert inside.wait(30)
        second = space(cache).fetch([2, 2, 3, 4], lambda *_: True)
        go_on.set()
        assert (first.result(30).length, second.length) == (3, 0)
        assert cache.index.ram.bytes == size
        first.result().release()
        second.release()
        directory.get = before
        third = space(cache).fetch([2, 2, 3, 4], lambda *_: True)
        assert third.length == 3, "the room is free again"
        third.release()


def test_a_process_short_of_files_leaves_those_it_cannot_open_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(path: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3], SMALL)
        settled(cache)
    with cache_at(tmp_path) as cache:
        with monkeypatch.context() as scarce:
            scarce.setattr(files, "_open_regular", short)
            lease = space(cache).fetch([1, 2, 3, 4], lambda *_: True)
            lease.release()
            assert (lease.length, cache.leases) == (0, 0)
        lease = space(cache).fetch([1, 2, 3, 4], lambda *_: True)
        lease.release()
        assert lease.length == 3
    with monkeypatch.context() as scarce:
        scarce.setattr(files, "_open_regular", short)
        with cache_at(tmp_path) as cache:
            assert cache.index.nodes == {}
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


def test_a_read_that_fails_in_an_unknown_way_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Payload:
        raise MemoryError

    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3], SMALL)
        settled(cache)
        cache.shed(1 << 30)
        monkeypatch.setattr(tier_of(cache).directory, "get", fails)
        with pytest.raises(MemoryError):
            space(cache).fetch([1, 2, 3, 4], lambda *_: True)
        assert (cache.leases, cache._promised) == (0, 0)
        assert not any(node.leases for node in cache.index.nodes.values())


def test_what_is_leased_is_not_dropped_however_little_room_there_is(tmp_path: Path) -> None:
    with cache_at(tmp_path, ram=30_000) as cache:
        put(cache, [1, 2, 3], SMALL)
        settled(cache)
        lease = space(cache).take([1, 2, 3, 4])
        for start in range(10, 20):
            put(cache, [start, 2, 3], SMALL)
        settled(cache)
        assert lease.match.node.ram
        fetched = space(cache).fetch([10, 2, 3, 4], lambda *_: True)
        lease.release()
        fetched.release()
        assert cache.shed(1 << 30) > 0
        assert (cache.index.ram.bytes, cache.leases) == (0, 0)


def test_a_disk_that_refuses_is_left_alone_and_nothing_else_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with cache_at(tmp_path) as cache, caplog.at_level(logging.INFO):
        monkeypatch.setattr(files, "_write_all", full)
        for start in range(5):
            put(cache, [start, 2, 3], SMALL)
            settled(cache)
        assert found(cache, [4, 2, 3, 4]) == 3, "RAM serves on"
        assert (tier_of(cache).trouble, cache.index.disk.nodes) == ("No space left on device", 0)
        assert tier_of(cache).failed == 1, "it is not tried again and again"
        assert len(caplog.records) == 1
        assert list(tmp_path.glob("*.part")) == []
        monkeypatch.undo()
        tier_of(cache)._refused_at -= 61
        put(cache, [4, 2, 3], SMALL)
        settled(cache)
        assert (tier_of(cache).trouble, cache.index.disk.nodes) == ("", 1), "after a minute it is tried again"
        assert [record.message for record in caplog.records[1:]] == ["the cache directory can be written again"]


@pytest.mark.parametrize("first", ["written", "read"])
def test_a_directory_that_was_removed_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    path = tmp_path / "states"
    with cache_at(path) as cache, caplog.at_level(logging.WARNING):
        for start in (1, 2, 3):
            put(cache, [start, 2, 3, 4, 5], SMALL)
        settled(cache)
        cache.shed(1 << 30)
        shutil.rmtree(path)
        if first == "read":
            lease = space(cache).fetch([1, 2, 3, 4, 5, 6], lambda *_: True)
            assert lease.length == 0
            lease.release()
            settled(cache)
            assert found(cache, [2, 2, 3, 4, 5, 6]) == 0, "nothing of it is looked for again"
        put(cache, [9, 2, 3, 4, 5], SMALL)
        settled(cache)
        assert (len(caplog.records), tier_of(cache).trouble) == (1, "")
        assert "removed or replaced" in caplog.text
        with pytest.raises(Taken):
            Directory(path)
        assert cache.leases == 0
        put(cache, [9, 2, 3, 4, 5], SMALL)
        settled(cache)
    with cache_at(path) as cache:
        assert [found(cache, [start, 2, 3, 4, 5, 6]) for start in (1, 9)] == [0, 5]


def test_a_directory_that_was_moved_away_and_comes_back_is_taken_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, away = tmp_path / "states", tmp_path / "away"
    with cache_at(path) as cache, caplog.at_level(logging.WARNING):
        put(cache, [1, 2, 3, 4, 5], SMALL)
        settled(cache)
        path.rename(away)
        path.write_text("no directory")
        for start in range(5, 9):
            put(cache, [start, 2, 3], SMALL)
            settled(cache)
        assert (tier_of(cache).trouble, len(caplog.records)) == ("File exists", 1)
        path.unlink()
        path.mkdir()
        other = Directory(path)
        tier_of(cache)._refused_at -= 61
        put(cache, [5, 2, 3], SMALL)
        settled(cache)
        assert "another daemon" in tier_of(cache).trouble
        assert list(path.glob(f"*{SUFFIX}")) == [], "it is another daemon's now"
        other.close()
        shutil.rmtree(path)
        away.rename(path)
        cache.shed(1 << 30)
        tier_of(cache)._refused_at -= 61
        put(cache, [6, 2, 3], SMALL)
        settled(cache)
        put(cache, [6, 2, 3], SMALL)
        settled(cache)
        assert tier_of(cache).trouble == ""
        assert [found(cache, [*ids, 0]) for ids in ([1, 2, 3, 4, 5], [6, 2, 3])] == [5, 3]
        files_there = sum(piece.stat().st_size for piece in path.glob(f"*{SUFFIX}"))
        assert cache.index.disk.bytes == files_there


def test_a_disk_that_was_slow_once_is_tried_again(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3, 4, 5, 6], SMALL)
    with cache_at(tmp_path) as cache:
        rate = tier_of(cache).rate
        rate.saw(1000, 1e-3)
        rate.saw(1000, 3600.0)
        assert rate.seconds(1000) == pytest.approx(1.6e-3), "the machine slept"
        rate.saw(1000, 3600.0)

        def worth(begin: int, end: int, seconds: float) -> bool:
            return seconds < 1e-2

        lengths = []
        for _ in range(20):
            lease = space(cache).fetch([1, 2, 3, 4, 5, 6, 7], worth)
            lengths.append(lease.length)
            lease.release()
        assert (lengths[0], lengths[-1]) == (0, 6)


def test_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    with cache_at(tmp_path, floor=1 << 60) as cache:
        put(cache, [1, 2, 3], SMALL)
        settled(cache)
        assert "stay free" in tier_of(cache).trouble
        assert list(tmp_path.glob(f"*{SUFFIX}")) == []


def test_a_restore_that_is_slower_than_processing_is_not_used(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3, 4, 5, 6], SMALL)
    with cache_at(tmp_path) as cache:
        tier_of(cache).rate.saw(1000, 2.0)
        asked: list[tuple[int, int, float]] = []

        def worth(begin: int, end: int, seconds: float) -> bool:
            asked.append((begin, end, seconds))
            return False

        lease = space(cache).fetch([1, 2, 3, 4, 5, 6, 7], worth)
        lease.release()
        assert lease.length == 0
        ((begin, end, seconds),) = asked
        assert (begin, end) == (0, 6)
        assert seconds > 20


def test_clearing_leaves_nothing_but_what_is_in_use_and_that_only_until_it_is_not(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3, 4, 5], SMALL)
        put(cache, [7, 2, 3, 4, 5], SMALL)
        settled(cache)
        lease = space(cache).take([1, 2, 3, 4, 5, 6])
        assert cache.clear() > 0
        assert list(tmp_path.glob(f"*{SUFFIX}")) == []
        assert {node.id for node in cache.index.nodes.values()} == {node.id for node in lease.match.node.path}
        lease.release()
        assert cache.index.nodes == {}
        put(cache, [7, 2, 3], SMALL)
        assert found(cache, [7, 2, 3, 4]) == 3


def test_what_is_being_written_while_the_cache_is_cleared_does_not_stay(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        inside, go_on = threading.Event(), threading.Event()
        directory = tier_of(cache).directory
        before = directory.put

        def slow(header: Header, payload: Payload, pace: Callable[[], None]) -> int:
            size = before(header, payload, pace)
            inside.set()
            assert go_on.wait(30)
            return size

        directory.put = slow
        put(cache, [1, 2, 3], SMALL)
        assert inside.wait(30)
        cache.clear()
        go_on.set()
        settled(cache)
        assert list(tmp_path.glob(f"*{SUFFIX}")) == []
        assert cache.index.nodes == {}


# ------------------------------------------------------------------------------------------------ the writer


def test_nothing_is_written_while_paused_and_all_of_it_afterwards(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        cache.set_pace(Pace.PAUSED)
        put(cache, [1, 2, 3, 4, 5], SMALL)
        assert not tier_of(cache).writer.settle(0.1)
        assert list(tmp_path.glob(f"*{SUFFIX}")) == []
        cache.set_pace(Pace.FULL)
        settled(cache)
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 2


def test_closing_writes_what_is_queued_whatever_the_pace(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.set_pace(Pace.PAUSED)
    put(cache, [1, 2, 3, 4, 5], SMALL)
    cache.close(30)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 2


def test_closing_without_patience_leaves_whole_pieces_or_none(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    cache.set_pace(Pace.PAUSED)
    put(cache, [1, 2, 3, 4, 5], SMALL)
    cache.close(0)
    with cache_at(tmp_path) as again:
        assert all(whole(node.id, tier_of(again).load(node)) for node in again.index.nodes.values())


def test_slow_writing_takes_a_small_share_of_the_time() -> None:
    writer = Writer()
    times: list[tuple[float, float]] = []

    def job() -> None:
        writer.breathe()
        for _ in range(4):
            began = time.monotonic()
            while time.monotonic() < began + 0.005:
                pass
            worked = time.monotonic() - began
            before = time.monotonic()
            writer.breathe()
            times.append((worked, time.monotonic() - before))

    writer.set_pace(Pace.SLOW)
    writer.submit(job)
    assert writer.settle(30)
    writer.close(1)
    worked, rested = (sum(each) for each in zip(*times, strict=True))
    assert worked / (worked + rested) < 0.015


def test_a_job_that_fails_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    done = threading.Event()
    writer.submit(lambda: 1 // 0)
    writer.submit(done.set)
    assert done.wait(10)
    writer.close(1)
    assert "ZeroDivisionError" in caplog.text


def test_parents_are_written_before_what_follows_them(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        order: list[int] = []
        directory = tier_of(cache).directory
        before = directory.put

        def noted(header: Header, payload: Payload, pace: Callable[[], None]) -> int:
            order.append(header.begin)
            return before(header, payload, pace)

        directory.put = noted
        put(cache, list(range(20)), SMALL)
        settled(cache)
        assert order == sorted(order) == [0, 4, 8, 12, 16]


def test_a_piece_that_a_longer_one_replaces_while_it_is_written_does_not_stay(tmp_path: Path) -> None:
    with cache_at(tmp_path) as cache:
        inside, go_on = threading.Event(), threading.Event()
        directory = tier_of(cache).directory
        before = directory.put

        def slow(header: Header, payload: Payload, pace: Callable[[], None]) -> int:
            inside.set()
            assert go_on.wait(30)
            return before(header, payload, pace)

        directory.put = slow
        put(cache, [1, 2], SMALL)
        assert inside.wait(30)
        put(cache, [1, 2, 3], SMALL)
        go_on.set()
        settled(cache)
        assert [node.end for node in cache.index.nodes.values()] == [3]
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


def test_a_piece_without_what_comes_before_it_is_removed(tmp_path: Path) -> None:
    payload = payload_of("0" * 32, SMALL)
    directory = Directory(tmp_path)
    directory.put(header_of(payload, (5, 6), parent=keys.block_id("00", b"1234"), begin=1), payload, lambda: None)
    assert directory.scan() == []
    assert list(tmp_path.glob(f"*{SUFFIX}")) == []
    directory.close()


def test_whole_pieces_that_are_cut_otherwise_are_removed_and_the_others_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cache_at(tmp_path) as cache:
        put(cache, [1, 2, 3], SMALL)
    payload = payload_of("0" * 32, SMALL)
    directory = Directory(tmp_path)
    longer = header_of(payload, (7, 2, 3, 4, 5, 6))
    directory.put(longer, payload, lambda: None)
    directory.put(header_of(payload, (8, 9), parent=longer.name, begin=6), payload, lambda: None)
    directory.close()
    with cache_at(tmp_path) as cache:
        assert found(cache, [1, 2, 3, 4]) == 3
        assert len(cache.index.nodes) == 1
    with cache_at(tmp_path):
        assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1
    assert len([record for record in caplog.records if "don't fit" in record.message]) == 1
