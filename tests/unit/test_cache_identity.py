"""States belong to contents: whatever changes a model's files or how its state is stored changes their name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlxbcd.cache import identity as module
from mlxbcd.cache.identity import Changed, identity, signatures


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("words")
    return directory


def name(model: Path, **traits: object) -> str:
    return identity(model, signatures(model), {"dtype": "float32", **traits}, model.parent / "digests.json")


def test_a_byte_of_the_weights_or_of_the_tokenizer_changes_the_name(model: Path) -> None:
    names = {name(model)}
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        data = bytearray((model / file).read_bytes())
        data[0] ^= 1
        (model / file).write_bytes(data)
        names.add(name(model))
    assert len(names) == 4


def test_so_does_what_the_state_is_made_of_and_nothing_else(model: Path) -> None:
    first = name(model)
    assert name(model, dtype="bfloat16") != first
    assert name(model, kv="8 bits") != first
    (model / "README.md").write_text("other words")
    assert name(model) == first


def test_the_same_contents_elsewhere_have_the_same_name(model: Path) -> None:
    first = name(model)
    moved = model.rename(model.parent / "moved")
    assert identity(moved, signatures(moved), {"dtype": "float32"}, model.parent / "digests.json") == first


def test_contents_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = name(model)

    def read(path: Path) -> str:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(module, "_digest", read)
    assert name(model) == first


def test_a_change_that_keeps_size_and_date_is_seen(model: Path) -> None:
    first = name(model)
    weights = model / "model.safetensors"
    before = weights.stat()
    weights.write_bytes(bytes(reversed(weights.read_bytes())))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert name(model) != first


def test_files_that_changed_since_they_were_loaded_have_no_name(model: Path) -> None:
    loaded = signatures(model)
    (model / "model.safetensors").write_bytes(b"other")
    with pytest.raises(Changed):
        identity(model, loaded, {}, model.parent / "digests.json")


@pytest.mark.parametrize("junk", [b"", b"{", b'{"a": 1}', b"\xff\xfe"])
def test_a_damaged_memory_is_as_good_as_none(model: Path, junk: bytes) -> None:
    first = name(model)
    (model.parent / "digests.json").write_bytes(junk)
    assert name(model) == first


def test_a_pipe_among_the_files_does_not_hold_anything_up(model: Path) -> None:
    os.mkfifo(model / "extra.safetensors")
    assert name(model)
