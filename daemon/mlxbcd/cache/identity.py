"""Owns what makes two states mean the same: the contents of a model's files, and everything else that decides them.

Contents are hashed, not names or dates: another file under the same name is another model. Hashing gigabytes takes
seconds, so digests are remembered together with what the file system says about a file; one that changed is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mlxbcd.cache.files import sync

_WEIGHTS: Final = (".safetensors",)
_OTHERS: Final = {"config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"}
_SLICE: Final = 1 << 22
_REMEMBERED: Final = 1024


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """What the file system says about a file without reading it."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int


class _Known(msgspec.Struct, frozen=True, array_like=True):
    signature: Signature
    digest: str


Signatures = dict[str, Signature]
"""Of a model's files, by name."""


class Changed(Exception):
    """A model's files are not those that were loaded."""


def signatures(directory: Path) -> Signatures:
    """What a model's files look like now: take it before they are loaded."""
    found = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in _WEIGHTS or path.suffix == ".tiktoken" or path.name in _OTHERS:
            with contextlib.suppress(OSError):
                seen = path.stat()
                if stat.S_ISREG(seen.st_mode):
                    found[path.name] = _signature(seen)
    return found


def identity(directory: Path, loaded: Signatures, traits: Mapping[str, object], memory: Path) -> str:
    """A name for the states of a model: the hash of its files' contents and of `traits`. Blocks for seconds.

    Args:
        loaded: the signatures of when it was loaded.
        traits: everything else that decides what a state holds, as plain values.
        memory: a file that remembers digests.

    Raises:
        Changed: the files have changed since.
        OSError: one can't be read.
    """
    known = _recall(memory)
    fresh: dict[str, _Known] = {}
    whole = hashlib.sha256()
    for name, signature in sorted(loaded.items()):
        path = directory / name
        key = str(path.resolve())
        if _signature(path.stat()) != signature:
            raise Changed(f"{name} has changed since it was loaded")
        before = known.get(key)
        if before is None or before.signature != signature:
            before = fresh[key] = _Known(signature, _digest(path))
            if _signature(path.stat()) != signature:
                raise Changed(f"{name} changes as it is read")
        whole.update(f"{name} {before.digest}\n".encode())
    for trait, value in sorted(traits.items()):
        whole.update(f"{trait}={value}\n".encode())
    if fresh:
        _remember(memory, known | fresh)
    return whole.hexdigest()[:32]


def _signature(seen: os.stat_result) -> Signature:
    return Signature(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_SLICE):
            digest.update(piece)
    return digest.hexdigest()


def _recall(memory: Path) -> dict[str, _Known]:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _Known])
    return {}


def _remember(memory: Path, known: dict[str, _Known]) -> None:
    """Best effort: what is forgotten is hashed again."""
    newest = dict(list(known.items())[-_REMEMBERED:])
    part = memory.with_name(f"{memory.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(msgspec.json.encode(newest))
        part.rename(memory)
        sync(memory.parent)
