"""Names of models: they mean what is on this machine, and never lead out of the places models are kept in."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import gguf_writer as tiny
import pytest
from gguf_writer import gguf, metadata, tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_store import make_model, make_repository

from mlxbcd.errors import ServeError
from mlxbcd.residency import names, store
from mlxbcd.residency.names import Resolved, listing, resolve


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "data" / "models"


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXBC_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))


def unknown(name: str | None) -> str:
    with pytest.raises(ServeError) as caught:
        resolve(name)
    assert caught.value.code == "unknown_model"
    return caught.value.message


def test_no_name_means_the_embedded_model(models: Path) -> None:
    assert "mlxbc pull smollm2" in unknown(None)
    path = make_model(models / "smollm2-135m-instruct")
    assert resolve(None) == resolve("smollm2") == resolve("SmolLM2") == Resolved("smollm2", path, "embedded")


def test_a_half_made_model_is_none(models: Path) -> None:
    path = make_model(models / "smollm2-135m-instruct")
    (path / "model.safetensors").unlink()
    assert "mlxbc pull smollm2" in unknown("smollm2")
    assert listing() == []


def test_a_repository_means_the_snapshot_that_main_names(hub: Path) -> None:
    first = make_repository(hub, "org/Model-4bit", "1" * 40)
    assert resolve("org/Model-4bit") == Resolved("org/Model-4bit", first, "hub")
    second = make_repository(hub, "org/Model-4bit", "2" * 40)
    assert resolve("org/Model-4bit").path == second
    assert first.is_dir()


def test_without_main_the_newest_whole_snapshot_is_taken(hub: Path) -> None:
    old, new, broken = (make_repository(hub, "org/m", digit * 40, main=False) for digit in "213")
    (broken / "config.json").unlink()
    for age, snapshot in enumerate((broken, new, old)):
        os.utime(snapshot, (1e9 - age, 1e9 - age))
    assert resolve("org/m").path == new


@pytest.mark.parametrize("commit", ["../../../elsewhere", "", "main", "a" * 39, "A" * 40, "\xff" * 40])
def test_a_reference_that_is_no_commit_is_not_followed(hub: Path, tmp_path: Path, commit: str) -> None:
    make_model(tmp_path / "elsewhere")
    snapshot = make_repository(hub, "org/m")
    (hub / "models--org--m" / "refs" / "main").write_bytes(commit.encode("latin-1"))
    assert resolve("org/m").path == snapshot


def test_the_end_of_a_name_is_enough_where_it_fits_one_model(hub: Path, models: Path) -> None:
    snapshot = make_repository(hub, "mlx-community/Qwen3-0.6B-4bit")
    make_repository(hub, "mlx-community/Qwen3-4B-4bit")
    make_model(models / "mine-q8-0123456789ab")
    for name in ("Qwen3-0.6B-4bit", "qwen3-0.6b-4bit", "0.6B-4bit"):
        assert resolve(name) == Resolved("mlx-community/Qwen3-0.6B-4bit", snapshot, "hub")
    assert resolve("0123456789ab").name == "mine-q8-0123456789ab"
    both = unknown("4bit")
    assert "Qwen3-0.6B-4bit" in both
    assert "Qwen3-4B-4bit" in both
    unknown("wen3-0.6B-4bit")  # ends there, but in the middle of a word


def test_an_alias_that_leads_nowhere_is_not_told_to_lead_there(hub: Path) -> None:
    for aliases in ({"loop": "loop"}, {"b": "a", "a": "b"}):
        with pytest.raises(ServeError) as caught:
            resolve(next(iter(aliases)), aliases)
        assert not any(f"did you mean {alias}?" in caught.value.message for alias in aliases)


def test_an_unknown_name_gets_near_ones_and_a_way_to_fetch_it(hub: Path) -> None:
    make_repository(hub, "mlx-community/Qwen3-0.6B-4bit")
    assert "did you mean mlx-community/Qwen3-0.6B-4bit?" in unknown("mlx-community/Qwen3-0.6B-8bit")
    assert "mlxbc pull someone/else fetches it" in unknown("someone/else")
    assert "mlxbc models" in unknown("zzz")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../data",
        "./model",
        "~/model",
        "a/../b",
        "a/b/c",
        "a//b",
        "org/",
        "/org/m/../../x",
        "org/.hidden",
        "-rf",
        "a\\b",
        "a\nb",
        "a\0b",
        "a\u202eb",
        "m\u043edel",
        "x" * 2000,
    ],
)
def test_what_cannot_be_a_name_is_refused(models: Path, hub: Path, name: str) -> None:
    make_model(models / "..hidden")
    make_repository(hub, "org/m")
    assert len(unknown(name)) < 400


@given(name=st.one_of(st.text(max_size=20), st.text(st.sampled_from("abm/.-_~ "), max_size=12)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_no_name_leads_out_of_the_places_of_models(tmp_path: Path, name: str) -> None:
    kept = tmp_path / "data" / "models" / "a-b"
    if not kept.exists():
        make_model(kept)
        make_model(tmp_path / "a")
        make_model(tmp_path / "data" / "a")
    try:
        found = resolve(name)
    except ServeError as error:
        assert error.code == "unknown_model"  # noqa: PT017  # or it is found
    else:
        assert found.path == kept


def test_an_absolute_path_means_the_directory_there(tmp_path: Path) -> None:
    path = make_model(tmp_path / "somewhere" / "model")
    assert resolve(str(path)) == Resolved(str(path), path, "directory")
    (tmp_path / "link").symlink_to(path)
    assert resolve(str(tmp_path / "link")).path == path
    assert resolve(f"{tmp_path}/somewhere/../link").path == path


def test_the_path_of_a_known_model_is_that_model(models: Path, hub: Path) -> None:
    embedded, snapshot = make_model(models / "smollm2-135m-instruct"), make_repository(hub, "org/m")
    assert resolve(str(embedded)) == resolve("smollm2")
    assert resolve(str(snapshot)) == resolve("org/m")


def test_a_path_without_a_model_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "nothing at" in unknown(str(tmp_path / "none"))
    assert "nothing at" in unknown(str(tmp_path / "loop"))
    assert "no config.json" in unknown(str(tmp_path / "empty"))
    assert "neither" in unknown(str(tmp_path / "file.bin"))


def test_a_gguf_file_is_imported_once_and_then_known_by_name(tmp_path: Path, models: Path) -> None:
    source = tiny.write(tmp_path / "My model (v2).gguf", gguf(metadata(), tensors(tiny.F16)))
    first = resolve(str(source))
    assert first.source == "directory"
    assert first.path.parent == models
    assert first.name.startswith("My-model-v2-")
    made = (first.path / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(source)) == resolve(first.name) == resolve(str(first.path)) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made


def test_a_gguf_file_with_another_content_is_another_model(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "m.gguf", gguf(metadata(), tensors(tiny.F16)))
    first = resolve(str(source))
    tiny.write(source, gguf(metadata(llama__context_length=99), tensors(tiny.F16)))
    os.utime(source, (1, 1))
    assert resolve(str(source)).path != first.path
    assert first.path.is_dir()


def test_a_gguf_file_that_cannot_be_imported_fails_to_load(tmp_path: Path, models: Path) -> None:
    source = tiny.write(tmp_path / "m.gguf", b"GGUF")
    with pytest.raises(ServeError, match="truncated") as caught:
        resolve(str(source))
    assert caught.value.code == "load_failed"
    assert [path.name for path in models.iterdir()] == [".lock"]


def test_a_pipe_is_no_model_and_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "neither" in unknown(str(tmp_path / "pipe.gguf"))
    path = make_model(tmp_path / "model")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert "holds no" in unknown(str(path))


def test_one_import_at_a_time_and_what_a_killed_one_left_is_removed(tmp_path: Path, models: Path) -> None:
    (models / ".partial-left").mkdir(parents=True)
    (models / ".partial-left" / "model.safetensors").touch()
    (models / ".mine").mkdir()
    source = tiny.write(tmp_path / "m.gguf", gguf(metadata(), tensors(tiny.F16)))
    found: list[Resolved] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(str(source)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 4
    assert sorted(path.name for path in models.iterdir()) == [".lock", ".mine", found[0].name]


def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLXBC_DATA", str(tmp_path / "file"))
    source = tiny.write(tmp_path / "m.gguf", gguf(metadata(), tensors(tiny.F16)))
    with pytest.raises(ServeError, match="cannot be written"):
        resolve(str(source))
    assert listing() == []


def test_the_listing_has_every_model_that_has_a_name(models: Path, hub: Path) -> None:
    make_model(models / "other", 7)
    make_model(models / "smollm2-135m-instruct", 5)
    make_model(models / ".partial-x")
    make_repository(hub, "org/b")
    make_repository(hub, "org/a")
    make_repository(hub, "gpt2")
    (hub / "models--org--empty" / "snapshots").mkdir(parents=True)
    (hub / "datasets--org--d" / "snapshots").mkdir(parents=True)
    (hub / "models--..--etc" / "snapshots").mkdir(parents=True)
    entries = listing()
    assert [(entry.name, entry.source, entry.bytes) for entry in entries] == [
        ("smollm2", "embedded", 5),
        ("other", "directory", 7),
        ("gpt2", "hub", 20),
        ("org/a", "hub", 20),
        ("org/b", "hub", 20),
    ]
    assert all(resolve(entry.name).path == entry.path for entry in entries)


def test_the_hub_cache_is_where_the_hub_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.hub_cache() == tmp_path / "hub"
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert names.hub_cache() == tmp_path / "hf" / "hub"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert names.hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert names.hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_the_store_lies_in_the_data_directory(models: Path) -> None:
    assert store.models_directory() == models
