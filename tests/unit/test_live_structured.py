"""What a request can ask of its output, through the whole service: grammars, calls, thinking, places in files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from test_live import Asked, House, housed
from tiny_directory import EOS, TEMPLATE, make_tokenizer, write_json, write_model
from tokenizers import AddedToken, Tokenizer

from mlxbc import wire
from mlxbcd.errors import ServeError
from mlxbcd.text.fim import STYLES

THINKS: Final = {"fields": ["thinking"]}
TOOLS: Final = [
    wire.Tool(
        function=wire.Function(
            name=name,
            description="-",
            parameters={
                "type": "object",
                "properties": {"city": {"enum": ["Zürich", "東京"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        )
    )
    for name in ("get_weather", "look_up")
]
CALLING: Final = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for tool_call in message.tool_calls %}{% set tool_call = tool_call.function %}"
    "<tool_call>{{ tool_call.name }} {{ ARGUMENTS }}</tool_call>{% endfor %}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking %}<think>{% endif %}"
)
"""A template with tools. What it makes of arguments decides which form of them it takes."""
FIM: Final = STYLES[0]
Ask = dict[str, Any]


def write(directory: Path, template: str, extra: tuple[str, ...] = ()) -> None:
    write_model(directory, seed=2)
    write_json(directory / "tokenizer_config.json", {"eos_token": EOS, "chat_template": template})
    backend = make_tokenizer()
    backend.add_tokens([AddedToken(token, special=False) for token in extra])
    backend.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that can call tools, that can't, and one that fills in middles."""
    models = tmp_path_factory.mktemp("data") / "models"
    write(models / "calls", CALLING.replace("ARGUMENTS", "tool_call.arguments | tojson"))
    write(models / "concatenates", CALLING.replace("ARGUMENTS", "'=' + tool_call.arguments"))
    write(models / "plain", TEMPLATE)
    write(models / "unthinking", "{% for message in messages %}{{ message.content }}{% endfor %}")
    write(models / "fills", TEMPLATE, FIM.tokens + FIM.ends)
    return models.parent


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house(store: Path) -> AsyncIterator[House]:
    async with housed(store, warm=False) as house:
        yield house
        await house.empty()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def chat(text: str = "hi", **fields: Any) -> Ask:
    return {"model": "calls", "messages": [wire.Message(role="user", content=text)], "temperature": 1.0, **fields}


async def answer(house: House, **fields: Any) -> Asked:
    """A request that has ended well."""
    asked = house.ask(**{"seed": 5, "max_tokens": 80} | fields)
    done = await asked.end()
    assert isinstance(done, wire.Done), done
    return asked


async def refused(house: House, **fields: Any) -> wire.Error:
    """The error of a request, whether it was refused at once or later."""
    try:
        error = await house.ask(**{"seed": 5} | fields).end()
    except ServeError as early:
        return wire.Error(id=1, code=early.code, message=early.message, data=early.data)
    assert isinstance(error, wire.Error), error
    return error


def calls(asked: Asked) -> list[wire.ToolCall]:
    return [frame.call for frame in asked.of(wire.Token) if frame.call is not None]


# -- grammars


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"schema": {"enum": [["é", 1], {"a": None}]}}, lambda text: json.loads(text) in (["é", 1], {"a": None})),
        ({"regex": "[ab]{5}<think>x"}, lambda text: len(text) == 13 and text.endswith("<think>x")),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "<" /[xy]{3}/ ">"'}, lambda text: text[0] + text[-1] == "<>" and len(text) == 5),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
async def test_the_text_is_what_was_asked_for(house: House, fields: Ask, good: Any, raw: bool) -> None:
    source = {"model": "plain", "prompt": "hi"} if raw else chat(model="plain", thinking=False)
    asked = await answer(house, **source, **fields)
    assert asked.frames[-1].reason == "stop"
    assert good(asked.text())
    assert not asked.text("reasoning")


async def test_a_grammar_comes_after_reasoning(house: House) -> None:
    asked = await answer(house, **chat(thinking=True, thinking_budget=4), choice=["yes", "no"])
    assert asked.text() in ("yes", "no")
    assert asked.frames[-1].usage.generated <= 4 + 1 + 3 + 1


async def test_several_candidates_follow_the_grammar_each(house: House) -> None:
    asked = await answer(house, prompt="hi", model="plain", n=4, regex="[a-z]{6}", temperature=2.0)
    texts = [
        "".join(frame.text for frame in asked.of(wire.Token) if frame.candidate == candidate) for candidate in range(4)
    ]
    assert all(len(text) == 6 and text.isalpha() for text in texts)
    assert len(set(texts)) > 1


async def test_many_grammars_at_once_give_what_each_gives_alone(house: House) -> None:
    asks = [
        {"prompt": f"p{i}", "model": "plain", "temperature": 1.0, "seed": i, "max_tokens": 20} | fields
        for i, fields in enumerate(
            [
                {"regex": "[abc]+"},
                {"schema": {"type": "array", "items": {"type": "boolean"}}},
                {},
                {"choice": ["x", "y"]},
            ]
        )
    ]
    alone = [(await answer(house, **ask)).ids for ask in asks]
    together = [house.ask(**ask) for ask in asks]
    for asked, ids in zip(together, alone, strict=True):
        await asked.end()
        assert asked.ids == ids


@pytest.mark.parametrize(
    ("fields", "code", "says", "data"),
    [
        (
            {"schema": {"properties": {"a": {"type": "x"}}}},
            "grammar_invalid",
            "#/properties/a",
            {"at": "#/properties/a"},
        ),
        ({"regex": "a("}, "grammar_invalid", "column 2", {"column": 2}),
        ({"grammar": "start: b"}, "grammar_invalid", "line 1", {"line": 1, "column": 8}),
        ({"grammar": "start: b", "regex": "a"}, "bad_request", "one of them", {}),
        ({"schema": True, "tools": TOOLS}, "bad_request", "no room for calls", {}),
        ({"tool_choice": "required"}, "bad_request", "needs tools", {}),
        ({"tools": TOOLS, "tool_choice": "nobody"}, "bad_request", "one of the tools", {}),
        ({"tools": TOOLS * 2}, "bad_request", "get_weather", {}),
        ({"tools": TOOLS, "model": "plain"}, "bad_request", "no place for tools", {}),
        (
            {"thinking": True, "template_options": {"enable_thinking": True}},
            "bad_request",
            "leave thinking out",
            THINKS,
        ),
        ({"thinking": True, "model": "unthinking", "thinking_budget": 3}, "bad_request", "thinking off", THINKS),
    ],
)
async def test_what_makes_no_sense_is_refused(house: House, fields: Ask, code: str, says: str, data: Ask) -> None:
    if fields.get("model") == "unthinking":
        fields = fields | {"thinking": False}
    error = await refused(house, **chat(**fields))
    assert (error.code, {name: value for name, value in error.data.items() if name != "why"}) == (code, data)
    assert error.message.startswith(error.data.get("why", ""))
    assert says in error.message


@pytest.mark.parametrize("cut", [0, 6])
async def test_a_resumed_output_follows_its_grammar_on(house: House, cut: int) -> None:
    ask = chat(schema={"type": "array", "items": {"enum": ["ä", True]}, "minItems": 2, "maxItems": 5})
    whole = await answer(house, **ask)
    stream = whole.of(wire.Accepted)[0].stream
    known = whole.ids[:cut]
    rest = await answer(house, **ask, resume=wire.Resume(stream=stream, tokens=known))
    assert known + rest.ids == whole.ids
    assert rest.frames[-1].reason == whole.frames[-1].reason
    done = await answer(house, **ask, resume=wire.Resume(stream=stream, tokens=whole.ids))
    assert done.ids == []
    error = await refused(house, **ask, resume=wire.Resume(stream=stream, tokens=[5, 5, 5]))
    assert error.code == "bad_request"
    assert "resume" in error.message


# -- tools


@pytest.mark.parametrize("choice", ["required", "look_up"])
async def test_a_required_call_comes_whole_and_never_as_text(house: House, choice: str) -> None:
    asked = await answer(house, **chat(tools=TOOLS, tool_choice=choice, thinking=False, max_tokens=150))
    (call, *_) = calls(asked)
    assert call.index == 0
    assert call.name in ([choice] if choice == "look_up" else ["get_weather", "look_up"])
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Zürich", "東京")
    assert arguments["days"] <= 9
    assert len(call.id) == 9
    assert "tool_call>" not in asked.text()
    assert sum(frame.n for frame in asked.of(wire.Token)) == len(asked.ids)
    assert asked.frames[-1].unparsed == []


async def test_a_call_that_is_cut_off_is_reported(house: House) -> None:
    asked = await answer(house, **chat(tools=TOOLS, tool_choice="look_up", thinking=False, max_tokens=30))
    done = asked.frames[-1]
    assert done.reason == "length"
    assert calls(asked) == []
    assert asked.text() == ""
    assert done.unparsed == ['<tool_call>\n{"name": "look_up"']


async def test_a_resumed_call_is_the_same_call(house: House) -> None:
    ask = chat(tools=TOOLS, tool_choice="required", thinking=False, max_tokens=150)
    whole = await answer(house, **ask)
    assert calls(whole)
    stream = whole.of(wire.Accepted)[0].stream
    rest = await answer(house, **ask, resume=wire.Resume(stream=stream, tokens=whole.ids[:40]))
    assert calls(rest) == calls(whole)


async def test_without_tools_a_marker_is_text(house: House) -> None:
    call = "<tool_call>{}</tool_call>"
    asked = await answer(house, **chat(tools=TOOLS, tool_choice="none", thinking=False, choice=[call]))
    assert asked.text() == call


@pytest.mark.parametrize(("model", "form"), [("calls", '{"a": "é"}'), ("concatenates", '={"a":"é"}')])
async def test_earlier_calls_and_their_results_reach_the_template(house: House, model: str, form: str) -> None:
    messages = [
        wire.Message(role="user", content="q"),
        wire.Message(role="assistant", tool_calls=[wire.PastCall(id="123456789", name="f", arguments='{"a":"é"}')]),
        wire.Message(role="tool", content="42", tool_call_id="123456789"),
    ]
    tokens = (await house.submit(wire.Tokenize(id=1, model=model, messages=messages)).end()).tokens
    text = make_tokenizer().decode(tokens, skip_special_tokens=False)
    assert text == f"<|user|>q<|end|><|assistant|><tool_call>f {form}</tool_call><|end|><|tool|>42<|end|><|assistant|>"


async def test_definitions_reach_the_template(house: House) -> None:
    bare = await answer(house, **chat(max_tokens=1))
    full = await answer(house, **chat(tools=TOOLS, max_tokens=1))
    none = await answer(house, **chat(tools=TOOLS, tool_choice="none", max_tokens=1))
    prompts = [asked.frames[-1].usage.prompt for asked in (bare, full, none)]
    assert prompts[0] == prompts[2] < prompts[1]


# -- thinking


async def test_thinking_is_switched_by_the_template_and_ends_at_its_budget(house: House) -> None:
    on = await answer(house, **chat(thinking=True, thinking_budget=6, max_tokens=30))
    off = await answer(house, **chat(thinking=False, max_tokens=30))
    assert on.frames[-1].usage.prompt == off.frames[-1].usage.prompt + 1
    backend = make_tokenizer()
    close = backend.token_to_id("</think>")
    assert close in on.ids[:7]
    assert backend.decode(on.ids[: on.ids.index(close)]).strip().startswith(on.text("reasoning").strip()[:3])


async def test_thinking_that_cannot_be_had_is_refused(house: House) -> None:
    error = await refused(house, **chat(model="unthinking", thinking=False))
    assert "can't turn thinking off" in error.message
    assert (await refused(house, prompt="x", model="plain", thinking=True)).code == "bad_request"


# -- places in files


async def test_a_model_that_fills_in_middles_is_asked_to(house: House) -> None:
    fim = wire.Fim(prefix="def f():\n    ", suffix="\n    return x", path="a.py")
    asked = await answer(house, model="fills", fim=fim, max_tokens=10, explain=True)
    backend = Tokenizer.from_str(make_tokenizer().to_str())
    plan = asked.frames[-1].plan
    assert "infilling" in plan.on
    assert asked.frames[-1].usage.prompt == len(backend.encode(fim.prefix + fim.suffix + "a.py\n").ids) + 4


async def test_a_model_without_tokens_for_a_middle_goes_on_and_says_so(house: House) -> None:
    fim = wire.Fim(prefix="def f():\n    ", suffix="\n    return x", language="python")
    asked = await answer(house, model="plain", fim=fim, max_tokens=10, explain=True, temperature=None)
    raw = await answer(house, model="plain", prompt=fim.prefix, max_tokens=10)
    assert "no tokens for a middle" in asked.frames[-1].plan.off["infilling"]
    assert asked.ids == raw.ids, "greedy unless it says otherwise"


async def test_a_completion_ends_at_the_end_of_its_line_and_has_no_white_space_there(house: House) -> None:
    fim = wire.Fim(prefix="x", single_line=True)
    asked = await answer(house, model="plain", fim=fim, regex="ab  \\n(c|d)")
    assert asked.text() == "ab"
    done = asked.frames[-1]
    assert (done.reason, done.stop) == ("stop", "\n")


async def test_a_file_longer_than_the_context_is_trimmed(house: House) -> None:
    fim = wire.Fim(prefix="line\n" * 500, suffix="rest\n" * 500)
    asked = await answer(house, model="fills", fim=fim, max_tokens=20)
    assert 100 < asked.frames[-1].usage.prompt <= 400 - 256
    prompts = set()
    for fields in ({}, {"max_tokens": 1}):
        asked = await answer(house, **{"model": "fills", "fim": fim, "max_tokens": None} | fields)
        prompts.add(asked.frames[-1].usage.prompt)
    assert len(prompts) == 1
    error = await refused(house, model="fills", fim=fim, max_tokens=5000)
    assert error.code == "context_too_long"


async def test_what_is_for_chats_alone_is_refused_elsewhere(house: House) -> None:
    fim = wire.Fim(prefix="x")
    for fields in ({"tools": TOOLS}, {"thinking_budget": 3}, {"template_options": {"a": 1}}, {"prompt": "y"}):
        assert (await refused(house, model="plain", fim=fim, **fields)).code == "bad_request"


# -- log-probabilities


async def test_the_mean_of_the_log_probabilities_is_told(house: House) -> None:
    asked = await answer(house, model="plain", prompt="hi", logprobs=True, max_tokens=12)
    told = [entry.logprob for frame in asked.of(wire.Token) for entry in frame.logprobs]
    assert asked.frames[-1].mean_logprob == pytest.approx(sum(told) / len(told))
    assert (await answer(house, model="plain", prompt="hi", max_tokens=2)).frames[-1].mean_logprob is None


async def test_a_request_cancelled_while_its_grammar_compiles_ends_once(house: House) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}
    asked = house.ask(**chat(schema=schema), seed=1)
    while not asked.frames:
        await asyncio.sleep(0)
    asked.job.cancel()
    assert (await asked.end()).reason == "cancelled"
