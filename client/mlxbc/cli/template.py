"""Owns templates: a question with blanks, and what goes with it, kept under a name as TOML.

They are files NAME.toml in the directory `templates` of the user's settings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxbc import paths
from mlxbc.errors import ConfigError
from mlxbc.files import create

INPUT = "input"
"""The blank that is filled with what the command was given to ask."""


class Template(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One template.

    Attributes:
        prompt: the question. `$input` and `$name` are blanks; without `$input`, what was asked follows it.
        system: the system prompt, with blanks too.
        model: that answers.
        extract: the answer is its first block of code.
        options: of the generation, as -o sets them.
        defaults: what fills blanks that are not given.
    """

    prompt: str = ""
    system: str | None = None
    model: str | None = None
    extract: bool = False
    options: dict[str, Any] = {}
    defaults: dict[str, str] = {}


def load(name: str) -> Template:
    """The template of this name.

    Raises:
        ConfigError: there is none, or it is wrong; the message says where.
    """
    path = _path(name)
    import tomllib

    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Template)
    except FileNotFoundError:
        raise ConfigError(_missing(name, path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def save(name: str, template: Template) -> Path:
    """Keep a template; the path it is kept at.

    Raises:
        ConfigError: there is one of that name, or it can't be written.
    """
    path = _path(name)
    try:
        create(path, render(template))
    except FileExistsError:
        raise ConfigError(f"there is a template {name} already; edit or remove {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    return path


def render(template: Template) -> str:
    """A template as TOML."""
    fields = {name: value for name, value in msgspec.structs.asdict(template).items() if value not in (None, "", {})}
    lines = [f"{key} = {_toml(value)}" for key, value in fields.items() if not isinstance(value, dict) and value]
    for name in ("options", "defaults"):
        if table := fields.get(name):
            lines += ["", f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """Of all templates."""
    try:
        return sorted(entry.name.removesuffix(".toml") for entry in os.scandir(_directory()) if _is_one(entry.name))
    except OSError:
        return []


def fill(template: Template, text: str, given: Mapping[str, str]) -> tuple[str, str | None]:
    """The question and the system prompt, with their blanks filled.

    Raises:
        ConfigError: a blank is left, or something is given that is not asked for.
    """
    from string import Template as Blanks

    values = {**template.defaults, **given, INPUT: text}
    prompt, system = Blanks(template.prompt), Blanks(template.system or "")
    wanted = {*prompt.get_identifiers(), *system.get_identifiers()}
    if surplus := given.keys() - wanted:
        raise ConfigError(f"the template has no blank ${min(surplus)}; its blanks are {_listed(wanted)}")
    if missing := wanted - values.keys():
        raise ConfigError(f"the template's blank ${min(missing)} is not filled: -p {min(missing)} TEXT")
    try:
        filled = prompt.substitute(values)
        if INPUT not in wanted and text:
            filled = f"{filled}\n\n{text}" if filled else text
        return filled, system.substitute(values) if template.system is not None else None
    except ValueError as error:
        raise ConfigError(f"the template is wrong: {error}; a dollar sign is written $$") from None


def directory() -> Path:
    """Where they are."""
    return _directory()


def _directory() -> Path:
    return paths.config_dir() / "templates"


def _path(name: str) -> Path:
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ConfigError(f"{name[:80]!r} is no template's name: it becomes a file's")
    return _directory() / f"{name}.toml"


def _is_one(name: str) -> bool:
    return name.endswith(".toml") and not name.startswith(".")


def _missing(name: str, path: Path) -> str:
    from difflib import get_close_matches

    known = names()
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}" if known else f"write {path}"
    return f"there is no template {name}; {hint}"


def _listed(names: set[str]) -> str:
    return ", ".join(f"${name}" for name in sorted(names)) or "none"


def _toml(value: Any) -> str:
    """A value as TOML, which for these types is JSON but for text with a DEL in it, and for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
