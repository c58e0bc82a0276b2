"""Owns the protocol's JSON Schema: generated from the wire's Structs, never written by hand.

`python -m mlxbc.schema` rewrites the checked-in copy beside this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mlxbc import wire

PATH = Path(__file__).with_name("protocol.schema.json")


def schema() -> dict[str, Any]:
    """A schema that every message of the protocol satisfies; `$defs` has an entry for each kind of them."""
    (request, reply), definitions = msgspec.json.schema_components(
        (wire.Request, wire.Reply), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mlxbc protocol {wire.PROTOCOL}",
        "anyOf": [{"$ref": "#/$defs/Request"}, {"$ref": "#/$defs/Reply"}],
        "$defs": {
            "Request": {"description": "From a client to the daemon.", **request},
            "Reply": {"description": "From the daemon to a client.", **reply},
            **definitions,
        },
    }


def render() -> str:
    """The schema as the text of a file."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
