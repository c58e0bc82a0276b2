"""Values of settings: what is shown is read again as the same value, and nothing else is."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbcd.config import kinds
from mlxbcd.config.document import template
from mlxbcd.config.kinds import FOREVER, Kind
from mlxbcd.config.settings import KEYS, TABLES, Settings


def toml(kind: Kind[Any], value: Any) -> object:
    """What TOML makes of a shown value."""
    return tomllib.loads(f"key = {kind.show(value)}")["key"]


@given(st.one_of(st.none(), st.integers(1, 2**60), st.integers(1, 2000).map(lambda n: n * 1024**3)))
def test_a_size_is_shown_as_it_is_read(value: int | None) -> None:
    kind = kinds.size(auto=True)
    assert kind.read(toml(kind, value)) == value


@given(st.one_of(st.just(FOREVER), st.integers(0, 10**8), st.integers(0, 4000).map(lambda n: n / 4)))
def test_a_duration_is_shown_as_it_is_read(value: float) -> None:
    kind = kinds.duration()
    assert kind.read(toml(kind, float(value))) == value


@given(st.text(max_size=60).filter(str.isprintable))
def test_a_text_is_shown_as_it_is_read(value: str) -> None:
    kind = kinds.text("a text")
    assert kind.read(toml(kind, value or None)) == (value or None)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (kinds.size(), "8GB", 8 * 10**9),
        (kinds.size(), " 512 MiB ", 512 * 2**20),
        (kinds.size(), "1.5gib", 3 * 2**29),
        (kinds.size(), "123", 123),
        (kinds.duration(), "5m", 300.0),
        (kinds.duration(), "90", 90.0),
        (kinds.duration(), "0", 0.0),
        (kinds.flag(), "Yes", True),
        (kinds.flag(), "0", False),
        (kinds.count(0, 9), "7", 7),
    ],
)
def test_people_write_values_in_other_ways_too(kind: Kind[Any], text: str, value: object) -> None:
    assert kind.read(kind.of_text(text)) == value


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        *((kinds.size(auto=True), raw) for raw in ("8 apples", "-1", -1, 0, "0B", True, 1.5, "1e400GB", "9" * 40, [])),
        *((kinds.size(), raw) for raw in (2**63, 10**26)),
        *((kinds.duration(), raw) for raw in ("soon", -1, True, 1e12, "99999999d", [], float("nan"))),
        *((kinds.flag(), raw) for raw in (1, "true", None)),
        *((kinds.count(0, 9), raw) for raw in (10, -1, True, "7", 7.0)),
        *((kinds.choice("a", "b"), raw) for raw in ("c", "", 1)),
        *((kinds.text("x"), raw) for raw in (1, "a\nb", "x" * 2000)),
        *((kinds.path(), raw) for raw in ("relative", "./x", 1, "/a\nb")),
    ],
)
def test_what_is_no_value_of_a_kind_is_refused(kind: Kind[Any], raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # whoever reads it words the message
        kind.read(raw)


def test_the_documented_file_names_every_key_with_its_default() -> None:
    sections: dict[str, dict[str, object]] = {}
    section = ""
    for line in template().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("# ") and " = " in line:
            name, _, value = line[2:].partition(" = ")
            sections.setdefault(section, {})[name] = tomllib.loads(f"v = {value}")["v"]
    assert all(sections.pop(table) for table in TABLES)
    written = {f"{section}.{name}".lstrip("."): raw for section, keys in sections.items() for name, raw in keys.items()}
    assert written.keys() == KEYS.keys()
    for name, raw in written.items():
        key = KEYS[name]
        assert key.kind.read(raw) == key.default == getattr(Settings(), key.attribute)
    assert tomllib.loads(template()) == {section: {} for section in (*sections, *TABLES) if section}
