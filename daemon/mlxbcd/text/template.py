"""Owns rendering a chat template: from messages to the text of a prompt, or to a clear refusal, in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from jinja2 import Template
from jinja2.exceptions import TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from mlxbcd.errors import ServeError, unmet
from mlxbcd.text.deadline import Overtime, run_within
from mlxbcd.text.sandbox import OverLimit, Refusal, Sandbox, render

R = TypeVar("R")

TIME_LIMIT: Final = 2.0
"""Seconds one rendering may take."""
_RESERVED: Final = frozenset({"messages", "add_generation_prompt"})
_RAW: Final = "send a raw prompt instead"


class ChatTemplate:
    """One model's chat template, compiled once. Rendering is thread-safe and blocks: not for the event loop.

    Args:
        source: Jinja source, or None for a model that has no template. A source that doesn't compile is
            reported by `render`: the model can still serve raw prompts.
        specials: text of the named special tokens (`bos_token`, …), which templates use by name.
        seconds: time limit of one rendering.
    """

    variables: frozenset[str]
    """Names that the template reads from outside."""

    def __init__(self, source: str | None, specials: Mapping[str, str], *, seconds: float = TIME_LIMIT) -> None:
        self._specials = dict(specials)
        self._seconds = seconds
        self._template: Template | None = None
        self._fault: ServeError | None = None
        self.variables = frozenset()
        if source is None:
            self._fault = ServeError("bad_request", f"this model has no chat template; {_RAW}")
            return
        try:
            self._template, self.variables = self._limited(lambda: _compile(source))
        except ServeError as error:
            self._fault = error

    def __repr__(self) -> str:
        return f"ChatTemplate({'ready' if self._fault is None else self._fault.message})"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a prompt that ends where the assistant's turn begins.

        Args:
            messages: plain data (`role`, `content`, …). A field that is None is treated as absent.
            tools: definitions of functions.
            options: more variables for the template, by name; they may replace special tokens, `tools` and
                `documents`.

        Raises:
            ServeError: bad_request: no template, a template that refuses these messages (with its own words),
                fails, takes too long or makes more than the sandbox permits, or an option with a reserved
                name.
        """
        if self._template is None:
            assert self._fault is not None
            raise ServeError(self._fault.code, self._fault.message)
        if taken := _RESERVED & options.keys():
            why = f"a template option can't be named {min(taken)!r}"
            raise unmet("bad_request", why, "rename it", ["template_options"])
        variables = {
            "tools": list(tools) if tools else None,
            "documents": None,
            **self._specials,
            **options,
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "add_generation_prompt": True,
        }
        template = self._template
        return self._limited(lambda: render(template, variables))

    def _limited(self, step: Callable[[], R]) -> R:
        try:
            return run_within(self._seconds, step)
        except Overtime:
            problem = f"took longer than {self._seconds:g} s and was stopped; send less, or a raw prompt"
        except Refusal as refusal:
            problem = f"refuses these messages: {refusal.message}"
        except OverLimit as error:
            problem = f"makes too much text ({error.message}); {_RAW}"
        except TemplateSyntaxError as error:
            problem = f"has an error in line {error.lineno}: {error.message}; {_RAW}"
        except Exception as error:
            problem = f"failed ({type(error).__name__}: {error}); {_RAW}"
        raise ServeError("bad_request", f"this model's chat template {problem}") from None


def _compile(source: str) -> tuple[Template, frozenset[str]]:
    sandbox = Sandbox()
    return sandbox.from_string(source), frozenset(find_undeclared_variables(sandbox.parse(source)))
