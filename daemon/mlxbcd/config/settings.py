"""Owns the daemon's settings: every key with its kind, its default and what it is for.

A key's name is `name` or `section.name`. It is set by an option, by a variable (`MLXBC_` and the name in capitals, with
`_` for `.`), or in the file, as TOML.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from mlxbcd.config import kinds
from mlxbcd.config.kinds import FOREVER, Kind

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
FIM_FAMILIES: Final = (
    "qwen-coder",
    "codegemma",
    "granite",
    "generic",
    "starcoder2",
    "starcoder",
    "stable-code",
    "santacoder",
    "deepseek-coder",
    "kwaipilot",
    "codestral",
    "codellama",
    "seed-coder",
    "glm",
)
"""Families whose tokens and order are known."""
ALIASES: Final = "aliases"
DRAFTS: Final = "drafts"
TABLES: Final = (ALIASES, DRAFTS)
"""The tables whose keys are people's own."""


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        name: as people write it.
        attribute: of `Settings`.
        about: one sentence.
        live: a running daemon can take another value.
    """

    name: str
    attribute: str
    kind: Kind[Any]
    default: Any
    about: str
    live: bool

    @property
    def section(self) -> str:
        """The table that it stands in; empty at the top of the file."""
        return self.name.rpartition(".")[0]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "MLXBC_" + self.name.replace(".", "_").upper()

    def show(self, value: Any) -> str:
        """A value of this setting as TOML."""
        return self.kind.show(value)


def _key(name: str, kind: Kind[Any], default: Any, about: str, *, live: bool = False) -> Any:
    return field(default=default, metadata={"key": (name, kind, about, live)})


_YIELD: Final = kinds.choice("yield", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Effective values. Sizes are bytes and durations seconds; None is the daemon's own choice."""

    model: str | None = _key(
        "model",
        kinds.text("a model's name or absolute path"),
        None,
        "The model for requests that name none.",
        live=True,
    )
    preload: bool = _key(
        "preload", kinds.flag(), True, "Load that model when the daemon starts, not at the first request."
    )
    blas: str = _key(
        "blas",
        kinds.choice("auto", "openblas-shim", "reference"),
        "auto",
        "What multiplies matrices on Linux's CPU: the fast one that is built at the first start, or MLX's own.",
    )
    blas_threads: int = _key(
        "blas_threads", kinds.count(0, 64), 0, "Threads that multiply; 0 is one per core, at most 4."
    )
    aliases: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, str] = field(default_factory=dict)
    log_level: str = _key("log.level", kinds.choice(*LOG_LEVELS), "info", "The least that is logged.", live=True)
    log_file: Path | None = _key("log.file", kinds.path(), None, "Log there, rotated; empty is standard error.")
    log_format: str = _key(
        "log.format", kinds.choice("text", "json"), "text", "Lines for people, or one JSON object a line."
    )
    keep_alive: float = _key(
        "models.keep_alive",
        kinds.duration(),
        FOREVER,
        "How long a model that nobody asks stays in memory, unless its room is needed before.",
        live=True,
    )
    pin_default: bool = _key(
        "models.pin_default", kinds.flag(), True, "Keep the default model in memory whatever happens.", live=True
    )
    memory_limit: int | None = _key(
        "memory.limit",
        kinds.size(auto=True),
        None,
        "What weights, keys and values and spare buffers may take together; auto leaves the system its share.",
        live=True,
    )
    memory_cache: int | None = _key(
        "memory.cache",
        kinds.size(auto=True),
        None,
        "Freed buffers that MLX may keep for reuse, within memory.limit.",
        live=True,
    )
    memory_wired: str = _key(
        "memory.wired",
        kinds.choice("off", "weights"),
        "off",
        "Whether macOS may page the weights out; set once at start.",
    )
    power_battery: str = _key(
        "power.battery", _YIELD, "yield", "What background requests do while the machine runs on battery.", live=True
    )
    power_low_power: str = _key(
        "power.low_power", _YIELD, "yield", "What they do in the system's low power mode.", live=True
    )
    power_thermal: str = _key("power.thermal", _YIELD, "yield", "What they do while the machine is hot.", live=True)
    cache_mode: Literal["none", "ram", "disk"] = _key(
        "cache.mode",
        kinds.choice("none", "ram", "disk"),
        "disk",
        "Where states of prompts are kept for prompts that begin alike, for requests that do not say. On disk they "
        "reveal the prompts to whoever can read your files.",
        live=True,
    )
    cache_ram: int | None = _key(
        "cache.ram",
        kinds.size(auto=True, zero=True),
        None,
        "Memory for them; auto is an eighth of the machine's, and 0 switches the cache off.",
    )
    cache_disk: int | None = _key(
        "cache.disk",
        kinds.size(auto=True, zero=True),
        None,
        "Disk for them; auto is a quarter of what is free, at most 32 GB, and 0 keeps everything off the disk.",
    )
    cache_free: int | None = _key(
        "cache.free", kinds.size(), 4_000_000_000, "What must stay free on that disk, whatever happens."
    )
    cache_directory: Path | None = _key(
        "cache.directory", kinds.path(), None, "Keep them there; empty is the user's cache directory."
    )
    queue: int = _key(
        "requests.queue", kinds.count(1, 100_000), 1024, "Requests that may wait or run; more are refused.", live=True
    )
    prompts: int = _key(
        "requests.prompts",
        kinds.size(),
        128 * 1024 * 1024,
        "What the prompts of all open requests may hold together, as text and as tokens; more are refused.",
        live=True,
    )
    max_tokens: int = _key(
        "requests.max_tokens",
        kinds.count(1, 10_000_000),
        2048,
        "Tokens to generate where a request does not say.",
        live=True,
    )
    fim: str = _key(
        "requests.fim",
        kinds.layout("auto", "off", *FIM_FAMILIES),
        "auto",
        "How a model is asked for what belongs at a place in a file: by its vocabulary; not at all, so that it goes on "
        "from what is before; as one family's models are; or by other tokens. One that lacks them is asked as auto.",
        live=True,
    )
    decode_gap_ms: int = _key(
        "schedule.decode_gap_ms",
        kinds.count(0, 60_000),
        0,
        "Milliseconds between the tokens of running rows while a prompt joins; less is smoother, more lets the joiner "
        "begin sooner; 0 is one step and the cheapest piece that keeps 75 % of the best prefill rate, 50 at least.",
        live=True,
    )
    max_piece_ms: int = _key(
        "schedule.max_piece_ms",
        kinds.count(1, 60_000),
        250,
        "Milliseconds that a piece of a prompt, or a forward that verifies guesses, may take, whoever waits; a cancel "
        "or a keystroke is never further away.",
        live=True,
    )
    max_rows: int = _key(
        "schedule.max_rows", kinds.count(1, 256), 32, "Requests of a model that run at once; more wait.", live=True
    )


def _keys() -> dict[str, Key]:
    found = {}
    for one in fields(Settings):
        if "key" in one.metadata:
            name, kind, about, live = one.metadata["key"]
            found[name] = Key(name, one.name, kind, one.default, about, live)
    return found


KEYS: Final[Mapping[str, Key]] = _keys()
"""Every setting by its name, in the order of the documented file. People's own tables are not among them."""


def sections() -> list[str]:
    """The tables of the file."""
    return [*dict.fromkeys(key.section for key in KEYS.values() if key.section), *TABLES]
