"""Owns the options that say what form an answer has: --schema, --grammar and --tools."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from mlxbc import wire
from mlxbc.misfit import said


def add_structure(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--schema", metavar="FILE", help="answer with JSON that satisfies this JSON Schema")
    form.add_argument("--grammar", metavar="FILE", help="answer with a text of this Lark grammar")
    parser.add_argument("--tools", metavar="FILE", help="functions that the model may call, as a JSON array")


def structure(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `generate` request that they set. A mistake ends the program with a usage error."""
    fields: dict[str, Any] = {}
    if args.schema is not None:
        fields["schema"] = _json(parser, "--schema", args.schema, dict[str, Any] | bool)
    if args.grammar is not None:
        fields["grammar"] = _read(parser, "--grammar", args.grammar).decode("utf-8", "replace")
    if args.tools is not None:
        fields["tools"] = _json(parser, "--tools", args.tools, list[wire.Tool])
    return fields


def calls(tool_calls: list[wire.ToolCall]) -> str:
    """Calls as lines of JSON: name, arguments and id."""
    lines = []
    for call in tool_calls:
        try:
            arguments = msgspec.json.decode(call.arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = call.arguments
        lines.append(msgspec.json.encode({"name": call.name, "arguments": arguments, "id": call.id}).decode() + "\n")
    return "".join(lines)


def _json(parser: argparse.ArgumentParser, option: str, path: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(_read(parser, option, path), type=kind)
    except msgspec.MsgspecError as error:
        parser.error(f"{option} {path}: {said(error, kind)}")
    except RecursionError:
        parser.error(f"{option} {path}: nested too deeply")


def _read(parser: argparse.ArgumentParser, option: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        parser.error(f"{option} {path}: {error.strerror}")
