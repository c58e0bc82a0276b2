"""A value that is one of a few: whoever gets another one is told which there are."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlxbc import request, wire
from mlxbc.cli import options
from mlxbc.cli.structure import structure
from mlxbc.errors import BadRequest
from mlxbc.framing import FrameError, Inbound
from mlxbc.misfit import said

CHAT = {"type": "generate", "id": 7}


def refused_by_the_daemon(message: dict[str, Any], *, msgpack: bool = False) -> FrameError:
    inbound: Inbound[wire.Request] = Inbound(wire.Request)
    if msgpack:
        body = msgspec.msgpack.encode(message)
        data = len(body).to_bytes(4, "big") + body
    else:
        data = msgspec.json.encode(message) + b"\n"
    with pytest.raises(FrameError) as refused:
        list(inbound.feed(data))
    return refused.value


@pytest.mark.parametrize("msgpack", [True, False])
@pytest.mark.parametrize(
    ("message", "ending"),
    [
        (CHAT | {"priority": "high"}, "`$.priority`; it is one of background, interactive, normal"),
        (CHAT | {"cache": "tape"}, "`$.cache`; it is one of disk, none, ram"),
        (CHAT | {"type": "prime", "cache": "tape"}, "`$.cache`; it is one of disk, ram"),
        (CHAT | {"messages": [{"role": "bot"}]}, "`$.messages[0].role`; it is one of assistant, system, tool, user"),
        (CHAT | {"tools": [{"type": "f", "function": {"name": "f"}}]}, "`$.tools[0].type`; it is one of function"),
    ],
)
def test_the_daemon_lists_what_a_field_of_that_message_may_be(
    message: dict[str, Any], ending: str, msgpack: bool
) -> None:
    assert refused_by_the_daemon(message, msgpack=msgpack).message.endswith(ending)


def test_a_message_of_no_known_kind_hears_of_all_kinds() -> None:
    error = refused_by_the_daemon(CHAT | {"type": "genrate"})
    assert error.unknown_kind
    assert "`$.type`; it is one of hello, generate, explain, prime, cancel" in error.message


def test_other_mistakes_are_told_as_they_were() -> None:
    assert refused_by_the_daemon(CHAT | {"n": 17}).message.endswith("Expected `int` <= 16 - at `$.n`")
    assert refused_by_the_daemon(CHAT | {"priority": 1}).message.endswith("got `int` - at `$.priority`")


def test_what_is_quoted_of_the_value_points_nowhere_else() -> None:
    error = refused_by_the_daemon(CHAT | {"priority": "x` - at `$.cache"})
    assert error.message.endswith("at `$.priority`; it is one of background, interactive, normal")


def test_a_client_lists_it_before_anything_is_sent() -> None:
    with pytest.raises(BadRequest, match=r"one of background, interactive, normal$"):
        request.build(wire.Generate, 1, prompt="x", priority="high")


def test_an_option_of_the_command_lists_it() -> None:
    with pytest.raises(ValueError, match=r"^option cache is one of disk, none, ram, not 'tape'$"):
        options.parse([["cache", "tape"]])


def test_a_file_of_tools_lists_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tools.json"
    file.write_text('[{"type": "tool", "function": {"name": "f"}}]')
    with pytest.raises(SystemExit):
        structure(ArgumentParser(), Namespace(schema=None, grammar=None, tools=str(file)))
    assert "at `$[0].type`; it is one of function\n" in capsys.readouterr().err


def test_a_value_deep_in_a_mapping_is_found() -> None:
    kind = dict[str, list[wire.Message | None]]
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert({"a": [None, {"role": "bot"}]}, kind)
    assert said(refused.value, kind).endswith("; it is one of assistant, system, tool, user")
