"""Owns what a model directory says about its text: special and end tokens, chat template, sampling defaults.

Sources are the directory's small JSON files and template files; the vocabulary itself is `text.tokenizer`'s.
Where two files disagree the order is the one that mlx-lm and transformers use, so that a model behaves the
same here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from mlxbcd.errors import ServeError

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class GenerationDefaults(TypedDict, total=False):
    """Sampling settings a model's authors chose, each in the wire's range."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


_DRAWING: Final[dict[str, Callable[[float], bool]]] = {
    "temperature": lambda value: 0 <= value <= 10,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: 0 <= value <= 1_000_000 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
}
_ALWAYS: Final[dict[str, Callable[[float], bool]]] = {"repetition_penalty": lambda value: 0 < value <= 10}


@dataclass(frozen=True, slots=True)
class TextMetadata:
    """The text-related files of one model directory, parsed. A missing file is an empty dict.

    Attributes:
        tokenizer: tokenizer_config.json, with a legacy special_tokens_map.json merged in.
        config: config.json.
        generation: generation_config.json.
        chat_template: Jinja source of the default chat template, or None.
    """

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    generation: dict[str, Any]
    chat_template: str | None

    @classmethod
    def load(cls, directory: Path) -> TextMetadata:
        """Read the files of a model directory.

        Raises:
            ServeError: load_failed, a file is unreadable or isn't a JSON object.
        """
        tokenizer = _read_object(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in tokenizer:
            tokenizer |= _read_object(directory / "special_tokens_map.json")
        return cls(
            tokenizer=tokenizer,
            config=_read_object(directory / "config.json"),
            generation=_read_object(directory / "generation_config.json"),
            chat_template=_chat_template(directory, tokenizer),
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens (`bos_token`, `eos_token`, …) that the model has, as text."""
        named = ((name, _token_text(self.tokenizer.get(name))) for name in NAMED_TOKENS)
        return {name: text for name, text in named if text is not None}

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a name of their own, in the order they are listed."""
        key = "extra_special_tokens" if self.tokenizer.get("extra_special_tokens") else "additional_special_tokens"
        listed = self.tokenizer.get(key) or []
        values = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else []
        return [text for text in map(_token_text, values) if text is not None]

    @property
    def added_tokens(self) -> dict[int, dict[str, Any]]:
        """Tokens that tokenizer_config.json adds to the vocabulary: their properties by id, ascending."""
        listed = self.tokenizer.get("added_tokens_decoder")
        if not isinstance(listed, dict):
            return {}
        entries = (
            (int(key), value)
            for key, value in listed.items()
            if key.isdecimal() and isinstance(value, dict) and _token_text(value) is not None
        )
        return dict(sorted(entries, key=lambda entry: entry[0]))

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-turn token ids by number: generation_config.json's, else config.json's, else its
        text_config's.

        The first file that names any wins: config.json often repeats a base model's end token that the
        generation config has corrected. The tokenizer's own `eos_token` is added by `Tokenizer.eos_ids`.
        """
        text_config = self.config.get("text_config")
        nested = text_config if isinstance(text_config, dict) else {}
        for source in (self.generation, self.config, nested):
            if ids := _ids(source.get("eos_token_id")):
                return ids
        return frozenset()

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """Sampling settings of generation_config.json.

        `do_sample: false` says that the authors decode greedily: then temperature, top_p, top_k and min_p are
        leftovers and not honoured, while the repetition penalty, which acts on greedy decoding too, still is.
        Null values and values outside the wire's ranges are as good as absent.
        """
        honoured = _ALWAYS if self.generation.get("do_sample") is False else _DRAWING | _ALWAYS
        found: dict[str, Any] = {}
        for name, valid in honoured.items():
            value = self.generation.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and valid(value):
                found[name] = int(value) if name == "top_k" else float(value)
        return cast(GenerationDefaults, found)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ServeError("load_failed", f"{path} can't be read as JSON ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise ServeError("load_failed", f"{path} must hold a JSON object; fetch the model again")
    return content


def _token_text(value: object) -> str | None:
    """A token is written as its text, or as an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _chat_template(directory: Path, tokenizer: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json, else chat_template.json: newer conventions first."""
    path = directory / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ServeError("load_failed", f"{path} can't be read ({error}); fetch the model again") from error
    declared = _default_template(tokenizer.get("chat_template"))
    return declared or _default_template(_read_object(directory / "chat_template.json").get("chat_template"))


def _default_template(declared: object) -> str | None:
    """One template, or several by name: then the one named "default", or the only one."""
    if isinstance(declared, list):
        declared = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
    if isinstance(declared, dict):
        only = next(iter(declared.values())) if len(declared) == 1 else None
        declared = declared.get("default", only)
    return declared if isinstance(declared, str) and declared else None
