"""Owns importing msgspec cheaply: a fifth of the command's start is a package that msgspec doesn't need here."""

from __future__ import annotations

import sys

_BACKPORTS = "typing_extensions"


def import_msgspec() -> None:
    """Import msgspec without `typing_extensions`.

    It prefers that package where one is installed, but only for what the Pythons we run on have in `typing` themselves.
    Importing it costs about 15 ms, more than all of msgspec.
    """
    if _BACKPORTS in sys.modules or "msgspec" in sys.modules:
        return
    sys.modules[_BACKPORTS] = None  # type: ignore[assignment]  # what makes an import of it fail
    try:
        import msgspec  # noqa: F401  # from now on everybody finds it
    finally:
        del sys.modules[_BACKPORTS]
