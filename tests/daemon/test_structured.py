"""A real daemon and a real model: outputs with a form beside outputs without one."""

from __future__ import annotations

import json
from typing import Any, Final

import jsonschema
import pytest
from real_daemon import Daemon, Fields

from mlxbc.errors import GrammarInvalid
from mlxbc.result import Result

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "fields": {"type": "array", "items": {"enum": ["mathematics", "poetry", "physics"]}, "maxItems": 2},
    },
    "required": ["name", "born", "fields"],
    "additionalProperties": False,
}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "resumable": True, **fields}


ASKED: Final[list[Fields]] = [
    chat("Who was Ada Lovelace?", schema=PERSON, temperature=0.7, seed=3),
    chat("Tell me of a lighthouse.", temperature=0.0, max_tokens=24),
    chat("Is the sky blue?", choice=["yes", "no"], temperature=0.0),
    {"prompt": "1, 2, 3,", "regex": r"( \d{1,2},){5}", "temperature": 0.0, "max_tokens": 40, "resumable": True},
    chat("Tell me of a ship.", temperature=1.0, seed=1, max_tokens=24),
    {"fim": {"prefix": "def add(a, b):\n    return ", "single_line": True}, "max_tokens": 12, "resumable": True},
]


def together(daemon: Daemon, asked: list[Fields]) -> list[Result]:
    with daemon.client() as client:
        streams = [client.generate(**fields) for fields in asked]
        return [stream.wait() for stream in streams]


def test_outputs_have_their_form_and_nobody_minds(shared: Daemon) -> None:
    crowd = together(shared, ASKED)
    for number in (0, 1, 5):
        (one,), other = together(shared, [ASKED[number]]), crowd[number]
        assert (one.text, one.ids, one.reason) == (other.text, other.ids, other.reason)
    person, _, sky, count, _, line = crowd
    jsonschema.validate(json.loads(person.text), PERSON)
    assert sky.text in ("yes", "no")
    assert count.text.split() == ["4,", "5,", "6,", "7,", "8,"]
    assert "\n" not in line.text
    assert line.text == line.text.rstrip()


def test_a_bad_grammar_costs_nobody_else_anything(shared: Daemon) -> None:
    with shared.client() as client:
        story = client.generate(**chat("Tell me of gold.", temperature=0.0, max_tokens=16))
        with pytest.raises(GrammarInvalid, match="column 3") as refused:
            client.ask("x", regex="ab(c")
        assert refused.value.data == {"column": 3}
        assert len(story.wait().ids) == 16
