"""Owns where settings come from: options before variables before the file before defaults, and a file read or refused.

A file that has a key nobody knows is refused as a whole, with the near name: a typing mistake must not be a default.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict

from mlxbc.errors import ConfigError
from mlxbc.paths import config_dir
from mlxbcd.config.kinds import quoted
from mlxbcd.config.settings import ALIASES, DRAFTS, KEYS, TABLES, Key, Settings, sections

VARIABLE: Final = "MLXBC_CONFIG"
"""Names another file."""
DEFAULT: Final = "default"

_FILE: Final = "config.toml"
_LONGEST: Final = 1 << 20
_ALIAS: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings, and how they came about.

    Attributes:
        origin: by key: an option, a variable, the file's path, or `DEFAULT`.
        file: where settings are read from; None where they aren't.
        named: somebody chose that file, so it has to exist.
        flags: what options say, as text by key.
    """

    settings: Settings
    origin: Mapping[str, str]
    file: Path | None = None
    named: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)


def fixed(settings: Settings) -> Config:
    """Settings that came about otherwise: reading them again changes nothing."""
    return Config(settings, dict.fromkeys([*KEYS, *TABLES], DEFAULT))


def user_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's own file, or the one that the variable names."""
    named = environ.get(VARIABLE)
    return Path(os.path.abspath(os.path.expanduser(named))) if named else config_dir() / _FILE


def load(
    flags: Mapping[str, str] | None = None,
    *,
    options: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
    file: Path | None = None,
) -> Config:
    """The effective settings.

    Args:
        flags: by key, what options of the command line say, as text.
        options: by key, how the option is written, for messages; `--set KEY=` where it is missing.
        file: read this one, which must exist; None reads the user's own if there is one.

    Raises:
        ConfigError: the file can't be read, a key is unknown, or a value is not of its kind.
    """
    flags, options = flags or {}, options or {}
    path = file or user_file(environ)
    named = file is not None or bool(environ.get(VARIABLE))
    table = _read(path, needed=named)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key in KEYS.values():
        if key.name in flags:
            said, raw = options.get(key.name, f"--set {key.name}"), key.kind.of_text(flags[key.name])
        elif environ.get(key.variable):
            said, raw = key.variable, key.kind.of_text(environ[key.variable])
        elif key.name in table:
            said, raw = str(path), table[key.name]
        else:
            origin[key.name] = DEFAULT
            continue
        values[key.attribute] = _value(key, raw, said)
        origin[key.name] = said
    for unknown in flags.keys() - KEYS.keys():
        raise ConfigError(f"there is no setting {unknown!r}{_near(unknown)}")
    aliases = _models(path, ALIASES, table.get(ALIASES, {}))
    for name in aliases:
        if not _ALIAS.fullmatch(name):
            raise ConfigError(f"{path}: {name[:80]!r} can't be an alias: letters, digits, dots, dashes and underscores")
    drafts = _models(path, DRAFTS, table.get(DRAFTS, {}))
    origin |= {name: str(path) if own else DEFAULT for name, own in ((ALIASES, aliases), (DRAFTS, drafts))}
    return Config(Settings(**values, aliases=aliases, drafts=drafts), origin, path, named, dict(flags))


@dataclass(frozen=True, slots=True)
class Reload:
    """What a running daemon makes of its file as it is now.

    Attributes:
        config: in force from now on.
        changed: keys with another value than before.
        waiting: keys whose other value needs another start.
    """

    config: Config
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def reload(config: Config, environ: Mapping[str, str] = os.environ) -> Reload:
    """Read the file of a running daemon again; its options and variables are as they were.

    Raises:
        ConfigError: see `load`; what was in force stays.
    """
    if config.file is None:
        return Reload(config, (), ())
    written = {key: config.origin[key] for key in config.flags}
    fresh = load(config.flags, options=written, environ=environ, file=config.file if config.named else None)
    changed: list[str] = []
    waiting: list[str] = []
    values: dict[str, Any] = {table: getattr(fresh.settings, table) for table in TABLES}
    origin = dict(fresh.origin)
    for key in KEYS.values():
        before, after = getattr(config.settings, key.attribute), getattr(fresh.settings, key.attribute)
        if before != after:
            (changed if key.live else waiting).append(key.name)
        values[key.attribute] = after if key.live else before
        if not key.live:
            origin[key.name] = config.origin[key.name]
    changed += [table for table in TABLES if values[table] != getattr(config.settings, table)]
    settled = Config(Settings(**values), origin, fresh.file, config.named, config.flags)
    return Reload(settled, tuple(changed), tuple(waiting))


class Entry(TypedDict):
    """One setting for a person: its value as TOML, where that is from, and whether a running daemon can change it."""

    key: str
    value: str
    source: str
    live: bool


def entries(config: Config) -> Iterator[Entry]:
    """Every setting in the order of the documented file; people's own tables last."""
    for key in KEYS.values():
        value = getattr(config.settings, key.attribute)
        yield Entry(key=key.name, value=key.show(value), source=config.origin[key.name], live=key.live)
    for table in TABLES:
        for name, target in getattr(config.settings, table).items():
            shown = f"{table}.{name if table == ALIASES else quoted(name)}"
            yield Entry(key=shown, value=quoted(target), source=config.origin[table], live=True)


def _read(path: Path, *, needed: bool) -> dict[str, Any]:
    """The file's values by key, nothing of them checked but their names."""
    try:
        with open(path, "rb", opener=_open) as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
                raise ConfigError(f"{path} is not a file of settings")
            text = opened.read(_LONGEST + 1).decode()
    except (FileNotFoundError, NotADirectoryError):
        if needed:
            raise ConfigError(f"there is no file {path}; mlxbc config init writes one") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None
    try:
        return dict(_flat(path, tomllib.loads(text)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _open(path: str, flags: int) -> int:
    # Opening a pipe would wait for whoever writes into it.
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _flat(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = sections()
    for name, value in table.items():
        if name in TABLES or name in KEYS:
            yield name, value
        elif name in known:
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {name} is a table: [{name}]")
            for inner, one in value.items():
                whole = f"{name}.{inner}"
                if whole not in KEYS:
                    raise ConfigError(f"{path}: unknown key {whole!r}{_near(whole)}")
                yield whole, one
        else:
            raise ConfigError(f"{path}: unknown key {name[:80]!r}{_near(name)}")


def _value(key: Key, raw: object, said: str) -> Any:
    try:
        return key.kind.read(raw)
    except ValueError:
        raise ConfigError(f"{said}: {key.name} is {key.kind.expects}, not {str(raw)[:80]!r}") from None


def _models(path: Path, name: str, table: object) -> dict[str, str]:
    """A table of models by people's own keys."""
    if not isinstance(table, dict):
        example = {ALIASES: 'fast = "ORG/NAME"', DRAFTS: '"ORG/LARGE" = "ORG/SMALL"'}[name]
        raise ConfigError(f"{path}: {name} is a table of names: {example}")
    for key, target in table.items():
        for one in (key, target):
            if not isinstance(one, str) or not one or not one.isprintable() or len(one) > 1024:
                kind = {ALIASES: "the alias", DRAFTS: "what drafts for"}[name]
                raise ConfigError(f"{path}: {kind} {key[:80]} needs a model's name or absolute path")
    return {os.path.expanduser(key): os.path.expanduser(target) for key, target in table.items()}


def _near(name: str) -> str:
    known = [*KEYS, *sections()]
    leaf = name.rpartition(".")[2]
    same = [key for key in KEYS if key.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(name, known, n=1) or same[:1]
    return f"; did you mean {near[0]}?" if near else "; mlxbc config lists them all"
