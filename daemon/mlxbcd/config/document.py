"""Owns the documented file of settings, which `mlxbc config init` writes. Pure."""

from __future__ import annotations

from textwrap import wrap
from typing import Final

from mlxbcd.config.settings import ALIASES, DRAFTS, KEYS, Key

_WIDTH: Final = 98
_HEAD: Final = """\
# Settings of the mlxbc daemon. What is commented out is the default.
#
# An option of the daemon wins over a variable, and a variable over this file: MLXBC_LOG_LEVEL is log.level.
# `mlxbc config` shows what is in force and where it comes from; `mlxbc config reload` lets a running daemon read this
# file again. The keys marked with * are taken over then; the others at its next start.
"""
_TAIL: Final = f"""\
[{ALIASES}]
# Names of your own for models. They win over all other names. *
# fast = "smollm2"
# large = "ORG/NAME"

[{DRAFTS}]
# Models that guess ahead for others, loaded with them: a small one with the same tokens, for a large one. What is
# changed here is taken over when a model is loaded. *
# "ORG/LARGE" = "ORG/SMALL"
"""


def template() -> str:
    """A file that sets nothing and tells everything."""
    sections: dict[str, list[str]] = {}
    for key in KEYS.values():
        sections.setdefault(key.section, []).append(_entry(key))
    parts = [_HEAD]
    for section, entries in sections.items():
        head = f"[{section}]\n" if section else ""
        parts.append(head + "\n".join(entries))
    return "\n".join([*parts, _TAIL])


def _entry(key: Key) -> str:
    lines = wrap(f"{key.about} {_capital(key.kind.expects)}.{' *' if key.live else ''}", _WIDTH)
    name = key.name.rpartition(".")[2]
    return "".join(f"# {line}\n" for line in lines) + f"# {name} = {key.show(key.default)}\n"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
