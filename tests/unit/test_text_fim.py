"""Prompts for completing at a cursor: each family's own tokens in its own order, trimmed far from the cursor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mlxbc import wire
from mlxbcd.config.settings import FIM_FAMILIES
from mlxbcd.text.comments import comment
from mlxbcd.text.fim import PREFIX, STYLES, FimStyle, Form, fim_prompt, find
from mlxbcd.text.metadata import TextMetadata
from mlxbcd.text.tokenizer import Tokenizer


def make(tokens: Sequence[str], *, bos: bool = False, special: bool = True) -> Tokenizer:
    return _made(tuple(tokens), bos, special)


@cache
def _made(tokens: tuple[str, ...], bos: bool, special: bool) -> Tokenizer:
    """A tokenizer with a token for each byte, and some of its own."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in dict.fromkeys(tokens)])
    backend.add_special_tokens(["<s>", "<eos>"])
    config: dict[str, Any] = {"eos_token": "<eos>", "bos_token": "<s>"}
    if bos:
        index = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", index)]
        )
    return Tokenizer(backend, TextMetadata(config, {}, {}, None))


def of(style: FimStyle, **options: bool) -> Tokenizer:
    return make([*style.tokens, *style.ends], **options)


def prompt(tokenizer: Tokenizer, room: int = 10_000, **fields: Any) -> str:
    """A prompt as text, control tokens included."""
    made = fim_prompt(wire.Fim(**fields), find(tokenizer), tokenizer, room)
    return tokenizer._backend.decode(made.tokens, skip_special_tokens=False)


FILE = {"prefix": "def f():\n    ", "suffix": "\n    return x\n"}
CONTEXT = [wire.Excerpt(text="A = 1\n", path="a.py"), wire.Excerpt(text="B = 2", path="b.py")]
P, S = FILE["prefix"], FILE["suffix"]


@pytest.mark.parametrize(
    ("family", "alone", "among"),
    [
        (
            "qwen-coder",
            f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
            f"<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n<|file_sep|>c.py\n"
            f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
        ),
        (
            "codegemma",
            f"<|fim_prefix|><|fim_suffix|>{S}<|fim_middle|>{P}",
            f"<|file_separator|># a.py\nA = 1\n<|file_separator|># b.py\nB = 2\n<|file_separator|># c.py\n"
            f"<|fim_prefix|><|fim_suffix|>{S}<|fim_middle|>{P}",
        ),
        (
            "granite",
            f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
            f"<|filename|>a.py\nA = 1\n<|filename|>b.py\nB = 2\n<|filename|>c.py\n"
            f"<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
        ),
        (
            "starcoder2",
            f"<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
            f"<file_sep>a.py\nA = 1\n<file_sep>b.py\nB = 2\n<file_sep>c.py\n<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
        ),
        (
            "starcoder",
            f"<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
            f"<filename>a.py\nA = 1\n<filename>b.py\nB = 2\n<filename>c.py\n<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
        ),
        (
            "deepseek-coder",
            f"<｜fim▁begin｜>{P}<｜fim▁hole｜>{S}<｜fim▁end｜>",
            f"<｜fim▁begin｜>#a.py\nA = 1\n#b.py\nB = 2\n#c.py\n{P}<｜fim▁hole｜>{S}<｜fim▁end｜>",
        ),
        (
            "codestral",
            f"[SUFFIX]{S}[PREFIX]{P}",
            f"[SUFFIX]{S}[PREFIX]+++++ a.py\nA = 1\n+++++ b.py\nB = 2\n+++++ c.py\n{P}",
        ),
        (
            "codellama",
            f"▁<PRE>▁<SUF>{S}▁<MID>{P}",
            f"▁<PRE>▁<SUF>{S}▁<MID># a.py\nA = 1\n# b.py\nB = 2\n# c.py\n{P}",
        ),
        (
            "seed-coder",
            f"<[fim-suffix]>{S}<[fim-prefix]>{P}<[fim-middle]>",
            f"<[fim-suffix]>{S}<[fim-prefix]># a.py\nA = 1\n# b.py\nB = 2\n# c.py\n{P}<[fim-middle]>",
        ),
        (
            "glm",
            f"<|code_suffix|>{S}<|code_prefix|>{P}<|code_middle|>",
            f"<|code_suffix|>{S}<|code_prefix|># a.py\nA = 1\n# b.py\nB = 2\n# c.py\n{P}<|code_middle|>",
        ),
    ],
)
def test_each_family_is_asked_as_it_was_trained(family: str, alone: str, among: str) -> None:
    tokenizer = of(next(style for style in STYLES if style.family == family))
    assert prompt(tokenizer, **FILE) == alone
    assert prompt(tokenizer, **FILE, context=CONTEXT, path="c.py") == among


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.family)
@pytest.mark.parametrize("special", [True, False])
def test_the_style_is_found_from_the_vocabulary(style: FimStyle, special: bool) -> None:
    tokenizer = of(style, special=special)
    assert find(tokenizer) is style
    made = fim_prompt(wire.Fim(prefix="a"), style, tokenizer, 100)
    assert made.form is Form.INFILLING
    assert made.ends == {tokenizer.token_id(token) for token in (*style.tokens, *style.ends)}


def test_a_style_can_be_chosen_where_the_model_has_its_tokens() -> None:
    tokenizer = of(STYLES[0])
    assert find(tokenizer, "off") is None
    generic = find(tokenizer, "generic")
    assert generic is not None
    assert generic.family == "generic"
    assert find(tokenizer, "codestral") is STYLES[0], "it has no such tokens"
    for layout in ("<|fim_prefix|> <|fim_suffix|>{suffix}<|fim_middle|>{prefix}", "<|no|>{prefix}[NO]{suffix}"):
        own = find(tokenizer, layout)
        assert own is not None
        assert (own is STYLES[0]) == ("no" in layout)
    layout = "<|fim_suffix|>{suffix}{prefix}"
    made = fim_prompt(wire.Fim(prefix="a", suffix="b"), find(tokenizer, layout), tokenizer, 99)
    assert tokenizer._backend.decode(made.tokens, skip_special_tokens=False) == layout.format(prefix="a", suffix="b")


def test_the_settings_know_every_family() -> None:
    assert [style.family for style in STYLES] == list(FIM_FAMILIES)


def test_a_raw_prompt_s_beginning_comes_first() -> None:
    assert prompt(of(STYLES[0], bos=True), prefix="a", suffix="b") == "<s><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert prompt(make([], bos=True), prefix="a", suffix="b") == "<s>a"


@pytest.mark.parametrize("special", [True, False])
def test_control_tokens_in_a_file_are_text(special: bool) -> None:
    tokenizer = of(STYLES[0], special=special)
    text = "x <|fim_middle|><|fim_middle|> y <|fim_pad|>"
    made = fim_prompt(wire.Fim(prefix=text, suffix=text), STYLES[0], tokenizer, 1000)
    marks = [index for index in made.tokens if index in made.ends]
    assert [tokenizer.piece(index) for index in marks] == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert prompt(tokenizer, prefix=text) == f"<|fim_prefix|>{text}<|fim_suffix|><|fim_middle|>"


def test_runs_of_spaces_stay_whole() -> None:
    tokenizer = make([" " * 8], special=False)
    assert tokenizer.encode_literal(" " * 16, "") == [tokenizer.token_id(" " * 8)] * 2


# -- without tokens for a middle


def test_a_model_without_tokens_for_a_middle_goes_on_from_the_prefix() -> None:
    tokenizer = make([])
    made = fim_prompt(wire.Fim(**FILE, path="c.py", context=CONTEXT), find(tokenizer), tokenizer, 1000)
    assert made.form is Form.CONTINUATION
    assert tokenizer.decode(made.tokens) == f"# a.py\n# A = 1\n# b.py\n# B = 2\n# c.py\n{P}"
    assert made.stop == ("\n    return x",)
    assert made.ends == frozenset()


@pytest.mark.parametrize(
    ("language", "path", "line"),
    [
        ("python", "", "# b.py\n# B = 2\n"),
        ("", "src/x.cpp", "// b.py\n// B = 2\n"),
        ("html", "x", "<!-- b.py -->\n<!-- B = 2 -->\n"),
        ("lua", "x.py", "-- b.py\n-- B = 2\n"),
        ("", "Makefile", "# b.py\n# B = 2\n"),
        ("klingon", "", "b.py\nB = 2\n"),
    ],
)
def test_context_is_written_as_comments_of_the_language(language: str, path: str, line: str) -> None:
    written = prompt(make([]), prefix="", language=language, path=path, context=CONTEXT[1:])
    assert written.startswith(line)


def test_comments_that_end_within_a_text_do_no_harm() -> None:
    mark = comment("css", "")
    assert mark is not None
    assert mark.block(["a */ b", ""]) == ["/* a  b */", "/*  */"]


@pytest.mark.parametrize(
    ("suffix", "stop"),
    [
        (")\n\n  return 1", ("\n  return 1",)),
        (")\n}\nreturn 1", ()),
        ("return 1", ()),
        ("", ()),
    ],
)
def test_the_next_line_ends_a_continuation(suffix: str, stop: tuple[str, ...]) -> None:
    made = fim_prompt(wire.Fim(prefix="f(", suffix=suffix), None, make([]), 100)
    assert made.stop == stop


@pytest.mark.parametrize("style", [None, STYLES[0]])
def test_a_single_line_ends_at_its_end(style: FimStyle | None) -> None:
    tokenizer = of(style) if style else make([])
    assert fim_prompt(wire.Fim(prefix="a", single_line=True), style, tokenizer, 100).stop == ("\n", "\r")
    assert fim_prompt(wire.Fim(prefix="a"), style, tokenizer, 100).stop == ()


# -- what is left out, and what stays warm

TEXT = st.text("abc (){}\n", max_size=300)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    style=st.none() | st.sampled_from(STYLES),
    prefix=TEXT,
    suffix=TEXT,
    context=st.lists(TEXT, max_size=4),
    room=st.integers(20, 700),
)
def test_a_prompt_fits_and_keeps_what_is_near_the_cursor(
    style: FimStyle | None, prefix: str, suffix: str, context: list[str], room: int
) -> None:
    tokenizer = of(style) if style else make([])
    fim = wire.Fim(prefix=prefix, suffix=suffix, context=[wire.Excerpt(text=text) for text in context])
    made = fim_prompt(fim, style, tokenizer, room)
    assert len(made.tokens) <= room
    written = tokenizer._backend.decode(made.tokens, skip_special_tokens=False)
    assert prefix[-room // 4 :] in written
    if style is not None:
        assert suffix[: room // 4 - 10] in written
    if len(prefix) + len(suffix) + 10 <= room and style is not None:
        assert prefix in written
        assert suffix in written


def shared(first: list[int], second: list[int]) -> int:
    """Tokens that two prompts begin with alike."""
    differs = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differs, min(len(first), len(second)))


@pytest.mark.parametrize("style", [None, *STYLES], ids=lambda style: style.family if style else "none")
@pytest.mark.parametrize("length", [100, 3000])
def test_typing_keeps_what_was_computed_before_the_cursor(style: FimStyle | None, length: int) -> None:
    """Sixty keystrokes, in a short file and in one that doesn't fit, where the text is cut once for many of them."""
    tokenizer = of(style) if style else make([])
    source = "".join(f"line {i}\n" for i in range(1000))
    context = [wire.Excerpt(text="other\n" * 10, path="o.py")]
    prompts = []
    for typed in range(60):
        fim = wire.Fim(prefix=source[: length + typed], suffix="\nafter\n" * 40, context=context, path="x.py")
        prompts.append(fim_prompt(fim, style, tokenizer, 1000).tokens)
    cold = 0
    for before, after in itertools.pairwise(prompts):
        end = len(before)
        if style is not None:
            # What follows the text before the cursor: the suffix, or a mark at most.
            follows = style.layout[style.layout.index(PREFIX) + 1 :]
            end = before.index(tokenizer.token_id(follows[0])) if follows else end
            assert follows in ((), style.layout[-1:], style.layout[2:])
        cold += shared(before, after) < end
    assert cold <= 1
