"""Owns what an OpenAI request means: fields of `wire.Generate`, or a refusal that names the field. Pure.

Nothing is accepted and ignored. A field that asks for something this daemon doesn't do is refused, unless its value
asks for what happens anyway (`store: false`); the few that only name the caller are in `asked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from mlxbc import wire
from mlxbc.http import conversing
from mlxbc.http.asked import Chat, Completion, Stop
from mlxbc.http.conversing import refused

DEFAULT: Final = "default"
"""The model's name for whoever has to name one and has no wish."""

_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "n",
    "keep_alive",
)
"""Fields that mean the same and are called the same."""

_TIERS: Final[Mapping[str, wire.Priority | None]] = {
    "auto": None,
    "default": None,
    "flex": "background",
    "priority": "interactive",
}
"""OpenAI's classes of service, as priorities."""

_ELSEWISE: Final[Mapping[str, str]] = {
    "thinking": "reasoning_effort",
    "thinking_budget": "reasoning_effort",
    "template_options": "chat_template_kwargs",
    "schema": "response_format",
    "tool_choice": "tool_choice",
    "echo": "prediction",
    "priority": "service_tier",
    "session": "prompt_cache_key",
    "fim": "suffix",
}
"""Fields of the wire that are made of one parameter, and what that is called."""

_ANYWAY: Final[Mapping[str, tuple[Any, ...]]] = {
    "modalities": (["text"],),
    "store": (False,),
    "verbosity": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "web_search_options": (),
}
"""Fields that this endpoint cannot act on, and their values that ask for what happens anyway."""


class Order(Struct, frozen=True, kw_only=True):
    """What is to be generated, and what of it the client wants to see.

    Attributes:
        generate: the fields of a `generate` request, once for each prompt.
        n: how many choices each of them has.
        model: as it was asked for; None is the default one.
        stream: as it comes, rather than at the end.
        usage: the stream ends with the counts of tokens.
        logprobs: the response has log-probabilities.
        prefixes: texts that go before those of each prompt.
        single_call: a response ends with its first tool call.
        predicted: the client said what the answer may be, and wants to know how right that was.
        called: what the client calls fields of `generate`, for errors about them.
    """

    generate: list[dict[str, Any]]
    n: int
    model: str | None
    stream: bool
    usage: bool
    logprobs: bool
    prefixes: list[str]
    single_call: bool
    predicted: bool
    called: Mapping[str, str]


def chat(body: Chat) -> Order:
    """What a chat completion asks for.

    Raises:
        Refused: it can't be done.
    """
    _refuse_what_is_not_done(body)
    fields = _sampling(body)
    fields |= {"messages": conversing.messages(body.messages), **conversing.tools(body)}
    fields |= {**conversing.response_format(body.response_format), **conversing.effort(body.reasoning_effort)}
    if body.chat_template_kwargs:
        fields["template_options"] = body.chat_template_kwargs
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if limit is not None:
        fields["max_tokens"] = limit
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs: true")
    if body.service_tier is not None:
        if body.service_tier not in _TIERS:
            raise refused("service_tier", f"service_tier is one of {', '.join(_TIERS)}")
        if (priority := _TIERS[body.service_tier]) is not None:
            fields["priority"] = priority
    if (predicted := conversing.prediction(body.prediction)) is not None:
        fields["echo"] = [predicted]
    single = bool(body.tools) and body.parallel_tool_calls is False
    return _order(
        body, [fields], logprobs=bool(body.logprobs), single_call=single, predicted=body.prediction is not None
    )


def completion(body: Completion) -> Order:
    """What a completion of raw text asks for.

    Raises:
        Refused: it can't be done.
    """
    _refuse_what_is_not_done(body)
    prompts = _prompts(body.prompt)
    fields = _sampling(body)
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    if body.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.logprobs}
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("best_of", "all that is drawn is returned; leave best_of out, or make it n")
    if body.echo and body.logprobs is not None:
        raise refused("echo", "the prompt's own log-probabilities are not computed; leave echo or logprobs out")
    return _order(
        body,
        [{**fields, **_source(prompt, body.suffix)} for prompt in prompts],
        logprobs=body.logprobs is not None,
        prefixes=prompts if body.echo else None,
    )


def _order(
    body: Chat | Completion,
    generate: list[dict[str, Any]],
    *,
    logprobs: bool,
    prefixes: list[str] | None = None,
    single_call: bool = False,
    predicted: bool = False,
) -> Order:
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "stream_options needs stream: true")
    if options is not None and options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "there is no padding against listeners; leave it out")
    model = None if body.model in (None, "", DEFAULT) else body.model
    called = {field: name for field, name in _ELSEWISE.items() if any(field in fields for fields in generate)}
    if isinstance(body, Chat) and body.max_completion_tokens is not None:
        called["max_tokens"] = "max_completion_tokens"
    elif body.max_tokens is not None:
        called["max_tokens"] = "max_tokens"
    for fields in generate:
        if model is not None:
            fields["model"] = model
    return Order(
        generate=generate,
        n=body.n or 1,
        model=model,
        stream=bool(body.stream),
        usage=options is not None and bool(options.include_usage),
        logprobs=logprobs,
        prefixes=prefixes or [""] * len(generate),
        single_call=single_call,
        predicted=predicted,
        called=called,
    )


def _sampling(body: Chat | Completion) -> dict[str, Any]:
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if stop := _stop(body.stop):
        fields["stop"] = stop
    if body.prompt_cache_key:
        fields["session"] = body.prompt_cache_key
    return fields


def _stop(stop: Stop | None) -> list[str]:
    return [] if stop is None else [stop] if isinstance(stop, str) else stop


def _source(prompt: str, suffix: str | None) -> dict[str, Any]:
    return {"fim": wire.Fim(prefix=prompt, suffix=suffix)} if suffix else {"prompt": prompt}


def _prompts(prompt: str | list[Any] | None) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise refused("prompt", "give a prompt: a text, or a list of texts")
    if not all(isinstance(one, str) for one in prompt):
        raise refused("prompt", "prompts of token ids are not supported; send text")
    if len(prompt) > 64:
        raise refused("prompt", "one request has at most 64 prompts; send several")
    return prompt


def _refuse_what_is_not_done(body: Chat | Completion) -> None:
    for name, fine in _ANYWAY.items():
        value = getattr(body, name, None)
        if value is not None and value not in fine:
            raise refused(name, f"{name} is not supported here{_instead(fine)}; leave it out")


def _instead(fine: tuple[Any, ...]) -> str:
    return f" other than {' or '.join(repr(value) for value in fine)}" if fine else ""
