"""Owns freezing: from a request on the wire to the immutable one the engine runs, or a refusal that says why. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

from mlxbc import wire
from mlxbcd.errors import ServeError, unmet
from mlxbcd.plan.request import Constraint, Priority, Request, Sampling
from mlxbcd.plan.resolve import Draft, Needs

_STREAM: Final = re.compile(r"[0-9A-Za-z]+")

_LEAST_REPETITION_PENALTY: Final = 1e-6
"""Lower ones act as this one: a logit divided by much less overflows float32, and every seen token is ahead by then."""


def check(request: wire.Generate) -> None:
    """What can be refused before any model is known.

    Raises:
        ServeError: bad_request.
    """
    if sum(source is not None for source in (request.messages, request.prompt, request.fim)) != 1:
        raise ServeError("bad_request", "generate takes exactly one of messages, prompt and fim")
    _check_chat(request)
    _check_constraints(request)
    if request.top_logprobs and not request.logprobs:
        raise ServeError("bad_request", "top_logprobs needs logprobs: true")
    if request.on_disconnect == "keep" and not request.resumable:
        raise ServeError("bad_request", "on_disconnect keep needs resumable: true, or nobody could come back for it")
    if request.keep_s is not None and request.on_disconnect != "keep":
        raise ServeError("bad_request", "keep_s needs on_disconnect: keep")
    if request.resume is not None and not _STREAM.fullmatch(request.resume.stream):
        # It is written to the log, where nothing that a client makes up should be.
        raise ServeError("bad_request", "resume: stream has to be the one that `accepted` told, letters and digits")
    if request.resume is not None and request.n > 1:
        raise ServeError("bad_request", "resume continues one output; ask for n: 1")
    if request.resume is not None and request.seed is None and _random(request):
        raise ServeError("bad_request", "resume needs the seed that `accepted` told, or the draws would differ")


def _check_chat(request: wire.Generate | wire.Tokenize | wire.Count) -> None:
    """What is for chats alone, and says each thing once."""
    switches = request.template_options.keys() & {"enable_thinking", "thinking"}
    if request.thinking is not None and switches:
        why = f"the template option {min(switches)} says already whether the model thinks"
        raise unmet("bad_request", why, "leave thinking out", ["thinking"])
    if request.messages is not None:
        return
    asked = {
        "template_options": bool(request.template_options),
        "tools": bool(request.tools),
        "thinking": request.thinking is not None,
        "thinking_budget": isinstance(request, wire.Generate) and request.thinking_budget is not None,
    }
    for name, given in asked.items():
        if given:
            raise ServeError("bad_request", f"{name} needs messages: nothing else goes through the chat template")


def _check_constraints(request: wire.Generate) -> None:
    kinds = ("schema", "grammar", "regex", "choice")
    given = [kind for kind in kinds if getattr(request, kind) is not None]
    if len(given) > 1:
        raise ServeError("bad_request", f"give {given[0]} or {given[1]}: a text can follow one of them")
    names = [tool.function.name for tool in request.tools]
    choice = request.tool_choice
    if choice not in ("auto", "none") and not names:
        raise ServeError("bad_request", f"tool_choice {choice!r} needs tools")
    if choice not in ("auto", "none", "required") and choice not in names:
        raise ServeError("bad_request", "tool_choice is auto, none, required or the name of one of the tools")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ServeError("bad_request", f"two tools are called {twice}; give each a name of its own")
    if taken := {"auto", "none", "required"}.intersection(names):
        raise ServeError("bad_request", f"a tool can't be called {min(taken)}, which tool_choice knows; rename it")
    if given and names and choice != "none":
        raise ServeError(
            "bad_request", f"{given[0]} leaves no room for calls: set tool_choice to none, or leave it out"
        )


def check_text(request: wire.Tokenize | wire.Count) -> None:
    """The same for a request that only wants tokens.

    Raises:
        ServeError: bad_request.
    """
    if (request.messages is None) == (request.text is None):
        kind = "count" if isinstance(request, wire.Count) else "tokenize"
        raise ServeError("bad_request", f"{kind} takes exactly one of messages and text")
    _check_chat(request)


def priority(request: wire.Generate) -> Priority:
    """The class a request is scheduled in."""
    return Priority.NORMAL if request.priority is None else Priority[request.priority.upper()]


def needs(request: wire.Generate, sampling: Sampling, *, constrained: bool = False, cached: bool = True) -> Needs:
    """What the plan of a request depends on.

    Args:
        sampling: with the model's defaults filled in.
        constrained: something rules out tokens.
        cached: it may have to do with the prefix cache.
    """
    return Needs(
        draft={"auto": Draft.AUTO, "off": Draft.OFF}.get(request.draft, Draft.NAMED),
        echo=bool(request.echo),
        logprobs=request.logprobs,
        grammar=constrained,
        fim=request.fim is not None,
        penalised=sampling.penalised,
        biased=bool(sampling.logit_bias),
        candidates=request.n,
        cached=cached,
        resumable=request.resumable,
    )


def _random(request: wire.Generate) -> bool:
    return request.temperature is None or request.temperature > 0


def freeze(
    request: wire.Generate,
    tokens: list[int],
    *,
    seed: int,
    eos: frozenset[int],
    defaults: Mapping[str, Any],
    context: int,
    vocab_size: int,
    max_tokens: int,
    stop: tuple[str, ...] = (),
    constraint: Callable[[], Constraint] | None = None,
) -> Request:
    """The immutable request.

    Args:
        tokens: the prompt's ids.
        seed: the request's own or one chosen for it.
        defaults: sampling fields of the model's generation_config.json, by the wire's names.
        context: tokens a row may hold.
        vocab_size: width of the logits.
        max_tokens: to generate where the request does not say.
        stop: strings that end the text, besides the request's own.
        constraint: see `Request`.

    Raises:
        ServeError: bad_request or context_too_long.
    """
    if not tokens:
        raise ServeError("bad_request", "the prompt is empty: it has no token to start from")
    room = context - len(tokens)
    if room < 1 or (request.max_tokens or 0) > room:
        wanted = f" and {request.max_tokens} to generate do" if request.max_tokens else " does"
        raise unmet(
            "context_too_long",
            f"a prompt of {len(tokens)} tokens{wanted} not fit the model's context of {context}",
            "lower max_tokens" if room >= 1 else "shorten the prompt",
            ["max_tokens"] if room >= 1 else [],
            prompt=len(tokens),
            context=context,
        )
    forced = tuple(request.resume.tokens) if request.resume is not None else ()
    highest = max(chain(tokens, forced, request.logit_bias))
    if highest >= vocab_size:
        raise ServeError("bad_request", f"token id {highest} is outside the model's vocabulary of {vocab_size}")
    limit = request.max_tokens or min(room, max_tokens)
    if len(forced) > limit:
        raise ServeError("bad_request", f"resume brings {len(forced)} tokens, more than the {limit} to generate")

    def setting(name: str, fallback: float) -> Any:
        asked = getattr(request, name)
        return asked if asked is not None else defaults.get(name, fallback)

    sampling = Sampling(
        temperature=float(setting("temperature", 0.0)),
        top_p=float(setting("top_p", 1.0)),
        top_k=int(setting("top_k", 0)),
        min_p=float(setting("min_p", 0.0)),
        repetition_penalty=max(float(setting("repetition_penalty", 1.0)), _LEAST_REPETITION_PENALTY),
        presence_penalty=float(setting("presence_penalty", 0.0)),
        frequency_penalty=float(setting("frequency_penalty", 0.0)),
        logit_bias=tuple(sorted(request.logit_bias.items())),
        seed=seed,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
    )
    return Request(
        prompt=tuple(tokens),
        max_tokens=limit,
        eos=eos,
        sampling=sampling,
        stop=(*request.stop, *stop),
        forced=forced,
        constraint=constraint,
        candidates=request.n,
        priority=priority(request),
        kind="chat" if request.messages is not None else "text" if request.fim is None else "fim",
    )
