"""Tool calls in every format that mlx-lm reads: each once and whole, nothing of it in the text, however it is split."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbcd.model import tool_parsers
from mlxbcd.text.channels import ChannelSplitter
from mlxbcd.text.tools import CallSplitter, Part, ToolCall, ToolFormat

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "look_up")
]
ARGUMENTS: Final = ({"city": "Zürich → 東京", "days": 3}, {"city": "a b", "days": -1})


@dataclass(frozen=True)
class Written:
    """How a format writes calls.

    Attributes:
        call: one call between its own marks.
        wrap: what is around several of them.
    """

    call: Callable[[int, str, dict[str, Any]], str]
    wrap: str = "{}"
    between: str = "\n"


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _each(template: str, arguments: dict[str, Any]) -> str:
    return "".join(template.format(k=key, v=value) for key, value in arguments.items())


def _glm(_: int, name: str, arguments: dict[str, Any]) -> str:
    pairs = _each("<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n", arguments)
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _longcat(_: int, name: str, arguments: dict[str, Any]) -> str:
    pairs = _each("<longcat_arg_key>{k}</longcat_arg_key>\n<longcat_arg_value>{v}</longcat_arg_value>\n", arguments)
    return f"<longcat_tool_call>{name}\n{pairs}</longcat_tool_call>"


def _qwen(_: int, name: str, arguments: dict[str, Any]) -> str:
    pairs = _each("<parameter={k}>\n{v}\n</parameter>\n", arguments)
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _gemma4(_: int, name: str, arguments: dict[str, Any]) -> str:
    return f'<|tool_call>call:{name}{{city:<|"|>{arguments["city"]}<|"|>,days:{arguments["days"]}}}<tool_call|>'


def _function_gemma(_: int, name: str, arguments: dict[str, Any]) -> str:
    inner = f"city:<escape>{arguments['city']}<escape>,days:{arguments['days']}"
    return f"<start_function_call>call:{name}{{{inner}}}<end_function_call>"


def _kimi_k2(index: int, name: str, arguments: dict[str, Any]) -> str:
    inner = f"functions.{name}:{index}<|tool_call_argument_begin|>{_json(arguments)}"
    return f"<|tool_call_begin|>{inner}<|tool_call_end|>"


def _kimi_k3(index: int, name: str, arguments: dict[str, Any]) -> str:
    kinds = {"city": "string", "days": "number"}
    inner = "".join(
        f'<|open|>argument key="{key}" type="{kinds[key]}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>{inner}<|close|>call<|sep|>'


def _minimax(_: int, name: str, arguments: dict[str, Any]) -> str:
    inner = _each('<parameter name="{k}">{v}</parameter>\n', arguments)
    return f'<invoke name="{name}">\n{inner}</invoke>'


def _minicpm5(_: int, name: str, arguments: dict[str, Any]) -> str:
    return f'<function name="{name}">' + _each('<param name="{k}">{v}</param>', arguments) + "</function>"


def _muse(_: int, name: str, arguments: dict[str, Any]) -> str:
    inner = _each('<atem:parameter name="{k}">{v}</atem:parameter>\n', arguments)
    return f'<atem:invoke name="{name}">\n{inner}</atem:invoke>'


def _pythonic(_: int, name: str, arguments: dict[str, Any]) -> str:
    return f"<|tool_call_start|>[{name}(city={arguments['city']!r}, days={arguments['days']})]<|tool_call_end|>"


def _json_tools(_: int, name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'


WRITTEN: Final[dict[str, Written]] = {
    "function_gemma": Written(_function_gemma),
    "gemma4": Written(_gemma4, between=""),
    "glm47": Written(_glm),
    "json_tools": Written(_json_tools),
    "kimi_k2": Written(_kimi_k2, "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", ""),
    "kimi_k3": Written(_kimi_k3, "<|open|>tools<|sep|>{}<|close|>tools<|sep|>", ""),
    "laguna": Written(_glm),
    "longcat": Written(_longcat),
    "minicpm5": Written(_minicpm5),
    "minimax_m2": Written(_minimax, "<minimax:tool_call>\n{}\n</minimax:tool_call>"),
    "mistral": Written(lambda _, name, arguments: f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}", between=""),
    "muse_spark": Written(_muse, "<atem:function_calls>\n{}\n</atem:function_calls>"),
    "pythonic": Written(_pythonic),
    "qwen3_coder": Written(_qwen),
}
FORMATS: Final = sorted(WRITTEN)


def style(name: str) -> ToolFormat:
    parser = tool_parsers.get(name)
    return ToolFormat(parser.name, parser.opening, parser.closing, parser.parse)


def write(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    how = WRITTEN[name]
    return how.wrap.format(how.between.join(how.call(i, *call) for i, call in enumerate(calls)))


def split(name: str, pieces: Sequence[str], stream: str = "s") -> tuple[str, list[ToolCall], list[str]]:
    """Text, calls and what was unparsed."""
    splitter = CallSplitter(style(name), TOOLS, stream)
    parts: list[Part] = [part for piece in pieces for part in splitter.push(piece)]
    parts += splitter.finish()
    assert all(parts), "no text is empty"
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)], splitter.unparsed


def heard(calls: Sequence[ToolCall]) -> list[tuple[int, str, Any]]:
    return [(call.index, call.name, json.loads(call.arguments)) for call in calls]


def test_every_parser_of_mlx_lm_is_tried() -> None:
    assert tool_parsers.names() == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_after_text_is_found_wherever_it_is_split(name: str) -> None:
    whole = "Let me see. " + write(name, [("get_weather", ARGUMENTS[0])])
    for cut in range(len(whole) + 1):
        text, calls, unparsed = split(name, [whole[:cut], whole[cut:]])
        assert text == "Let me see. "
        assert heard(calls) == [(0, "get_weather", ARGUMENTS[0])]
        assert not unparsed


@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_are_found_character_by_character(name: str) -> None:
    whole = write(name, [("get_weather", ARGUMENTS[0]), ("look_up", ARGUMENTS[1])])
    text, calls, unparsed = split(name, list(whole))
    assert text == ""
    assert heard(calls) == [(0, "get_weather", ARGUMENTS[0]), (1, "look_up", ARGUMENTS[1])]
    assert not unparsed
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_there_as_soon_as_it_is_whole(name: str) -> None:
    splitter = CallSplitter(style(name), TOOLS, "s")
    whole = write(name, [("get_weather", ARGUMENTS[0])])
    assert [type(part) for part in splitter.push(whole)] == [ToolCall]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_anywhere_is_reported_and_never_text(name: str) -> None:
    opening = style(name).opening
    whole = write(name, [("get_weather", ARGUMENTS[0])])
    for length in range(len(opening) + 1, len(whole)):
        text, calls, unparsed = split(name, [whole[:length]])
        assert text == ""
        assert not calls
        assert unparsed == [whole[:length]], "as the model wrote it"


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_call_is_not_lost_with_one_that_is_cut_off(name: str) -> None:
    first = write(name, [("get_weather", ARGUMENTS[0])])
    second = write(name, [("look_up", ARGUMENTS[1])])
    text, calls, unparsed = split(name, [first + second[:-2]])
    assert text == ""
    assert heard(calls) == [(0, "get_weather", ARGUMENTS[0])]
    assert unparsed == [second[:-2]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_inside_reasoning_stays_reasoning(name: str) -> None:
    call = write(name, [("get_weather", ARGUMENTS[0])])
    channels = ChannelSplitter(("<think>", "</think>"), inside=True)
    splitter = CallSplitter(style(name), TOOLS, "s")
    thoughts, parts = "", list[Part]()
    for character in f"I could {call} or not.</think>\n\nNo. {call}":
        for channel, text in channels.push(character):
            if channel == "reasoning":
                thoughts += text
            else:
                parts += splitter.push(text)
    assert thoughts == f"I could {call} or not."
    assert "".join(part for part in parts if isinstance(part, str)) == "No. "
    assert heard([part for part in parts if isinstance(part, ToolCall)]) == [(0, "get_weather", ARGUMENTS[0])]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_how_a_text_is_split_changes_nothing(name: str, data: st.DataObject) -> None:
    opening, closing = style(name).opening, style(name).closing
    noise = st.sampled_from(["text", " ", "\n", opening, closing, opening[:2], "{", "}", "[", "]", '"', "a<b"])
    call = st.builds(
        lambda name, days: write(name, [("get_weather", {"city": "x", "days": days})]), st.just(name), st.integers(0, 9)
    )
    whole = "".join(data.draw(st.lists(noise | call, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert split(name, pieces) == split(name, [whole])


def test_ids_are_nine_letters_or_digits_and_follow_from_the_stream() -> None:
    whole = write("json_tools", [("get_weather", ARGUMENTS[0])])
    ids = [split("json_tools", [whole], stream)[1][0].id for stream in ("a", "b", "a")]
    assert ids[0] == ids[2] != ids[1]
    assert all(len(one) == 9 and one.isalnum() and one.isascii() for one in ids)


def test_an_id_of_the_model_is_kept() -> None:
    _, calls, _ = split("kimi_k2", [write("kimi_k2", [("get_weather", ARGUMENTS[0])])])
    assert calls[0].id == "functions.get_weather:0"


def test_a_marker_within_a_string_of_json_does_not_end_the_call() -> None:
    arguments = {"city": "</tool_call> and }", "days": 1}
    _, calls, unparsed = split("json_tools", [write("json_tools", [("get_weather", arguments)])])
    assert heard(calls) == [(0, "get_weather", arguments)]
    assert not unparsed
    arguments = {"city": '[TOOL_CALLS]x[ARGS]{} "]', "days": 1}
    for whole in (
        write("mistral", [("get_weather", arguments)]),
        f"[TOOL_CALLS] {_json([{'name': 'get_weather', 'arguments': arguments}])}",
    ):
        text, calls, unparsed = split("mistral", list(whole))
        assert (text, heard(calls), unparsed) == ("", [(0, "get_weather", arguments)], [])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("json_tools", "<tool_call>[1, 2]</tool_call>"),
        ("json_tools", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("json_tools", "<tool_call>get_weather</tool_call>"),
        ("glm47", "<tool_call></tool_call>"),
        ("longcat", "<longcat_tool_call>nothing</longcat_tool_call>"),
        ("pythonic", "<|tool_call_start|>42<|tool_call_end|>"),
    ],
)
def test_what_makes_no_sense_is_reported(name: str, body: str) -> None:
    text, calls, unparsed = split(name, ["so: ", body, " there"])
    assert (text, calls) == ("so: there", [])
    assert unparsed == [body]


def test_a_call_without_arguments_has_an_empty_object() -> None:
    _, calls, _ = split("json_tools", ['<tool_call>{"name": "look_up"}</tool_call>'])
    assert heard(calls) == [(0, "look_up", {})]
