"""Owns schemas to try: JSON Schemas of every kind that grammars take, nested, recursive and beyond ASCII."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

Schema = dict[str, Any]

TEXTS: Final = st.text(st.sampled_from('ab Z09-_"\\/\n\té東😀\u2028'), max_size=6)
KEYS: Final = st.text(st.sampled_from('abc$ "\\é東~/'), min_size=1, max_size=4)
VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def _strings(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + draw(st.integers(0, 6))}


@st.composite
def _integers(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(-200, 200))
    return {"type": "integer", "minimum": least, "maximum": least + draw(st.integers(0, 500))}


@st.composite
def _numbers(draw: st.DrawFn) -> Schema:
    least = draw(st.integers(-50, 50))
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + draw(st.integers(1, 60))}


LEAVES: Final = st.one_of(
    _strings(),
    _integers(),
    _numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from(["^[a-c]{2,5}$", "^\\d{3}-\\d{2}$", "^(é|東)+x?$", "^a"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(KEYS, inner, max_size=4))
    required = [key for key in properties if draw(st.booleans())]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if draw(st.booleans()):
        schema["additionalProperties"] = False
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    schema: Schema = {"type": "array", "items": draw(inner), "minItems": least}
    schema["maxItems"] = least + draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return schema


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        _objects(inner), _arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    )


@st.composite
def _recursive(draw: st.DrawFn) -> Schema:
    """A tree, or a list of itself, by reference."""
    node: Schema = {
        "type": "object",
        "properties": {
            draw(KEYS): draw(LEAVES),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": draw(st.sampled_from([[], ["next"], ["next", "kids"]])),
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


SCHEMAS: Final = st.one_of(st.recursive(LEAVES, _nested, max_leaves=6), _recursive())
