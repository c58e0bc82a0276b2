"""Owns examining the models: the default one is there and whole, and the places they come from can be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mlxbc import paths
from mlxbc.errors import ConfigError
from mlxbcd.doctor.findings import Finding, fault, make_usable, ok
from mlxbcd.doctor.patient import Patient
from mlxbcd.engine.budget import limits
from mlxbcd.errors import ServeError
from mlxbcd.model import safetensors
from mlxbcd.model.size import bytes_in_memory
from mlxbcd.residency import drafting
from mlxbcd.residency.names import hub_cache, resolve
from mlxbcd.residency.store import check_files

_LEAST_FREE = 1 << 30
"""Bytes that a disk should have left, for logs and caches."""


def models(patient: Patient) -> Iterator[Finding]:
    """The default model, and where models are."""
    yield from _places()
    try:
        settings = patient.config().settings
    except ConfigError:
        return
    try:
        found = resolve(settings.model, settings.aliases)
    except ServeError as error:
        yield fault("models", error.message, f"mlxbc pull {settings.model or 'smollm2'}")
        return
    damaged = _damage(found.path)
    if damaged:
        again = "fetch or export it again" if found.source == "directory" else f"mlxbc pull {found.name}"
        text = f"the default model {found.name} is damaged: {damaged}"
        yield fault("models", text, f"rm -r {found.path}, then {again}")
        return
    try:
        draft = drafting.chosen(found, settings.drafts, settings.aliases)
        drafting.words(found, draft)
    except ServeError as error:
        text = f"{found.name} can't be loaded with the model that is to draft for it: {error.message}"
        yield fault("models", text, "correct the table drafts in the settings")
        return
    # On Linux the CPU computes, where everything becomes float32.
    expand = patient.platform.startswith("linux")
    needed = sum(bytes_in_memory(one.path, expand=expand) for one in (found, draft) if one is not None)
    allowed = limits(patient.machine.memory.total(), wanted=settings.memory_limit, cache=settings.memory_cache)
    takes = f"{found.name} takes {needed / 1e9:.1f} GB in memory"
    if needed > allowed.budget:
        yield fault(
            "models",
            f"the default model {takes}, and {allowed.budget / 1e9:.1f} GB are allowed",
            "take a smaller or more strongly quantised model, or raise memory.limit",
        )
    else:
        yield ok("models", takes)


def _places() -> Iterator[Finding]:
    for what, directory in (
        ("the directory of models", paths.data_dir()),
        ("the hub's cache", hub_cache()),
        ("the cache", paths.cache_dir()),
    ):
        at = next((path for path in (directory, *directory.parents) if path.exists()), None)
        if at is None:
            continue
        if not os.access(at, os.R_OK | os.X_OK | (0 if what == "the hub's cache" else os.W_OK)):
            yield fault("models", f"{what} ({at}) can't be used by you", make_usable(directory, at))
            continue
        disk = os.statvfs(at)
        if disk.f_bavail * disk.f_frsize < _LEAST_FREE:
            free = disk.f_bavail * disk.f_frsize / 1e6
            yield fault("models", f"the disk of {what} ({at}) has {free:.0f} MB left", "free some space; see df -h")


def _damage(directory: Path) -> str:
    """What is wrong with a model's files; empty if nothing is."""
    try:
        check_files(directory)
        for file in directory.glob("model*.safetensors"):
            safetensors.data_bytes(file)
    except ServeError as error:
        return error.message
    if not (directory / "tokenizer.json").is_file():
        return "there is no tokenizer.json in it"
    return ""
