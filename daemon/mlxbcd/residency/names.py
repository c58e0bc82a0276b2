"""Owns what a model's name means: the embedded model, a path, an imported model, or a repository in the hub's cache.

Nothing here goes online. A name that comes over the wire is matched against what is there; it becomes part of a path
only after it has matched a pattern without separators or dots that climb.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from mlxbcd.errors import ServeError
from mlxbcd.model.size import bytes_in_memory
from mlxbcd.residency import store

Source: TypeAlias = Literal["embedded", "hub", "directory"]

EMBEDDED: Final[Mapping[str, str]] = {"smollm2": "smollm2-135m-instruct"}
"""Models that `mlxbc pull` knows by a short name, and their directories in the store."""
DEFAULT: Final = "smollm2"

_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_REPOSITORY: Final = re.compile(rf"{_PART}(?:/{_PART})?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
_SHOWN: Final = 5
"""Names an error offers."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that is on this machine.

    Attributes:
        name: what people call it; resolving it again finds the same.
        path: its directory; for a repository of the hub the snapshot, so that a later pull changes nothing under it.
    """

    name: str
    path: Path
    source: Source


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that could be loaded, as `mlxbc models` lists it.

    Attributes:
        bytes: of its weights on the disk.
        memory: about how many they take in memory; 0 where that was not asked or can't be told.
    """

    name: str
    source: Source
    path: Path
    bytes: int
    memory: int = 0


def resolve(name: str | None, aliases: Mapping[str, str] = {}) -> Resolved:
    """Find a model.

    None is the default one. Else a name is one of `aliases` (whose own name is taken as it is), the embedded model's
    short name, an absolute path to a model directory or a
    .gguf file, an imported model's name, ORG/NAME in the hub's cache, or the end of such a name if it fits only one.
    A .gguf file is imported on first use, which takes seconds: don't call this on a loop's thread.

    Raises:
        ServeError: `unknown_model`, with names that are near and what to do; `load_failed` for a GGUF file that cannot
            be imported.
    """
    if name is None:
        name = DEFAULT
    name = aliases.get(name, name)
    if not name.isprintable() or not name or len(name) > 1024:
        raise ServeError("unknown_model", f"{name[:80]!a} is no model's name")
    if name in EMBEDDED:
        path = store.models_directory() / EMBEDDED[name]
        if not store.is_model(path):
            raise ServeError("unknown_model", f"the model {name} is not here yet; run: mlxbc pull {name}")
        return Resolved(name, path, "embedded")
    if name.startswith("/"):
        return _at(Path(name))
    if not _REPOSITORY.fullmatch(name) or ".." in name:
        raise ServeError(
            "unknown_model", f"{name[:80]!r} is no model's name; a path must be absolute, a repository is ORG/NAME"
        )
    known = {found.name: found for found in _known()}
    return known.get(name) or _by_ending(name, known, aliases)


def listing(expand: bool | None = None) -> list[Entry]:
    """Every model that `resolve` finds by name: embedded, imported, then the hub's cache, each by name.

    Args:
        expand: look into the files for what the weights take in memory, as float32 or as they are; None doesn't.
    """
    return [
        Entry(found.name, found.source, found.path, _weight_bytes(found.path), _memory(found.path, expand))
        for found in _known()
    ]


def hub_cache() -> Path:
    """The hub's cache directory, by the rules of huggingface_hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def is_repository(name: str) -> bool:
    """Whether a name has the form ORG/NAME."""
    return "/" in name and ".." not in name and "--" not in name and _REPOSITORY.fullmatch(name) is not None


def _known() -> Iterator[Resolved]:
    imported = store.imported()
    short = {directory: name for name, directory in EMBEDDED.items()}
    for path in imported:
        if path.name in short:
            yield Resolved(short[path.name], path, "embedded")
    for path in imported:
        if path.name not in short:
            yield Resolved(path.name, path, "directory")
    yield from _repositories()


def _repositories() -> Iterator[Resolved]:
    try:
        folders = sorted(hub_cache().glob("models--*"))
    except OSError:
        return
    for folder in folders:
        name = folder.name.removeprefix("models--").replace("--", "/")
        snapshot = _snapshot(folder) if _REPOSITORY.fullmatch(name) else None
        if snapshot is not None:
            yield Resolved(name, snapshot, "hub")


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that `main` names, or else the newest that can be loaded."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii", errors="replace").strip()
        named = folder / "snapshots" / commit
        if _COMMIT.fullmatch(commit) and store.is_model(named):
            return named
    except OSError:
        pass
    usable = [path for path in folder.glob("snapshots/*") if store.is_model(path)]
    return max(usable, key=lambda path: (path.stat().st_mtime, path.name), default=None)


def _at(path: Path) -> Resolved:
    try:
        path = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise ServeError("unknown_model", f"there is nothing at {path}") from None
    if path.is_dir():
        if not store.is_model(path):
            raise ServeError("unknown_model", f"{path} holds no config.json with model*.safetensors beside it")
        return next(
            (found for found in _known() if found.path.resolve() == path), Resolved(str(path), path, "directory")
        )
    # Opening a pipe waits for whoever writes into it, perhaps for ever.
    if path.suffix != ".gguf" or not path.is_file():
        raise ServeError("unknown_model", f"{path} is neither a model's directory nor a .gguf file")
    target = store.import_file(path)
    return Resolved(target.name, target, "directory")


def _by_ending(name: str, known: Mapping[str, Resolved], aliases: Mapping[str, str]) -> Resolved:
    wanted = name.lower()
    fitting = [
        found
        for full, found in known.items()
        if full.lower().endswith(wanted) and (len(full) == len(wanted) or not full[-len(wanted) - 1].isalnum())
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(sorted(found.name for found in fitting)[:_SHOWN])
        raise ServeError("unknown_model", f"{name[:80]!r} fits several models: {names}; say which")
    # An alias that was asked for has led here.
    others = sorted({*known, *EMBEDDED, *aliases} - {name})
    near = difflib.get_close_matches(name, others, n=_SHOWN, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "mlxbc models lists what is here"
    pull = f"; mlxbc pull {name} fetches it" if is_repository(name) and len(name) <= 200 else ""
    raise ServeError("unknown_model", f"there is no model {name[:80]!r} here: {hint}{pull}")


def _memory(directory: Path, expand: bool | None) -> int:
    if expand is not None:
        with contextlib.suppress(ServeError):
            return bytes_in_memory(directory, expand=expand)
    return 0


def _weight_bytes(directory: Path) -> int:
    total = 0
    for path in directory.glob("model*.safetensors"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
