"""A file of cached state is there whole or not at all, and what is not a whole one is told apart."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from cache_pieces import header_of, payload_of, whole

from mlxbcd.cache import files
from mlxbcd.cache.files import SUFFIX, Unusable, read, read_header, write

NUMBERS = 2000


def written(directory: Path, tokens: tuple[int, ...] = (1, 2, 3)) -> Path:
    name = header_of(payload_of("0" * 32, NUMBERS), tokens).name
    payload = payload_of(name, NUMBERS)
    header = header_of(payload, tokens)
    size = write(directory, header, payload, lambda: None)
    path = directory / f"{header.name}{SUFFIX}"
    assert path.stat().st_size == size
    return path


def test_what_was_written_is_read_and_takes_its_place_in_private(tmp_path: Path) -> None:
    path = written(tmp_path)
    header, payload = read(path)
    assert whole(header.name, payload)
    assert (header.tokens, header.begin) == (struct.pack("<3I", 1, 2, 3), 0)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert read_header(path)[0] == header


def test_the_payload_begins_at_a_page(tmp_path: Path) -> None:
    _, begin = read_header(written(tmp_path))
    assert begin % 4096 == 0


@pytest.mark.parametrize("where", ["magic", "length", "header", "first", "last"])
def test_a_flipped_bit_is_found(tmp_path: Path, where: str) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    _, begin = read_header(path)
    at = {"magic": 0, "length": 13, "header": 30, "first": begin, "last": len(data) - 1}[where]
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(Unusable):
        read(path)


@pytest.mark.parametrize("keep", [0, 5, 19, 40, 4096, -1])
def test_a_file_that_was_cut_short_is_found_without_reading_all_of_it(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Unusable):
        read_header(path)


def test_another_format_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "VERSION", files.VERSION - 1)
    path = written(tmp_path)
    monkeypatch.undo()
    with pytest.raises(Unusable, match="format version"):
        read_header(path)


def test_a_piece_under_another_ones_name_is_not_taken_for_it(tmp_path: Path) -> None:
    one, two = written(tmp_path, (1, 2)), written(tmp_path, (1, 3))
    one.rename(two)
    with pytest.raises(Unusable, match="name"):
        read(two)


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    path = written(tmp_path)
    target = path.rename(tmp_path / "elsewhere")
    path.symlink_to(target)
    with pytest.raises(Unusable):
        read_header(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Unusable, match="regular"):
        read_header(path)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    left = [2]

    def pace() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")

    payload = payload_of("0" * 32)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, header_of(payload, (1,)), payload, pace)
    assert list(tmp_path.iterdir()) == []
