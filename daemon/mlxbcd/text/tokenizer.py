"""Owns the tokenizer: text to token ids and back, and which tokens end a text, hide, or mark reasoning.

Encoding and decoding are the `tokenizers` library's; tokenizer.json is the whole truth about the vocabulary.
Nothing of transformers is imported unless a model has no tokenizer.json, and a model's own code is never run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from mlxbcd.errors import ServeError
from mlxbcd.text.decoding import DecoderKind, Decoding, piece_bytes
from mlxbcd.text.metadata import GenerationDefaults, TextMetadata

REASONING_MARKERS: Final = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Pairs around a model's reasoning, as the known families write them."""
_BRACKETS: Final = frozenset("<>[]|")
"""Control tokens are written with some of these."""


class Tokenizer:
    """One model's vocabulary. Immutable after loading; every method may be called from any thread.

    Attributes:
        decoding: what an incremental detokenizer needs to know about the decoder.
        special_tokens: the named special tokens (`bos_token`, …) as text, for the chat template.
        chat_template: Jinja source of the model's chat template, or None.
        tool_parser: mlx-lm's name for the form of the model's calls, if tokenizer_config.json has one.
        generation_defaults: sampling settings the model's authors chose; see
            `TextMetadata.generation_defaults`.
        bos_token: text of the token that begins a prompt, or None.
        bos_id: its id, or None.
        eos_ids: ids that end a generation: the configuration's (see `TextMetadata.eos_ids`) and the
            tokenizer's own.
        reasoning: the markers around reasoning, when the vocabulary has both as single tokens.
        vocab_size: one more than the highest id. The model's logits may be wider (padding).
        hidden: ids that have no text in the output: special tokens and end tokens, but never the reasoning
            markers.
    """

    def __init__(self, backend: Backend, metadata: TextMetadata) -> None:
        self._backend = backend
        self.special_tokens = metadata.special_tokens
        self.chat_template = metadata.chat_template
        self.tool_parser: object = metadata.tokenizer.get("tool_parser_type")
        self.generation_defaults: GenerationDefaults = metadata.generation_defaults
        _complete(backend, metadata)
        # A truncating or padding tokenizer.json is a leftover of training.
        backend.no_truncation()
        backend.no_padding()

        self.decoding = Decoding.of(backend.decoder)
        self.bos_token = self.special_tokens.get("bos_token")
        self.bos_id = self._id(self.bos_token)
        eos_id = self._id(self.special_tokens.get("eos_token"))
        self.eos_ids = metadata.eos_ids | ({eos_id} if eos_id is not None else frozenset())
        self.reasoning = next(
            (pair for pair in REASONING_MARKERS if all(self._id(marker) is not None for marker in pair)), None
        )
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        self.hidden = frozenset(special | self.eos_ids) - {self._id(marker) for marker in self.reasoning or ()}
        self._bytes: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, {self.decoding.kind.value}, eos {sorted(self.eos_ids)})"

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a model directory.

        Raises:
            ServeError: load_failed, with what to do.
        """
        metadata = TextMetadata.load(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            return cls(_convert(directory, metadata), metadata)
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ServeError("load_failed", f"{path} can't be read ({error}); fetch the model again") from error
        try:
            return cls(backend, metadata)
        except (TypeError, ValueError) as error:  # what the library makes of odd values in the other files
            raise ServeError(
                "load_failed", f"{directory} has odd tokens in its configuration ({error}); fetch the model again"
            ) from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. Control tokens written in the text are recognised.

        Args:
            special: add what this tokenizer adds around a raw prompt (usually BOS), unless the text already
                begins with the BOS token. False for a rendered chat template, which writes its own.

        Raises:
            ServeError: bad_request, the text has a lone surrogate.
        """
        if special and self.bos_token is not None and text.startswith(self.bos_token):
            special = False
        try:
            # The batch call releases the GIL while it works and skips offsets; the single one does neither.
            return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except TypeError:
            raise ServeError(
                "bad_request", "the text isn't valid Unicode (it has a lone surrogate); send well-formed text"
            ) from None

    def to_json(self) -> str:
        """The vocabulary as the text of a tokenizer.json."""
        return self._backend.to_str()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self._backend.get_vocab()

    @cached_property
    def controls(self) -> frozenset[str]:
        """Tokens that are no text although a text may look like them. Runs of spaces are tokens too, but text."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special or not _BRACKETS.isdisjoint(token.content))

    @property
    def specials(self) -> list[str]:
        """The special tokens, which have no text in the output."""
        added = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def showing(self, tokens: Iterable[str]) -> Tokenizer:
        """The same tokenizer, but that some tokens have text in the output although they are special."""
        other = copy(self)
        ids = {self._id(token) for token in tokens}
        other.hidden = frozenset(index for index in self.hidden if index not in ids or index in self.eos_ids)
        return other

    def begin(self) -> list[int]:
        """What this tokenizer puts before a raw prompt: usually BOS or nothing."""
        ids = self._backend.encode("").ids
        return [ids[0]] if ids and ids[0] == self.bos_id else []

    def encode_literal(self, text: str, after: str) -> list[int]:
        """Ids of a text that stands after a control token, in which control tokens are text like any other.

        Args:
            after: the control token; "" for none.
        """
        ids: list[int] = []
        for piece in self._harmless(text):
            encoded = self.encode(after + piece, special=False)
            ids += encoded[1:] if after else encoded
        return ids

    def _harmless(self, text: str) -> Iterator[str]:
        """The text in pieces that hold no control token as a whole."""
        begin = 0
        for found in self._controls.finditer(text):
            yield text[begin : found.start() + 1]
            begin = found.start() + 1
        if begin < len(text):
            yield text[begin:]

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Finds control tokens in a text."""
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._id(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a list of ids as the model's output shows it.

        `hidden` ids (special and end tokens) and ids outside the vocabulary have no text. The reasoning
        markers do: the channel splitter needs to see them. Bytes that aren't UTF-8 become U+FFFD.
        """
        shown = [index for index in ids if index not in self.hidden]
        return self._backend.decode(shown, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Text of one token as inside a text; special tokens show by name, unknown ids are empty."""
        if token_id in self.hidden:
            return self.piece(token_id) or ""
        if self.decoding.kind is DecoderKind.BYTES:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        before = self._backend.decode(self.anchor, skip_special_tokens=False)
        return self._backend.decode([*self.anchor, token_id], skip_special_tokens=False)[len(before) :]

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, or None for an id it doesn't have."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; empty for an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = piece_bytes(self.piece(token_id) or "")
        return found

    @cached_property
    def anchor(self) -> list[int]:
        """A token to put before another, so that the other isn't treated as the first of its text."""
        ids = self.encode("a", special=False)
        return ids[-1:]

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _complete(backend: Backend, metadata: TextMetadata) -> None:
    """Tell the vocabulary what only tokenizer_config.json knows: missing added tokens, and which are special.

    A token that isn't in the vocabulary only joins it under the id the configuration gives, since an id of
    our own making has no row in the model's embedding.
    """
    for index, entry in metadata.added_tokens.items():
        if backend.token_to_id(entry["content"]) is None and index == backend.get_vocab_size():
            flags = {name: entry[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in entry}
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            backend.add_tokens([token])
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [*metadata.special_tokens.values(), *metadata.extra_special_tokens]
    missing = [text for text in dict.fromkeys(named) if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _convert(directory: Path, metadata: TextMetadata) -> Backend:
    """Let transformers build the backend of a model that has only a SentencePiece or tiktoken file.

    Raises:
        ServeError: load_failed, there is no vocabulary file that it can convert.
    """
    advice = "give the model a tokenizer.json (transformers' AutoTokenizer.save_pretrained writes one)"
    if "auto_map" in metadata.tokenizer or "auto_map" in metadata.config:
        # transformers would ask on the terminal whether to run the model's code.
        raise ServeError(
            "load_failed",
            f"{directory} has no tokenizer.json and needs its own code, which is never run; {advice}",
        )
    try:
        transformers = importlib.import_module("transformers")
        converted = transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        backend = getattr(converted, "backend_tokenizer", None)
    except Exception as error:  # transformers raises whatever its converters do
        raise ServeError(
            "load_failed", f"{directory} has no tokenizer.json and none could be made ({error}); {advice}"
        ) from error
    if not isinstance(backend, Backend):
        raise ServeError(
            "load_failed", f"{directory} has no tokenizer.json and its tokenizer has no fast form; {advice}"
        )
    return backend
