"""Owns prompts for completing at a cursor: the tokens that a model fills in a middle with, and the prompt made of them.

A model that was trained for it has tokens of its own, which are found in its vocabulary. One without goes on from the
text before the cursor. What changes last stands last: other files first, then what is after the cursor where the family
was trained with that order too, then what is before it, which grows as somebody types.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from mlxbc import wire
from mlxbcd.text.comments import comment

PREFIX: Final = "{prefix}"
SUFFIX: Final = "{suffix}"
_STEPS: Final = 8
"""A text too long for its room is cut by one of this many parts of the room at a time, so that its beginning, and with
it whatever has been computed, stays put for a while."""
_LEAST_LANDMARK: Final = 4
"""Characters of a line after the cursor that end a completion which arrives there."""
_LONGEST_LANDMARK: Final = 200


_PARTS: Final = re.compile(r"\{(?:prefix|suffix)\}|<[^<>\s]+>|\[[^\[\]\s]+\]|[^<>\[\]{}\s]+")


class Form(Enum):
    """How a completion was put to the model."""

    INFILLING = "infilling"
    CONTINUATION = "continuation"
    """The model has no tokens for a middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FimStyle:
    """How one family of models is asked to fill in a middle.

    Attributes:
        family: a name for people.
        layout: tokens of the vocabulary, and `PREFIX` and `SUFFIX` where these texts go.
        file: the token before each file; "" where the family has none, and files stand within the prefix.
        path: what is around a file's path; "" writes it as a comment.
        ends: tokens besides the tokenizer's own, as far as the vocabulary has them, that end a completion.
    """

    family: str
    layout: tuple[str, ...]
    file: str = ""
    path: str = ""
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that a vocabulary needs for it."""
        return (*(part for part in self.layout if part not in (PREFIX, SUFFIX)), *filter(None, [self.file]))

    def before(self, part: str) -> str:
        """The token that stands before a text; "" if none does."""
        place = self.layout.index(part)
        token = self.layout[place - 1] if place else ""
        return "" if token in (PREFIX, SUFFIX) else token


def _prefix_first(prefix: str, suffix: str, middle: str) -> tuple[str, ...]:
    return prefix, PREFIX, suffix, SUFFIX, middle


def _suffix_first(prefix: str, suffix: str, middle: str) -> tuple[str, ...]:
    """The other order of families that were trained with both, half and half."""
    return prefix, suffix, SUFFIX, middle, PREFIX


_BARS: Final = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_STARS: Final = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")

STYLES: Final = (
    FimStyle(
        family="qwen-coder",
        layout=_prefix_first(*_BARS),
        file="<|file_sep|>",
        path="{}\n",
        ends=("<|fim_pad|>", "<|repo_name|>"),
    ),
    FimStyle(family="codegemma", layout=_suffix_first(*_BARS), file="<|file_separator|>"),
    FimStyle(family="granite", layout=_prefix_first(*_BARS), file="<|filename|>", path="{}\n", ends=("<|reponame|>",)),
    FimStyle(family="generic", layout=_prefix_first(*_BARS), ends=("<|fim_pad|>",)),
    FimStyle(
        family="starcoder2",
        layout=_suffix_first(*_STARS),
        file="<file_sep>",
        path="{}\n",
        ends=("<fim_pad>", "<repo_name>"),
    ),
    FimStyle(
        family="starcoder",
        layout=_suffix_first(*_STARS),
        file="<filename>",
        path="{}\n",
        ends=("<fim_pad>", "<reponame>"),
    ),
    FimStyle(family="stable-code", layout=_suffix_first(*_STARS), ends=("<fim_pad>",)),
    FimStyle(family="santacoder", layout=_prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),
    FimStyle(
        family="deepseek-coder",
        layout=_prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        path="#{}\n",
    ),
    FimStyle(family="kwaipilot", layout=_prefix_first("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>")),
    FimStyle(
        family="codestral",
        layout=("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),
        path="+++++ {}\n",
        ends=("[MIDDLE]",),
    ),
    FimStyle(family="codellama", layout=_suffix_first("▁<PRE>", "▁<SUF>", "▁<MID>"), ends=("▁<EOT>",)),
    FimStyle(
        family="seed-coder",
        layout=("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),
    ),
    FimStyle(
        family="glm",
        layout=("<|code_suffix|>", SUFFIX, "<|code_prefix|>", PREFIX, "<|code_middle|>"),
    ),
)
"""The first whose tokens a vocabulary has is the model's, so those with more tokens come first."""


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary."""
        ...

    def encode_literal(self, text: str, after: str) -> list[int]:
        """Ids of a text that follows the token `after`; control tokens written in it are text like any other."""
        ...

    def begin(self) -> list[int]:
        """What the tokenizer puts before a raw prompt."""
        ...


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """A completion as the model sees it.

    Attributes:
        tokens: the prompt.
        ends: ids, besides the model's end tokens, that end it.
        stop: texts that end it, besides the request's own.
    """

    tokens: list[int]
    form: Form
    ends: frozenset[int]
    stop: tuple[str, ...]


def find(encoder: Encoder, wanted: str = "auto") -> FimStyle | None:
    """How a model is asked to fill in a middle; None where it can't be, or isn't to be.

    Args:
        wanted: "auto" goes by the vocabulary, "off" never asks; the name of a family, or a layout as one text, holds
            for models that have its tokens.
    """
    if wanted == "off":
        return None
    own = [style for style in (*_written(wanted), *STYLES) if wanted in ("auto", style.family)]
    for style in (*own, *STYLES):
        if all(encoder.token_id(token) is not None for token in style.tokens):
            return style
    return None


def _written(layout: str) -> list[FimStyle]:
    """A style of somebody's own: tokens stand one after another, each within brackets of some kind."""
    if PREFIX not in layout:
        return []
    parts = _PARTS.findall(layout)
    return [FimStyle(family=layout, layout=tuple(parts))] if "".join(parts) == "".join(layout.split()) else []


def fim_prompt(fim: wire.Fim, style: FimStyle | None, encoder: Encoder, room: int) -> FimPrompt:
    """The prompt of a completion.

    What does not fit is left out: of the text before the cursor its beginning, of the text after it its end, and of the
    other files the earliest.

    Args:
        style: None where the model has no tokens for a middle.
        room: tokens the prompt may have.
    """
    if style is None:
        tokens = _continuation(fim, encoder, room)
        return FimPrompt(tokens, Form.CONTINUATION, frozenset(), (*_line_ends(fim), *_landmark(fim)))
    marks = {*style.tokens, *style.ends}
    ends = frozenset(index for token in marks if (index := encoder.token_id(token)) is not None)
    return FimPrompt(_infilling(fim, style, encoder, room), Form.INFILLING, ends, _line_ends(fim))


def _infilling(fim: wire.Fim, style: FimStyle, encoder: Encoder, room: int) -> list[int]:
    ids = {token: index for token in style.tokens if (index := encoder.token_id(token)) is not None}
    begin = encoder.begin()
    before = style.before(PREFIX)
    header = _header(fim.path, fim.language, style.path)
    files = [_header(chunk.path, fim.language, style.path) + _lines(chunk.text) for chunk in fim.context]
    if style.file:
        # Each file has its token, and so has this one if it is named or not the only one.
        chunks = [[ids[style.file], *encoder.encode_literal(text, style.file)] for text in files]
        own = [ids[style.file], *encoder.encode_literal(header, style.file)] if header or chunks else []
    else:
        chunks = [encoder.encode_literal(text, before) for text in files]
        own = encoder.encode_literal(header, before)
    prefix = encoder.encode_literal(fim.prefix, before)
    suffix = encoder.encode_literal(fim.suffix, style.before(SUFFIX))
    left = max(room - len(begin) - len(own) - (len(style.layout) - 2), 1)
    prefix, suffix = _fit(prefix, suffix, left)
    others = _newest(chunks, left - len(prefix) - len(suffix))
    outside, inside = ([*others, *own], []) if style.file else ([], [*others, *own])
    parts = {PREFIX: [*inside, *prefix], SUFFIX: suffix} | {token: [index] for token, index in ids.items()}
    return [*begin, *outside, *(index for part in style.layout for index in parts[part])]


def _continuation(fim: wire.Fim, encoder: Encoder, room: int) -> list[int]:
    begin = encoder.begin()
    mark = comment(fim.language, fim.path)
    blocks = []
    for chunk in fim.context:
        lines = [*filter(None, [chunk.path]), *chunk.text.splitlines()]
        blocks.append("\n".join(mark.block(lines) if mark is not None else lines) + "\n")
    chunks = [encoder.encode_literal(text, "") for text in blocks]
    own = encoder.encode_literal(_header(fim.path, fim.language, ""), "")
    left = max(room - len(begin) - len(own), 1)
    prefix, _ = _fit(encoder.encode_literal(fim.prefix, ""), [], left)
    return [*begin, *_newest(chunks, left - len(prefix)), *own, *prefix]


def _fit(prefix: list[int], suffix: list[int], room: int) -> tuple[list[int], list[int]]:
    """The end of one and the beginning of the other, so that both fit; a quarter is for the suffix if it needs it."""
    if len(prefix) + len(suffix) <= room:
        return prefix, suffix
    step = max(room // _STEPS, 1)
    suffix = suffix[: max(room // 4, (room - len(prefix)) // step * step)]
    excess = len(prefix) + len(suffix) - room
    return prefix[-(-excess // step) * step :] if excess > 0 else prefix, suffix


def _newest(chunks: Sequence[list[int]], room: int) -> list[int]:
    """As many of the last chunks as fit, each whole."""
    kept: list[list[int]] = []
    for chunk in reversed(chunks):
        room -= len(chunk)
        if room < 0:
            break
        kept.append(chunk)
    return [index for chunk in reversed(kept) for index in chunk]


def _header(path: str, language: str, around: str) -> str:
    """A line that names a file; empty where it can't be told from the file's text."""
    if not path:
        return ""
    path = " ".join(path.split())
    if around:
        return around.format(path)
    mark = comment(language, path)
    return f"{mark.line(path)}\n" if mark is not None else ""


def _lines(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _line_ends(fim: wire.Fim) -> tuple[str, ...]:
    return ("\n", "\r") if fim.single_line else ()


def _landmark(fim: wire.Fim) -> tuple[str, ...]:
    """The next line after the cursor's: a model that doesn't know of it would go on and write it again."""
    for line in fim.suffix.split("\n")[1:]:
        if len(line.strip()) >= _LEAST_LANDMARK:
            return (f"\n{line.rstrip()[:_LONGEST_LANDMARK]}",)
        if line.strip():
            break
    return ()
