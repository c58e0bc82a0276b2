"""Hand-made model directories and hub caches for tests of names and of fetching."""

from __future__ import annotations

import os
from pathlib import Path


def make_model(directory: Path, nbytes: int = 10) -> Path:
    """A directory that looks like a model."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(nbytes))
    return directory


def make_repository(cache: Path, name: str, commit: str = "a" * 40, *, main: bool = True) -> Path:
    """A repository in a hub cache, its files linked to blobs as the hub does it; returns the snapshot."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file, content in (("config.json", b"{}"), ("model.safetensors", bytes(20))):
        blob = folder / "blobs" / f"{commit[:8]}-{file}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return snapshot
