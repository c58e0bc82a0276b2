"""Owns grammars: compiling one for a model's vocabulary, and following it token by token.

llguidance does the work: a matcher knows which tokens may come next as a bitmask over the vocabulary. Its limits bound
what one step may compute, so that no grammar can hold up the device thread. Nothing here touches MLX.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from mlxbcd.errors import ServeError, unmet
from mlxbcd.sampling.grammar_source import Source

Words: TypeAlias = NDArray[np.uint32]
"""A bit for each token, the lowest bit of the first word for token 0: uint32 [ceil(V / 32)]."""

_SILENT: Final = 0
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The lexer's states take a kilobyte or two each; one step is bounded to some 20 ms by the defaults."""


_LONGEST_FAULT: Final = 200
_BRACKETS: Final = frozenset("<>[]|")
"""Control tokens are written with some of these; other added tokens are text, such as runs of spaces."""
_DISGUISE: Final = "\ue000"
"""A character for private use, which stands before the names of control tokens."""
_IN_GRAMMAR: Final = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//.*|<[^<>\[\]"\s]+>')
"""Strings, regular expressions, comments and named tokens of a Lark grammar."""


class Vocabulary:
    """One model's tokens as llguidance wants them. Immutable; any thread may compile for it.

    Building takes a fraction of a second, and a few times the size of tokenizer.json in memory.

    Args:
        tokenizer: text of tokenizer.json.
        size: one more than the tokenizer's highest id.
        width: of the logits; ids beyond the tokenizer's are never allowed.
        eos: ids that end a text.

    Raises:
        ServeError: bad_request, this kind of tokenizer can't be followed.
    """

    def __init__(self, tokenizer: str, size: int, width: int, eos: Iterable[int]) -> None:
        ends = sorted(token for token in eos if token < width)
        if not ends:
            raise _unsuitable("it has no token that ends a text")
        self._controls, disguised = _disguise(tokenizer)
        try:
            self.tokens = LLTokenizer(disguised, n_vocab=max(width, size), eos_token=ends)
        except ValueError as error:
            raise _unsuitable(str(error)) from None
        self.width = width

    def __repr__(self) -> str:
        return f"Vocabulary({self.tokens.vocab_size} tokens)"

    def compile(self, source: Source) -> Grammar:
        """A grammar over these tokens. Takes milliseconds, or seconds for the largest.

        Raises:
            ServeError: grammar_invalid, with the place where it can be told.
        """
        if source.kind == "grammar":
            source = replace(source, text=_IN_GRAMMAR.sub(self._numbered, source.text))
        matcher = LLMatcher(self.tokens, source.spell(), log_level=_SILENT, limits=_LIMITS)
        if matcher.is_error():
            raise source.refusal(matcher.get_error())
        return Grammar(matcher, self)

    def _numbered(self, found: re.Match[str]) -> str:
        """A control token by its id where a grammar names it; anything else as it is."""
        index = self._controls.get(found[0])
        return found[0] if index is None else f"<[{index}]>"


def _disguise(tokenizer: str) -> tuple[dict[str, int], str]:
    """The ids of control tokens by name, and a tokenizer.json in which no text can spell them.

    A control token is no text, but llguidance would take the token for the next one where a grammar leaves nothing else
    than a text that looks like it.
    """
    content: dict[str, Any] = msgspec.json.decode(tokenizer)
    names: dict[str, str] = {}
    controls: dict[str, int] = {}
    for token in content["added_tokens"]:
        if token["special"] or not _BRACKETS.isdisjoint(token["content"]):
            controls[token["content"]] = token["id"]
            names[token["content"]] = token["content"] = _DISGUISE + token["content"]
            token["special"] = True
    model = content["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]
    return controls, msgspec.json.encode(content).decode()


def _unsuitable(reason: str) -> ServeError:
    fields = ("schema", "grammar", "regex", "choice", "tool_choice")
    why, advice = f"this model's tokenizer can't follow a grammar: {reason}", f"leave {' or '.join(fields)} out"
    return unmet("bad_request", why, advice, fields)


class Grammar:
    """A compiled grammar: matchers that follow it are copies of one. Immutable, for any thread."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def start(self) -> Matcher:
        """A matcher at the beginning of a text. Takes some microseconds."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)


class Matcher:
    """Follows a grammar along one text. One per row; not for two threads at once.

    Attributes:
        fault: why it can't go on, once it can't; it then allows an end token alone.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.fault = ""

    def __repr__(self) -> str:
        return f"Matcher({self.fault or ('complete' if self.complete else 'following')})"

    @property
    def complete(self) -> bool:
        """The text satisfies the grammar and nothing can be added to it."""
        return not self.fault and self._matcher.is_accepting() and self._matcher.is_stopped()

    def copy(self) -> Matcher:
        """Another matcher at the same place."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def mask(self) -> Words:
        """Which tokens may come next, those that end the text among them where it may end."""
        vocabulary = self._vocabulary
        words = np.zeros(word_count(vocabulary.tokens.vocab_size), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        return words[: word_count(vocabulary.width)]

    def accept(self, *tokens: int) -> None:
        """The next tokens of the text. One that the grammar does not allow is a `fault`."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def retract(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        self._matcher.rollback(count)
        self._check()

    def forced(self) -> list[int]:
        """The tokens that have to come next, as far as there is no choice."""
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            self.fault = self._matcher.get_error().partition("\n")[0][:_LONGEST_FAULT]


def word_count(width: int) -> int:
    """Words of a mask over `width` tokens."""
    return (width + 31) // 32


def all_but(tokens: Iterable[int], width: int) -> Words:
    """A mask that allows all tokens but some."""
    words = np.full(word_count(width), 0xFFFFFFFF, dtype=np.uint32)
    for token in tokens:
        if token < width:
            words[token // 32] &= ~np.uint32(1 << (token % 32))
    return words


def only(token: int, width: int) -> Words:
    """A mask that allows one token."""
    words = np.zeros(word_count(width), dtype=np.uint32)
    words[token // 32] = 1 << (token % 32)
    return words
