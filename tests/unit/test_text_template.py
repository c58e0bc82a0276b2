"""Chat templates: the text transformers renders, and no way for a template to hold the daemon up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from mlxbcd.errors import ServeError
from mlxbcd.text.template import ChatTemplate

# The exception that stops a thread can hit it inside a callback of the garbage collector, where it is dropped with a
# warning; the deadline insists until the thread has ended.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")

CHATML = """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for m in messages %}
{{- '<|im_start|>' ~ m['role'] ~ '\\n' + m['content'] | trim ~ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# A header per turn, a date, and tools as indented JSON in the first user turn.
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "2020" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: tools\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}{{- system }}{{- "<|eot|>" }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0] %}
    {%- set messages = messages[1:] %}
    {{- '<|head|>user<|/head|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first.content + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""

# Earlier turns lose their reasoning; a switch closes the block in advance.
THINKING = """{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user"
        and not (message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant, got ' ~ message['role']) }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}
{{ ' ' ~ message['content'] ~ eos_token }}
{%- endif %}
{% endfor %}"""

TAGGED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{% set x = m.content|upper %}
{{ x }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% continue %}never{% endfor %}{{ x is defined }}
"""

FILTERS = """{{ messages|map(attribute='role')|join(', ') }}
{{ [3, 1, 2]|sum }} {{ [[1], [2]]|sum(start=[]) }} {{ 'a-b'|replace('-', '+', 1) }} {{ 'x'|center(5) ~ '|' }}
{{ '%s is %5.2f' % ('pi', 3.14159) }} {{ '%s-%s'|format('a', 2) }} {{ '{:>4}|{x}'.format(7, x='é') }}
{{ 'a\nb'|indent(2, true) }} {% for row in [1, 2, 3]|batch(2, 0) %}{{ row }}{% endfor %} {{ 2 ** 10 }} {{ 3 * 'ab' }}
{{ {'k': ['é', '<b>', none, true]}|tojson }} {{ 'a,b'.split(',') }} {{ dict(a=1) }} {{ (1, 2) * 2 }} {{ [1] + [2] }}
{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('é') ~ 1 ~ none ~ undefined_thing }} {{ ','.join(['a', 'b']) }}
{% set block %}in a block{% endset %}{{ block }} {{ 'a' if messages else 'b' }} {{ 'tab\tx'.expandtabs(4) }}
{% for m in messages %}
{{ '-'.join([m.role, 'x']) }} {{ m.content.replace('e', 'E', 1).ljust(9) }} {{ '{}'.format(loop.index) }}
{{ m.content.strip().split('\n')|length }} {{ m.content|replace('o', '0')|center(30) }}
{% endfor %}"""

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "Zürich <x> & 'y'"}}}]
CHATS = [
    [{"role": "user", "content": "  Hello, 世界 <b>&'  "}],
    [{"role": "system", "content": "Sei kurz."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nuno"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ndos"},
        {"role": "user", "content": "<tool>x</tool>"},
    ],
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference() -> Any:
    """Renders as transformers does."""
    transformers = pytest.importorskip("transformers")
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)

    def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=True, **options
        )

    return render


@pytest.mark.parametrize("messages", CHATS, ids=["one turn", "system", "long"])
@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKING, TAGGED, FILTERS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"tools": TOOLS}, {"bos_token": "<other>"}])
def test_rendering_equals_that_of_transformers(
    reference: Any, source: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    assert ChatTemplate(source, SPECIALS).render(messages, options) == reference(source, messages, **options)


def test_an_alternating_template_renders_or_refuses_in_its_own_words(reference: Any) -> None:
    template = ChatTemplate(ALTERNATING, SPECIALS)
    assert template.render(CHATS[2], {}) == reference(ALTERNATING, CHATS[2])
    with pytest.raises(ServeError, match="Roles must alternate user/assistant, got system") as caught:
        template.render(CHATS[1], {})
    assert caught.value.code == "bad_request"


def test_the_date_is_today() -> None:
    before = datetime.now()
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(CHATS[0], {})
    assert rendered in {f"{moment:%Y-%m-%d}" for moment in (before, datetime.now())}


def test_a_field_that_is_none_counts_as_absent() -> None:
    template = ChatTemplate("{{ messages[0].name is defined }}{{ 'tool_calls' in messages[0] }}", {})
    assert template.render([{"role": "user", "name": None, "tool_calls": None}], {}) == "FalseFalse"


def test_a_model_without_a_template_says_to_send_a_raw_prompt() -> None:
    with pytest.raises(ServeError, match="raw prompt") as caught:
        ChatTemplate(None, {}).render(CHATS[0], {})
    assert caught.value.code == "bad_request"


def test_an_option_cannot_take_the_place_of_the_messages() -> None:
    for name in ("messages", "add_generation_prompt"):
        with pytest.raises(ServeError, match=name):
            ChatTemplate(CHATML, {}).render(CHATS[0], {name: False})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ 'x'|nofilter }}", "line 2"),
        ("{{ nope.deeper }}", "'nope' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{{ namespace(__init__=1) }}", "__init__"),
        ("{% include 'x' %}", "no loader"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ missing | tojson }}", "not JSON"),
    ],
)
def test_a_template_that_fails_says_how(source: str, words: str) -> None:
    template = ChatTemplate(source, {})
    for _ in range(2):
        with pytest.raises(ServeError, match=words) as caught:
            template.render(CHATS[0], {})
        assert caught.value.code == "bad_request"


def growing(first: str, step: str, result: str = "''") -> str:
    """A template that applies a doubling step sixty times."""
    loop = "{% for i in range(60) %}{% set ns.v = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(v=" + first + ") %}" + loop + "{{ " + result + " }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10 ** 10 }}",
        "{% set x = [0] * 10 ** 9 %}",
        "{{ 10 ** (10 ** 10) }}",
        growing("3", "ns.v * ns.v", "ns.v"),
        growing("'x'", "ns.v + ns.v"),
        growing("'x'", "ns.v ~ ns.v"),
        growing("[1]", "ns.v + ns.v"),
        growing("'x'", "ns.v.replace('x', 'xx')"),
        growing("'x'", "ns.v | replace('x', 'xx')"),
        growing("'x'", "[ns.v, ns.v] | join"),
        growing("'x'", "ns.v.join(['', '', '', ''])"),
        growing("'x'", "'%s%s' % (ns.v, ns.v)"),
        growing("'x'", "'{0}{0}'.format(ns.v)"),
        growing("'x'", "'{a}{a}'.format_map({'a': ns.v})"),
        growing("'x'", "ns.v.translate({120: 'xx'})"),
        "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% macro m() %}{% for i in range(99999) %}{{ 'x' * 9999999 }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% set b %}{% for i in range(99999) %}{{ 'x' * 9999999 }}{% endfor %}{% endset %}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ ('\\n' * 10000) | indent(10 ** 6) }}",
        "{{ ('\\t' * 10000).expandtabs(10 ** 6) }}",
        "{{ [[1]] | tojson(indent=10 ** 9) }}",
        "{{ ([[0] * 999999] * 99) | sum(start=[]) }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        growing("'x' * 99999", "[ns.v, ns.v] if i < 9 else ns.v", "ns.v"),
    ],
)
def test_one_step_cannot_make_a_huge_value(source: str) -> None:
    with pytest.raises(ServeError, match="too much text"):
        ChatTemplate(source, {}, seconds=20).render(CHATS[0], {})


def test_a_value_that_is_astronomically_long_when_written_out_is_not_written_out() -> None:
    for use in ("ns.v", "ns.v | tojson", "ns.v ~ ''", "ns.v | string", "'%s' % (ns.v,)"):
        with pytest.raises(ServeError, match="longer than"):
            ChatTemplate(growing("[1]", "[ns.v, ns.v]", use), {}, seconds=0.1).render(CHATS[0], {})


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3


def test_nested_loops_are_stopped_after_two_seconds_and_the_template_stays_usable() -> None:
    template = ChatTemplate("{% if slow %}" + NESTED + "{% endif %}ok", {})
    begun = time.monotonic()
    with pytest.raises(ServeError, match="longer than 2 s") as caught:
        template.render(CHATS[0], {"slow": True})
    assert caught.value.code == "bad_request"
    assert 2 <= time.monotonic() - begun < 10
    assert template.render(CHATS[0], {}) == "ok"
    assert not [thread for thread in threading.enumerate() if thread.name == "mlxbcd-deadline"]


def test_compiling_is_limited_too() -> None:
    slow = "{{ x }}" * 20_000
    with pytest.raises(ServeError, match="longer than"):
        ChatTemplate(slow, {}, seconds=0.02).render(CHATS[0], {})


def test_renderings_at_once_do_not_disturb_each_other() -> None:
    template = ChatTemplate("{% if slow %}" + NESTED + "{% endif %}" + CHATML, {}, seconds=0.3)

    def render(number: int) -> str:
        try:
            return template.render([{"role": "user", "content": str(number)}], {"slow": number % 3 == 0})
        except ServeError as error:
            return error.message

    with ThreadPoolExecutor(4) as pool:
        rendered = list(pool.map(render, range(12)))
    for number, text in enumerate(rendered):
        assert ("longer than" if number % 3 == 0 else f"user\n{number}<|im_end|>") in text


def test_a_long_conversation_renders_well_within_the_limit() -> None:
    messages = [{"role": "user", "content": "words and more words " * 20} for _ in range(2_000)]
    assert len(ChatTemplate(CHATML, {}).render(messages, {})) > 800_000
