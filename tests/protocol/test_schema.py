"""The published schema says what the wire does."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from mlxbc import schema, wire

PUBLISHED: dict[str, Any] = msgspec.json.decode(schema.PATH.read_bytes())
MESSAGES: tuple[type[msgspec.Struct], ...] = typing.get_args(wire.Request) + typing.get_args(wire.Reply)


def test_the_checked_in_schema_is_the_structs() -> None:
    assert schema.PATH.read_text(encoding="utf-8") == schema.render(), "run: python -m mlxbc.schema"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_is_described_with_its_tag_and_fields(message: type[msgspec.Struct]) -> None:
    described = PUBLISHED["$defs"][message.__name__]
    assert described["properties"]["type"] == {"enum": [message.__struct_config__.tag]}
    assert set(described["properties"]) == {"type", *message.__struct_fields__}


@pytest.mark.parametrize("message", typing.get_args(wire.Request), ids=lambda message: message.__name__)
def test_requests_are_closed_and_replies_may_grow(message: type[msgspec.Struct]) -> None:
    # Only hello stays open: a newer client must hear that the protocols differ, not that a field is unknown.
    assert PUBLISHED["$defs"][message.__name__].get("additionalProperties", True) is (message is wire.Hello)
    for reply in typing.get_args(wire.Reply):
        assert "additionalProperties" not in PUBLISHED["$defs"][reply.__name__]


def test_ranges_are_published() -> None:
    fields = PUBLISHED["$defs"]["Generate"]["properties"]
    assert {"type": "number", "minimum": 0, "maximum": 10} in fields["temperature"]["anyOf"]
    assert fields["stop"]["maxItems"] == 16


def test_every_reference_leads_somewhere() -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            here = [node["$ref"]] if "$ref" in node else []
            return here + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    found = set(references(PUBLISHED))
    assert found
    assert found <= {f"#/$defs/{name}" for name in PUBLISHED["$defs"]}
