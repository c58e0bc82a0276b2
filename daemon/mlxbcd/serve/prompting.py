"""Owns what comes between a request and its frozen form: prompt tokens, what rules tokens out, and text stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlxbc import wire
from mlxbcd.errors import ServeError, unmet
from mlxbcd.plan.request import Request
from mlxbcd.residency.grammars import Grammars
from mlxbcd.residency.words import Words
from mlxbcd.sampling.constraint import Reasoning, RowConstraint
from mlxbcd.sampling.grammar import Grammar
from mlxbcd.sampling.grammar_source import Source
from mlxbcd.text.channels import ChannelSplitter, opens_inside
from mlxbcd.text.chat import definitions, has_calls, thinking_options, turns
from mlxbcd.text.fim import FimStyle, Form, fim_prompt, find
from mlxbcd.text.stable import Messages, Stable, stable
from mlxbcd.text.stage import TextStage
from mlxbcd.text.tool_choice import call_grammar
from mlxbcd.text.tools import CallSplitter
from mlxbcd.text.workers import INLINE_CHARACTERS, TextWorkers

FIM_TOKENS: Final = 256
"""Tokens to generate at a place in a file where the request does not say."""
FIM_LINE_TOKENS: Final = 64
"""The same for a single line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request's prompt.

    Attributes:
        text: what the model sees, for a raw prompt and a chat.
        inside: it has opened a block of reasoning.
        ends: ids, besides the model's end tokens, that end the output.
        stop: strings, besides the request's own, that end it.
        tools: the definitions of what may be called.
        form: how a place in a file was put to the model.
    """

    tokens: list[int]
    text: str = ""
    inside: bool = False
    ends: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    tools: Sequence[dict[str, Any]] = ()
    form: Form | None = None


@dataclass(frozen=True, slots=True)
class Prompter:
    """Makes prompts, constraints and stages. Long work is done away from the loop's thread."""

    workers: TextWorkers
    fim: str = "auto"
    """How models are asked for what belongs at a place in a file: see `text.fim.find`."""

    async def prompt(self, words: Words, request: wire.Generate, context: int) -> Prompt:
        """The prompt of a request.

        Args:
            context: tokens a row may hold.

        Raises:
            ServeError: bad_request, it can't be had of this model.
        """
        if request.messages is not None:
            tools = request.tools if request.tool_choice != "none" else []
            return await self.chat(words, request.messages, request.template_options, tools, request.thinking)
        if request.fim is not None:
            # A long file is cut alike for one line, for many, and for priming: each finds what another has computed.
            return await self._fim(words, request.fim, context - max(max_tokens(request, 0), FIM_TOKENS))
        assert request.prompt is not None
        return Prompt(tokens=await self.workers.run(words.tokenizer.encode, request.prompt), text=request.prompt)

    async def chat(
        self,
        words: Words,
        messages: Sequence[wire.Message],
        options: Mapping[str, Any],
        tools: Sequence[wire.Tool] = (),
        thinking: bool | None = None,
    ) -> Prompt:
        """A chat as the model's template renders it.

        Raises:
            ServeError: bad_request, the template has no place for that, or refuses it.
        """
        tokenizer, template = words.tokenizer, words.template
        switches = thinking_options(thinking, template.variables, tokenizer.reasoning)
        if tools and "tools" not in template.variables:
            message = "this model's chat template has no place for tools; describe them in a message instead"
            raise ServeError("bad_request", message)
        if tools and words.calls is None:
            raise ServeError("bad_request", "how this model writes tool calls isn't known; leave tools out")
        defined = definitions(tools)

        def render(*, parsed: bool = True) -> str:
            return template.render(turns(messages, parsed=parsed), {**options, **switches}, defined)

        def make() -> Prompt:
            try:
                text = render()
            except ServeError:
                if not has_calls(messages):
                    raise
                # Some templates want the arguments of calls as they came.
                text = render(parsed=False)
            tokens = tokenizer.encode(text, special=False)
            return Prompt(tokens=tokens, text=text, inside=opens_inside(text, tokenizer.reasoning), tools=defined)

        return await self.workers.offload_text(sum(len(message.content) for message in messages), make)

    async def stable(self, words: Words, request: wire.Generate, prompt: Prompt, *, next_turn: bool) -> Stable:
        """How much of a request's prompt others will begin with; of the next turn only if that matters."""
        messages = request.messages
        if messages is None:
            return Stable(len(prompt.tokens))
        tokenizer, template = words.tokenizer, words.template
        switches = thinking_options(request.thinking, template.variables, tokenizer.reasoning)

        def render(chat: Messages) -> list[int]:
            text = template.render(list(chat), {**request.template_options, **switches}, prompt.tools)
            return tokenizer.encode(text, special=False)

        def find_out() -> Stable:
            return stable(turns(messages), prompt.tokens, render, tools=bool(prompt.tools), next_turn=next_turn)

        return await self.workers.offload_text(sum(len(message.content) for message in messages), find_out)

    async def constraint(
        self, words: Words, grammars: Grammars, request: wire.Generate, prompt: Prompt, width: int
    ) -> RowConstraint | None:
        """What rules out tokens of the request's rows; it has accepted the tokens of an earlier run.

        Args:
            width: of the logits.

        Raises:
            ServeError: grammar_invalid; bad_request, the model can't do that, or the earlier run didn't.
        """
        tokenizer = words.tokenizer
        source, leads = _source(words, request, prompt)
        reasoning = None
        if request.messages is not None and tokenizer.reasoning is not None:
            opening, closing = (tokenizer.token_id(marker) for marker in tokenizer.reasoning)
            assert opening is not None
            assert closing is not None
            reasoning = Reasoning(opening, closing, request.thinking_budget)
        if request.thinking_budget is not None and reasoning is None:
            why, advice = "this model marks no reasoning", "leave thinking_budget out"
            raise unmet("bad_request", why, advice, ["thinking_budget"])
        if source is None and request.thinking_budget is None:
            return None
        if source is not None and request.thinking is False and not prompt.inside:
            reasoning = None
        grammar: Grammar | None = await grammars.get(source) if source is not None else None
        ends = tokenizer.eos_ids | prompt.ends
        row = RowConstraint(
            width,
            ends,
            grammar.start() if grammar is not None else None,
            reasoning,
            inside=prompt.inside,
            leads=leads,
        )
        if request.resume is None:
            return row
        known = [token for token in request.resume.tokens if token not in ends]
        return await self.workers.offload(_resumed, row, known)

    async def sources(self, words: Words, texts: Sequence[str], width: int) -> tuple[tuple[int, ...], ...]:
        """Token ids of texts that an answer may repeat; below zero where the model has no such token.

        Args:
            width: of the logits.
        """

        def tokens() -> tuple[tuple[int, ...], ...]:
            encoded = (words.tokenizer.encode(text, special=False) for text in texts)
            return tuple(tuple(token if token < width else -1 for token in ids) for ids in encoded)

        return await self.workers.offload_text(sum(map(len, texts)), tokens)

    async def stages(
        self, words: Words, request: wire.Generate, prompt: Prompt, frozen: Request, stream: str
    ) -> list[TextStage]:
        """A text stage for each candidate; they have seen the tokens of an earlier run."""

        def make() -> list[TextStage]:
            made = [_stage(words, request, prompt, frozen, f"{stream}/{number}") for number in range(request.n)]
            made[0].prime(frozen.forced)
            return made

        if frozen.forced or sum(map(len, frozen.stop)) > INLINE_CHARACTERS:
            return await self.workers.offload(make)
        return make()

    def style(self, words: Words) -> FimStyle | None:
        """How a model is asked to fill in a middle, if it can be."""
        return words.fim if self.fim == "auto" else find(words.tokenizer, self.fim)

    async def _fim(self, words: Words, fim: wire.Fim, room: int) -> Prompt:
        def make() -> Prompt:
            made = fim_prompt(fim, self.style(words), words.tokenizer, max(room, 1))
            return Prompt(tokens=made.tokens, ends=made.ends, stop=made.stop, form=made.form)

        length = len(fim.prefix) + len(fim.suffix) + sum(len(excerpt.text) for excerpt in fim.context)
        return make() if length <= INLINE_CHARACTERS else await self.workers.offload_text(length, make)


def max_tokens(request: wire.Generate, fallback: int) -> int:
    """Tokens to generate where the request does not say: `fallback`, or what a place in a file needs."""
    if request.max_tokens is not None:
        return request.max_tokens
    if request.fim is None:
        return fallback
    return FIM_LINE_TOKENS if request.fim.single_line else FIM_TOKENS


def _source(words: Words, request: wire.Generate, prompt: Prompt) -> tuple[Source | None, bool]:
    """The grammar of a request, and whether it only leads to a free text."""
    if request.schema is not None:
        return Source.of_schema(request.schema), False
    if request.choice is not None:
        return Source.of_choices(request.choice), False
    if request.grammar is not None:
        return Source("grammar", request.grammar), False
    if request.regex is not None:
        return Source("regex", request.regex), False
    if prompt.tools and request.tool_choice != "auto":
        assert words.calls is not None
        tokenizer = words.tokenizer

        def control(token: str) -> int | None:
            return tokenizer.token_id(token) if token in tokenizer.controls else None

        return Source("grammar", call_grammar(words.calls, prompt.tools, request.tool_choice, control)), True
    return None, False


def _resumed(row: RowConstraint, tokens: Sequence[int]) -> RowConstraint:
    row.accept(*tokens)
    if row.fault:
        raise ServeError("bad_request", "the tokens of resume don't follow this grammar; resume with the same request")
    return row


def _stage(words: Words, request: wire.Generate, prompt: Prompt, frozen: Request, stream: str) -> TextStage:
    tokenizer = words.tokenizer
    follows = any(kind is not None for kind in (request.schema, request.grammar, request.regex, request.choice))
    # What belongs in a file has no reasoning in it, and neither has a text that has to begin with its grammar.
    thinks = request.messages is not None and (request.thinking is not False or prompt.inside)
    speaks = request.fim is not None or (follows and not thinks)
    channels = ChannelSplitter(None if speaks else tokenizer.reasoning, inside=prompt.inside, first=follows)
    calls = CallSplitter(words.calls, prompt.tools, stream) if prompt.tools and words.calls is not None else None
    return TextStage(
        tokenizer,
        frozen.stop,
        channels,
        calls,
        continues=request.fim is not None,
        trimmed=request.fim is not None,
    )
