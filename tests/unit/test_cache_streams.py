"""Records of generations: whole or not there, of their own request alone, and gone when nobody will ask."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxbcd.cache import keys
from mlxbcd.cache.streams import Streams, digest

STREAM = "ab" * 16
REQUEST = digest("prompt", 7)


def test_a_record_is_found_again_by_its_stream_and_request(tmp_path: Path) -> None:
    streams = Streams(tmp_path / "streams")
    streams.save(STREAM, REQUEST, [1, 2])
    streams.save(STREAM, REQUEST, [1, 2, 3], "stop", "\n")
    record = Streams(tmp_path / "streams").load(STREAM, REQUEST)
    assert record is not None
    assert (record.tokens, record.reason, record.stop) == (keys.pack([1, 2, 3]), "stop", "\n")
    assert streams.load(STREAM, digest("another prompt", 7)) is None
    assert streams.load("cd" * 16, REQUEST) is None


def test_records_are_private(tmp_path: Path) -> None:
    streams = Streams(tmp_path / "streams")
    streams.save(STREAM, REQUEST, [1])
    (file,) = streams.path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert streams.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "x", "A" * 32, "ab" * 15])
def test_a_stream_that_is_not_ours_leads_nowhere(tmp_path: Path, name: str) -> None:
    streams = Streams(tmp_path / "streams")
    streams.save(name, REQUEST, [1])
    assert streams.load(name, REQUEST) is None
    streams.drop(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x93\x01\x02\x03"])
def test_a_damaged_record_is_none(tmp_path: Path, junk: bytes) -> None:
    streams = Streams(tmp_path)
    streams.save(STREAM, REQUEST, [1])
    (tmp_path / f"{STREAM}.stream").write_bytes(junk)
    assert streams.load(STREAM, REQUEST) is None
    (tmp_path / f"{STREAM}.stream").unlink()
    os.mkfifo(tmp_path / f"{STREAM}.stream")
    assert streams.load(STREAM, REQUEST) is None


def test_old_ones_and_leftovers_are_collected_and_clearing_takes_all(tmp_path: Path) -> None:
    streams = Streams(tmp_path)
    streams.save(STREAM, REQUEST, [1])
    streams.save("cd" * 16, REQUEST, [1])
    os.utime(tmp_path / f"{STREAM}.stream", (1e9, 1e9))
    (tmp_path / f"{'ef' * 16}.part").write_bytes(b"half")
    streams.collect()
    assert [path.stem for path in tmp_path.iterdir()] == ["cd" * 16]
    assert streams.clear() == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_logged_once_and_when_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    streams = Streams(file / "streams")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            streams.save(STREAM, REQUEST, [1])
        assert "can't be recorded (Not a directory)" in caplog.text
        file.unlink()
        for _ in range(3):
            streams.save(STREAM, REQUEST, [1])
    assert [record.message for record in caplog.records[1:]] == ["generations are recorded again"]
    assert streams.load(STREAM, REQUEST) is not None


@pytest.mark.parametrize("point", ["record", "recorded"])
def test_killed_while_it_is_replaced_a_record_is_the_old_one_or_the_new_one(tmp_path: Path, point: str) -> None:
    Streams(tmp_path).save(STREAM, REQUEST, [1])
    script = (
        "import sys; from pathlib import Path; from mlxbcd.cache.streams import Streams;"
        f"Streams(Path(sys.argv[1])).save({STREAM!r}, {REQUEST!r}, [1, 2])"
    )
    environment = {**os.environ, "MLXBC_TEST_KILL_AT": point}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, timeout=60)
    record = Streams(tmp_path).load(STREAM, REQUEST)
    assert record is not None
    assert record.tokens == keys.pack([1] if point == "record" else [1, 2])
