"""What is told of a model's directory: how it writes calls, and that nothing of a call is hidden from its parser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import pytest
from tiny_directory import EOS, make_tokenizer, write_json
from tokenizers import AddedToken

from mlxbcd.residency.words import Words
from mlxbcd.text.channels import ChannelSplitter
from mlxbcd.text.stage import TextStage
from mlxbcd.text.tools import CallSplitter, ToolCall

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))

from test_tools import ARGUMENTS, FORMATS, TOOLS, heard, write

TEMPLATES: Final = {
    "function_gemma": "<start_function_call>",
    "gemma4": "<|tool_call> <tool_call|>",
    "glm47": "<tool_call> <arg_key>",
    "json_tools": "<tool_call> tool_call.name",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "longcat": "<longcat_tool_call>",
    "minicpm5": '<function name=" <param name="',
    "minimax_m2": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "muse_spark": "<atem:function_calls>",
    "pythonic": "<|tool_list_start|>",
    "qwen3_coder": "<tool_call>\n<function=",
}
"""What a chat template of each format has in it; the others are told otherwise."""
SPECIAL: Final = {
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
}
"""Marks that are special tokens in models of each format, and would have no text."""


def words(directory: Path, name: str) -> Words:
    backend = make_tokenizer()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.get(name, [])])
    backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": EOS, "chat_template": TEMPLATES.get(name, "{{ messages }}")}
    if name == "laguna":
        config["tool_parser_type"] = name
    write_json(directory / "tokenizer_config.json", config)
    return Words.load(directory)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_found_and_its_calls_come_out_token_by_token(tmp_path: Path, name: str) -> None:
    """Every byte of the text is a token of its own, but for special tokens."""
    told = words(tmp_path, name)
    assert told.calls is not None
    assert told.calls.name == name
    tokenizer = told.tokenizer
    stage = TextStage(
        tokenizer,
        (),
        ChannelSplitter(tokenizer.reasoning, inside=False),
        CallSplitter(told.calls, TOOLS, "s"),
    )
    text = "<think>é</think>\nSo: " + write(name, [("get_weather", ARGUMENTS[0]), ("look_up", ARGUMENTS[1])])
    backend = make_tokenizer()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL.get(name, [])])
    tokens = [
        index
        for token in backend.encode(text).ids
        for index in ([token] if token >= 256 + 7 else [backend.token_to_id(c) for c in backend.id_to_token(token)])
    ]
    assert any(token >= 267 for token in tokens)
    pieces = [piece for token in tokens for piece in stage.push(token)] + stage.finish()
    assert "".join(piece for channel, piece in pieces if channel == "reasoning") == "é"
    assert "".join(piece for channel, piece in pieces if channel == "text") == "So: "
    calls = [piece for _, piece in pieces if isinstance(piece, ToolCall)]
    assert heard(calls) == [(0, "get_weather", ARGUMENTS[0]), (1, "look_up", ARGUMENTS[1])]
    assert stage.unparsed == []


def test_other_special_tokens_stay_hidden(tmp_path: Path) -> None:
    told = words(tmp_path, "mistral")
    shown = {told.tokenizer.piece(index) for index in range(told.tokenizer.vocab_size)} - {
        told.tokenizer.piece(index) for index in told.tokenizer.hidden
    }
    assert {"[TOOL_CALLS]", "[ARGS]"} <= shown
    assert not shown & {"<|end|>", "<|user|>", "<|assistant|>"}


@pytest.mark.parametrize("declared", ["../zoo", "nothing", 3, ["x"]])
def test_a_format_that_nobody_knows_is_none(tmp_path: Path, declared: object) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": EOS, "tool_parser_type": declared})
    assert Words.load(tmp_path).calls is None
