"""Owns making a small file of the user's: whole, or not at all."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path


def create(path: Path, text: str) -> None:
    """Write a new file that only its owner may read, and the directories it needs.

    Raises:
        FileExistsError: it is there already; it stays as it is.
        OSError: it can't be written. Nothing is left of it, so that the next try doesn't find half a file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
