"""Owns the options that describe a generation: -s, -m and -o, the same for every command that has them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, fields

from mlxbc import wire

_NOT_OPTIONS = frozenset(
    {
        "id",
        "messages",
        "prompt",
        "fim",
        "tools",
        "tool_choice",
        "model",
        "n",
        "explain",
        "supersede",
        "resumable",
        "resume",
        "on_disconnect",
        "keep_s",
    }
)
"""Fields of `generate` that arguments or other options stand for, or that only a program can use."""


def model_name(text: str) -> str:
    """A model's name as the daemon knows it: what looks like a path is made absolute.

    The daemon has another working directory, and another idea of `./model`.
    """
    if not text:
        raise argparse.ArgumentTypeError("a model's name is not empty")
    if text.startswith(("./", "../", "/", "~/")) or text in (".", "..") or text.endswith(".gguf"):
        return os.path.abspath(os.path.expanduser(text))
    return text


def keep_alive(text: str) -> float:
    """Seconds of a duration as people write it: `30s`, `5m`, `2h`, `0`, `forever`; the last is -1 on the wire."""
    if text == "forever":
        return -1.0
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    digits = text[:-1] if unit else text
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 30s, 5m, 2h, 0 or forever")
    return float(int(digits) * (unit or 1))


def add_keep_alive(parser: argparse.ArgumentParser) -> None:
    """Add --keepalive."""
    parser.add_argument(
        "--keepalive",
        type=keep_alive,
        metavar="TIME",
        help="how long the model stays in memory without a request: 30s, 5m, 2h, 0 or forever (default: as it is)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add -m."""
    parser.add_argument(
        "-m",
        "--model",
        type=model_name,
        metavar="NAME",
        help="a name that mlxbc models lists, or a path such as ./model (default: the daemon's own choice)",
    )


def add_generation(parser: argparse.ArgumentParser) -> None:
    """Add -m and -o."""
    add_model(parser)
    parser.add_argument(
        "-o",
        "--option",
        nargs=2,
        action="append",
        default=[],
        metavar=("KEY", "VALUE"),
        help="set one option of the generation; may be repeated. Keys: " + ", ".join(sorted(names())),
    )


def add_system(parser: argparse.ArgumentParser) -> None:
    """Add -s."""
    parser.add_argument("-s", "--system", metavar="TEXT", help="the system prompt")


def check_markdown(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program where --md can't be done."""
    if args.md:
        from importlib.util import find_spec

        if find_spec("rich") is None:
            parser.error("--md needs the package rich; in mlxbc's checkout: pip install '.[md]'")


def generation(parser: argparse.ArgumentParser, args: argparse.Namespace, *, logprobs: bool = False) -> dict[str, Any]:
    """The fields of a `generate` request that -m and -o set.

    Args:
        logprobs: the command can show log-probabilities, so asking for them makes sense.

    A mistake ends the program with a usage error that names it.
    """
    try:
        chosen = parse(args.option)
    except ValueError as error:
        parser.error(str(error))
    if not logprobs and chosen.keys() & {"logprobs", "top_logprobs"}:
        parser.error("log-probabilities are shown by mlxbc ask --json only")
    if args.model is not None:
        chosen["model"] = args.model
    if getattr(args, "keepalive", None) is not None:
        chosen["keep_alive"] = args.keepalive
    return chosen


def parse(pairs: list[list[str]]) -> dict[str, Any]:
    """Typed values of `(key, text)` pairs, checked against `wire.Generate`.

    A list is built by repeating its key, an object is written as JSON, anything else as on any command line.

    Raises:
        ValueError: an unknown key, a value of the wrong type or out of range, or a key given twice.
    """
    values: dict[str, Any] = {}
    if not pairs:
        return values
    choices = _choices()
    for key, text in pairs:
        if key not in choices:
            raise ValueError(_unknown(key, choices))
        is_list = _shape(choices[key].type) is list
        if key in values and not is_list:
            raise ValueError(f"option {key} is given twice")
        try:
            if is_list:
                values[key] = msgspec.convert([*values.get(key, []), text], choices[key].type)
            elif _shape(choices[key].type) is dict:
                values[key] = msgspec.json.decode(text, type=choices[key].type)
            else:
                values[key] = msgspec.convert(text, choices[key].type, strict=False)
        except msgspec.MsgspecError:
            from mlxbc.cli.kinds import misfit

            raise ValueError(f"option {key} {misfit(choices[key].type, text)}") from None
        except RecursionError:
            raise ValueError(f"option {key} is nested too deeply") from None
        except UnicodeEncodeError:
            raise ValueError(f"option {key} is not UTF-8") from None
    return values


def names() -> list[str]:
    return [name for name in wire.Generate.__struct_fields__ if name not in _NOT_OPTIONS]


def _choices() -> dict[str, FieldInfo]:
    """Types and all: what a command without -o has no time to look at."""
    return {field.name: field for field in fields(wire.Generate) if field.name not in _NOT_OPTIONS}


def _shape(kind: Any) -> Any:
    """The container that a field's type is, below its annotations: list, dict, or something without parts."""
    if get_origin(kind) is Annotated:
        return _shape(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return next((shape for shape in map(_shape, get_args(kind)) if shape), None)
    return get_origin(kind)


def _unknown(key: str, choices: Mapping[str, object]) -> str:
    from difflib import get_close_matches

    name, equals, value = key.partition("=")
    if equals and name in choices:
        return f"unknown option {key}; key and value are two words: -o {name} {value}"
    near = get_close_matches(key.replace("-", "_"), choices, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(choices))}"
    return f"unknown option {key}; {hint}"
