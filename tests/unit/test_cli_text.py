"""What commands make of texts: code in an answer, blocks of Markdown, templates."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbc import paths
from mlxbc.cli import fences, template
from mlxbc.cli.markdown import split
from mlxbc.cli.template import Template
from mlxbc.errors import ConfigError

LINES = st.lists(st.sampled_from(["a", "```", "````", "~~~", "```py", "  x", "    y", "- i", "1. j", "", "b ``` c"]))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)

# ------------------------------------------------------------ code in an answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Here:\n```py\nx = 1\n```\nThat is it.", ["x = 1\n"]),
        ("```\na\n```\n\n~~~sh\nb\n~~~\n", ["a\n", "b\n"]),
        ("````md\n```py\nx\n```\n````\n", ["```py\nx\n```\n"]),
        ("```\ncut off", ["cut off"]),
        ("```\n", [""]),
        ("~~~\n```\n~~~\n", ["```\n"]),
        ("   ```\n  x\n   ```", ["  x\n"]),
        ("    ```\nnot a fence", []),
        ("say ```x``` in a line\n```x```\n", []),
        ("```py\nx\n```py\n", ["x\n```py\n"]),
        ("", []),
    ],
)
def test_blocks_of_code_are_found(answer: str, found: list[str]) -> None:
    assert list(fences.blocks(answer)) == found
    assert fences.first(answer) == (found[0] if found else None)
    assert fences.code(answer) == (found[0] if found else answer)


@given(st.text(max_size=80), st.integers(3, 6), st.sampled_from("`~"))
def test_whatever_is_fenced_long_enough_comes_out_whole(code: str, count: int, sign: str) -> None:
    code = code.replace(sign, "")
    fence = sign * count
    assert fences.first(f"text\n\n{fence}\n{code}\n{fence}\n") == f"{code}\n"


# ------------------------------------------------------------ blocks of Markdown


@given(LINES)
def test_blocks_that_are_done_are_a_beginning_that_grows(lines: list[str]) -> None:
    before = ""
    for count in range(len(lines) + 1):
        text = "".join(f"{line}\n" for line in lines[:count])
        done, rest = split(text)
        assert done + rest == text
        assert done.startswith(before)
        before = done


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", ""),
        ("one\ntwo", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("- a\n\n- b", ""),
        ("1. a\n\n2", ""),
        ("- a\n\n  more", ""),
        ("- a\n\n- b\n\nend", "- a\n\n- b\n\n"),
        ("# head\n\n12 monkeys", "# head\n\n"),
    ],
)
def test_a_block_is_done_when_the_next_has_begun(text: str, done: str) -> None:
    assert split(text)[0] == done


# ------------------------------------------------------------ templates


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "config_dir", lambda: tmp_path)


@given(
    st.builds(
        Template,
        prompt=TEXTS,
        system=st.none() | TEXTS.filter(bool),
        model=st.none() | TEXTS.filter(bool),
        extract=st.booleans(),
        options=st.dictionaries(TEXTS, st.integers(-5, 5) | TEXTS | st.lists(TEXTS, max_size=2), max_size=2),
        defaults=st.dictionaries(TEXTS, TEXTS, max_size=2),
    )
)
def test_a_template_is_written_as_toml_that_reads_the_same(one: Template) -> None:

    assert msgspec.convert(tomllib.loads(template.render(one)), Template) == one


def test_a_template_is_kept_and_found(tmp_path: Path) -> None:
    one = Template(prompt="Explain $input", options={"temperature": 0.5, "logit_bias": {"42": -100.0}})
    path = template.save("explain", one)
    assert path == tmp_path / "templates" / "explain.toml"
    assert template.load("explain") == one
    assert template.names() == ["explain"]
    with pytest.raises(ConfigError, match="already"):
        template.save("explain", one)
    with pytest.raises(ConfigError, match="did you mean explain"):
        template.load("explian")


@pytest.mark.parametrize("name", ["", ".hidden", "../other", "a/b", "a\0b"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match="no template's name"):
        template.load(name)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a = 1\nprompt = ]", "line 2"),
        ("promt = 'x'", "unknown field `promt`"),
        ("prompt = 3", "Expected `str`, got `int`"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "t.toml").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        template.load("t")


@pytest.mark.parametrize(
    ("one", "text", "given", "filled"),
    [
        (Template(prompt="Explain $input."), "why", {}, ("Explain why.", None)),
        (Template(prompt="Explain."), "why", {}, ("Explain.\n\nwhy", None)),
        (Template(system="Be $mood."), "why", {"mood": "kind"}, ("why", "Be kind.")),
        (Template(prompt="$a $b", defaults={"a": "1", "b": "2"}), "", {"b": "3"}, ("1 3", None)),
        (Template(prompt="It costs $$5."), "", {}, ("It costs $5.", None)),
    ],
)
def test_blanks_are_filled(one: Template, text: str, given: dict[str, str], filled: tuple[str, str | None]) -> None:
    assert template.fill(one, text, given) == filled


@pytest.mark.parametrize(
    ("one", "given", "complaint"),
    [
        (Template(prompt="$a"), {}, r"-p a TEXT"),
        (Template(prompt="$a"), {"a": "1", "b": "2"}, r"no blank \$b; its blanks are \$a"),
        (Template(prompt="$ 5"), {}, r"written \$\$"),
    ],
)
def test_blanks_that_do_not_fit_are_told(one: Template, given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        template.fill(one, "x", given)
